"""The loop under torchrun, two CPU processes (gloo): the same loss curve as one process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "distributed_train.py"


def run(folder, rows, out, processes, stop=0, kind="specformer", vocabulary=0):
    """Train in `processes` processes; the log's losses."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"),
            *("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"),
            *(SCRIPT, folder, rows, out, str(stop), kind, str(vocabulary)),
        ],
        check=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
    )
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def rows(tmp_path):
    rng = random.Random(0)
    data = [
        {
            "id": f"d{i:02}",
            "prompt_ids": rng.choices(range(3, 320), k=rng.randint(2, 12)),
            "answer_ids": rng.choices(range(3, 320), k=rng.randint(4, 20)),
        }
        for i in range(24)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(data))
    return tmp_path / "rows.json"


def test_two_processes_learn_what_one_learns_and_resume_across_counts(tiny_llama_folder, rows, tmp_path):
    one = run(tiny_llama_folder, rows, tmp_path / "one", 1)
    two = run(tiny_llama_folder, rows, tmp_path / "two", 2)
    run(tiny_llama_folder, rows, tmp_path / "killed", 1, stop=3)
    resumed = run(tiny_llama_folder, rows, tmp_path / "killed", 2)
    for other in (two, resumed):
        assert [r["step"] for r in other] == [r["step"] for r in one] == [1, 2, 3, 4]
        assert [r["tokens"] for r in other] == [r["tokens"] for r in one]
        for mine, theirs in zip(one, other, strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
    assert one[-1]["loss"] < one[0]["loss"]


def test_an_own_head_learns_in_two_processes_what_it_learns_in_one(tiny_llama_folder, rows, tmp_path):
    """Its weight takes no part in the forward pass that DDP wraps; its gradient is averaged all the same."""
    options = {"kind": "eagle3", "vocabulary": 200}
    one = run(tiny_llama_folder, rows, tmp_path / "one", 1, **options)
    two = run(tiny_llama_folder, rows, tmp_path / "two", 2, **options)
    for mine, theirs in zip(one, two, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
