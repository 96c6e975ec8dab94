"""Rows kept in Parquet shards as they are made, so that a killed run loses next to nothing.

A shard appears under its name only when it is whole and on the disk.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specformer.errors import UserError

FINGERPRINT = "fingerprint.json"
PATTERN = "shard-*.parquet"


def write_atomically(path: Path, write: Any) -> None:
    """Call `write(temporary path)`, then put the file in place of `path`, whole or not at all.

    Raises UserError when the disk is full; `path` then is as it was before.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no disk space left while writing {path}: nothing half-written was kept, what "
                "was written before is intact; free some space and start again"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_table(table: pa.Table, path: Path) -> None:
    """Write one Parquet file atomically (see `write_atomically`), making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of one Parquet file; UserError when it is missing, damaged or half-written."""
    if not path.is_file():
        raise UserError(f"{path} is missing: run the stage that makes it")
    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is damaged or half-written ({str(error).splitlines()[0]}): run the stage that "
            "makes it again"
        ) from error


class ShardWriter:
    """Append rows to a folder of shards, going on from what an earlier run left there.

    schema: the rows' Arrow schema, with a column `id`. rows_per_shard: rows kept in memory, and
    lost when the process is killed, at most. settings: whatever the rows depend on; rows that
    were made with other settings are thrown away with a message, and so are shards that cannot be
    read. `done` holds the ids that earlier runs stored. Use as a context manager: leaving it, also
    by Ctrl-C or an error of the caller, stores the rows added so far.
    """

    def __init__(
        self,
        folder: str | Path,
        schema: pa.Schema,
        *,
        rows_per_shard: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.folder = Path(folder)
        self.schema = schema
        self.rows_per_shard = rows_per_shard
        self.done: set[str] = set()
        self._buffer: list[Mapping[str, Any]] = []
        self._full = False
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        self._check_fingerprint(json.loads(json.dumps(settings)))
        self._next = self._take_stock()

    def _check_fingerprint(self, settings: dict[str, Any]) -> None:
        path = self.folder / FINGERPRINT
        try:
            made_with = json.loads(path.read_text()) if path.exists() else None
        except ValueError:
            made_with = {}
        if made_with == settings:
            return
        shards = list(self.folder.glob(PATTERN))
        if shards:
            old = made_with or {}
            changed = sorted(key for key in old.keys() | settings.keys() if old.get(key) != settings.get(key))
            print(
                f"{self.folder}: its {len(shards)} shards were made with other settings "
                f"({', '.join(changed)} changed): starting afresh"
            )
        for shard in shards:
            shard.unlink()
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        write_atomically(path, lambda temporary: temporary.write_text(text))

    def _take_stock(self) -> int:
        """Fill `done`, drop damaged shards, and return the next free shard number."""
        following = 0
        for shard in sorted(self.folder.glob(PATTERN)):
            following = int(shard.stem.removeprefix("shard-")) + 1
            try:
                rows = read_table(shard)
            except UserError as error:
                print(f"{error.args[0].split(' (')[0]}: its rows are made again")
                shard.unlink()
                continue
            self.done.update(row["id"] for row in rows)
        return following

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row; every `rows_per_shard` rows a shard is written. UserError when disk-full."""
        self._buffer.append(row)
        if len(self._buffer) >= self.rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write the rows added since the last shard, if any."""
        if not self._buffer:
            return
        table = pa.Table.from_pylist([dict(row) for row in self._buffer], self.schema)
        try:
            write_table(table, self.folder / f"shard-{self._next:05d}.parquet")
        except (OSError, UserError):
            self._full = True
            raise
        self._next += 1
        self._buffer.clear()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._full:
            self.flush()


def iter_shards(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder of shards in the order they were stored, one shard in memory at a time.

    Raises UserError when there are none, or when a shard is damaged: running the stage that made
    it again replaces just that one.
    """
    shards = sorted(Path(folder).glob(PATTERN))
    if not shards:
        raise UserError(f"{folder} holds no shards: run the stage that makes them")
    for shard in shards:
        yield from read_table(shard)


def read_shards(folder: str | Path) -> list[dict[str, Any]]:
    """All rows of `iter_shards`."""
    return list(iter_shards(folder))


def is_dropped(row: Mapping[str, Any]) -> bool:
    """Whether a prompt was given up: its row has no answer (finish_reason says why)."""
    return row.get("answer_ids") == []


def read_rows(
    folder: str | Path, dialogues: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Rows of a folder of shards in the order of `dialogues` (rows with the same ids; else by id), without
    dropped ones.

    Raises UserError when shards are missing or damaged, or when a dialogue has no row yet.
    """
    rows = {row["id"]: row for row in read_shards(folder)}
    wanted = sorted(rows) if dialogues is None else [row["id"] for row in dialogues]
    missing = [name for name in wanted if name not in rows]
    if missing:
        raise UserError(
            f"{folder} has no rows for {len(missing)} of {len(wanted)} dialogues (for example "
            f"{missing[0]}): run the distill stage to its end"
        )
    return [rows[name] for name in wanted if not is_dropped(rows[name])]
