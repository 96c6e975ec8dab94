from __future__ import annotations

import errno
import os

import pyarrow as pa
import pytest

from specformer.errors import UserError
from specformer.shards import ShardWriter, read_shards, read_table

SCHEMA = pa.schema([("id", pa.string()), ("ids", pa.list_(pa.int32()))])


def rows(first: int, last: int) -> list[dict]:
    return [{"id": f"r{i}", "ids": list(range(i))} for i in range(first, last)]


def writer(folder, **settings) -> ShardWriter:
    return ShardWriter(folder, SCHEMA, rows_per_shard=4, settings=settings or {"tokens": 8})


def fill(folder, some: list[dict]) -> None:
    with writer(folder) as shards:
        for row in some:
            shards.add(row)


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_come_back_as_they_were(tmp_path):
    fill(tmp_path, rows(0, 10))
    assert files(tmp_path) == ["fingerprint.json", *(f"shard-0000{i}.parquet" for i in range(3))]
    assert read_shards(tmp_path) == rows(0, 10)


def test_a_second_run_goes_on(tmp_path):
    fill(tmp_path, rows(0, 6))
    with writer(tmp_path) as shards:
        assert shards.done == {f"r{i}" for i in range(6)}
        for row in rows(6, 9):
            shards.add(row)
    assert read_shards(tmp_path) == rows(0, 9)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_interrupted_rows_are_kept(tmp_path, stop):
    with pytest.raises(stop), writer(tmp_path) as shards:
        for row in rows(0, 6):
            shards.add(row)
        raise stop
    assert read_shards(tmp_path) == rows(0, 6)


@pytest.mark.parametrize("damage", [b"", b"PAR1 nonsense", None])
def test_damaged_shard_is_redone_when_writing_and_fatal_when_reading(tmp_path, capsys, damage):
    fill(tmp_path, rows(0, 12))
    middle = tmp_path / "shard-00001.parquet"
    middle.write_bytes(middle.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(UserError, match="shard-00001.parquet is damaged or half-written"):
        read_shards(tmp_path)
    with writer(tmp_path) as shards:
        assert "shard-00001.parquet is damaged" in capsys.readouterr().out
        assert shards.done == {f"r{i}" for i in (*range(4), *range(8, 12))}
        for row in rows(4, 8):
            shards.add(row)
    assert sorted(read_shards(tmp_path), key=lambda row: len(row["ids"])) == rows(0, 12)


def test_other_settings_start_afresh(tmp_path, capsys):
    fill(tmp_path, rows(0, 4))
    with writer(tmp_path, tokens=16) as shards:
        assert not shards.done
    assert "tokens changed" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds no shards"):
        read_shards(tmp_path)


def test_full_disk_leaves_no_half_shard(tmp_path, monkeypatch):
    fill(tmp_path, rows(0, 4))
    whole = read_shards(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="no disk space left.*shard-00001"):
            fill(tmp_path, rows(4, 10))
    assert files(tmp_path) == ["fingerprint.json", "shard-00000.parquet"]
    assert read_shards(tmp_path) == whole
    fill(tmp_path, rows(4, 10))
    assert read_shards(tmp_path) == rows(0, 10)


def test_left_over_temporary_files_go(tmp_path):
    (tmp_path / ".shard-00000.parquet.tmp").write_bytes(b"half")
    fill(tmp_path, rows(0, 2))
    assert files(tmp_path) == ["fingerprint.json", "shard-00000.parquet"]


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="is missing"):
        read_table(tmp_path / "train.parquet")
