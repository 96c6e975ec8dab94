"""What the machine decides: threads and dtype by a measurement that is made once."""

from __future__ import annotations

import json

import psutil
import pytest
import torch

from specformer import hardware
from specformer.base import load_base
from specformer.hardware import Speed

CACHE_FILE = hardware.cache_file
SPEEDS = [
    Speed(1, "float32", 4.0, 16.0),
    Speed(2, "float32", 2.0, 8.0),
    Speed(4, "float32", 6.0, 24.0),
    Speed(1, "bfloat16", 1.0, 2.0),
    Speed(2, "bfloat16", 1.0, 8.0),
    Speed(4, "bfloat16", 6.0, 24.0),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 4 threads whose speeds are SPEEDS, with an empty cache; says what was measured."""
    measured = []

    def measure(hidden, intermediate, threads):
        measured.append((hidden, intermediate, threads))
        return SPEEDS

    monkeypatch.setattr(hardware, "cache_file", CACHE_FILE)  # the real one
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(hardware, "_thread_counts", lambda: [1, 2, 4])
    monkeypatch.setattr(hardware, "measure_speeds", measure)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 3.0)
    return measured


def test_the_fastest_is_chosen_and_measured_once(machine):
    assert hardware.fastest(64, 128) == (1, "bfloat16")
    assert hardware.fastest(64, 128) == (1, "bfloat16")
    assert machine == [(64, 128, [1, 2, 4])]
    ((key, records),) = json.loads(hardware.cache_file().read_text()).items()
    assert [Speed(**r) for r in records] == SPEEDS and "64 x 128" in key
    hardware.fastest(96, 128)  # other matmuls, measured too; what was known stays
    assert len(machine) == 2 and len(json.loads(hardware.cache_file().read_text())) == 2


def test_what_a_user_fixes_wins(machine, monkeypatch):
    assert hardware.fastest(64, 128, "float32") == (2, "float32")
    assert hardware.fastest(64, 128, "float16") == (4, "float16")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert hardware.fastest(64, 128) == (2, "bfloat16")
    assert len(machine) == 1
    hardware.cache_file().unlink()
    assert hardware.fastest(64, 128, "float32") == (2, "float32")
    assert len(machine) == 1, "nothing was left to choose"


def test_a_near_tie_goes_to_what_torch_does(machine, monkeypatch):
    tie = [Speed(2, "float32", 1.0, 1.0), Speed(4, "float32", 1.05, 1.05), Speed(4, "bfloat16", 1.08, 1.08)]
    monkeypatch.setattr(hardware, "measure_speeds", lambda *asked: tie)
    assert hardware.fastest(64, 128) == (4, "bfloat16")
    assert hardware.fastest(64, 128, "float32") == (4, "float32")


def test_another_torch_measures_again(machine, monkeypatch):
    hardware.fastest(64, 128)
    monkeypatch.setattr(torch, "__version__", "99.0")
    hardware.fastest(64, 128)
    assert len(machine) == 2


def test_a_busy_machine_is_not_measured(machine, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 90.0)
    for has, dtype in ((True, hardware._dtypes()[-1]), (False, "float32")):
        monkeypatch.setattr(hardware, "_has_bfloat16", lambda has=has: has)
        assert hardware.fastest(64, 128) == (4, dtype)
        assert hardware.fastest(64, 128, "float32") == (4, "float32")
    assert not machine and not hardware.cache_file().exists()


@pytest.mark.parametrize("text", ["{half", "[]", '{"key": 3}', "\x00"])
def test_a_damaged_cache_is_measured_again(machine, text):
    hardware.fastest(64, 128)
    file = hardware.cache_file()
    file.write_text(text.replace("key", next(iter(json.loads(file.read_text())))))
    assert hardware.fastest(64, 128) == (1, "bfloat16")
    assert len(machine) == 2
    assert hardware.fastest(64, 128) == (1, "bfloat16")
    assert len(machine) == 2, "the file was not mended"


def test_a_cache_that_cannot_be_written_is_no_fault(machine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hardware.fastest(64, 128) == hardware.fastest(64, 128) == (1, "bfloat16")
    assert len(machine) == 2


def test_measuring_for_real(monkeypatch):
    """Every dtype that this CPU has, and torch's threads as they were."""
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "PROBE_PARAMETERS", 2**18)
    speeds = hardware.measure_speeds(64, 128, [1, 2])
    assert {s.threads for s in speeds} == {1, 2} and torch.get_num_threads() == before
    assert "float32" in {s.dtype for s in speeds} <= {"float32", "bfloat16"}
    assert all(0 < s.rows_1 < 10 and 0 < s.rows_16 < 10 for s in speeds)
    monkeypatch.setattr(hardware, "_has_bfloat16", lambda: False)
    assert {s.dtype for s in hardware.measure_speeds(64, 128, [1])} == {"float32"}


def test_loading_a_base_uses_the_choice(tiny_llama_folder, monkeypatch):
    asked, threads = [], []
    monkeypatch.setattr(hardware, "fastest", lambda *sizes: asked.append(sizes) or (3, "bfloat16"))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert load_base(tiny_llama_folder, device="cpu").dtype == torch.bfloat16
    assert asked == [(64, 128, "auto")] and threads == [3]
