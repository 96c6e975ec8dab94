"""Training under torchrun, two CPU processes (gloo): the same loss curve as one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from specformer import pipeline
from specformer.distill import ROWS
from specformer.errors import UserError
from specformer.shards import write_table

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
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
        env=ONE_THREAD,
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


@pytest.fixture
def profile(tiny_llama_folder, rows, tmp_path):
    """A repository whose smoke profile has a tiny base and answers; opens it with a `study.launch`."""
    root = tmp_path / "repository"
    shutil.copytree(pipeline.find_root() / "params" / "smoke", root / "params" / "smoke", symlinks=True)
    (root / "dvc.yaml").write_text("stages: {}")
    params = root / "params" / "smoke" / "params.yaml"
    text = params.read_text().replace("vocabulary: 1024", "vocabulary: 100")
    answers = [row | {"text": "", "finish_reason": "stop"} for row in json.loads(rows.read_text())]
    data = root / "data" / "smoke"
    shutil.copytree(tiny_llama_folder, data / "base")
    for split, part in (("train", answers), ("validation", answers[:3])):
        write_table(
            pa.Table.from_pylist([{"id": row["id"]} for row in part]), data / f"corpus/{split}.parquet"
        )
        for kind in ("distilled", "reference"):
            write_table(pa.Table.from_pylist(part, ROWS), data / kind / split / "shard-00000.parquet")

    def open_with(launch):
        params.write_text(text.replace("launch: null", f"launch: {launch}"))
        return pipeline.open_run("smoke", root)

    return open_with


def losses(run, name):
    lines = (run.trained[name, 0] / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_stage_trains_in_the_processes_that_study_launch_starts(profile, tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, ONE_THREAD[name])
    monkeypatch.setenv("PYTHONPATH", str(pipeline.find_root()))
    run = profile("null")
    pipeline._train(run, "specformer_plus", 0)
    one = losses(run, "specformer_plus")
    shutil.rmtree(run.paths.drafts)
    python = f"{sys.executable} -m torch.distributed.run --nproc_per_node 2"
    pipeline._train(
        profile(f"{python} --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:0"), "specformer_plus", 0
    )
    assert losses(run, "specformer_plus") == pytest.approx(one, rel=1e-5) and len(one) == 12
    with pytest.raises(
        UserError, match="smoke trains no larger with seed 0; .*: specformer_plus with seed 0"
    ):
        pipeline._train(profile("null"), "larger", 0)
    with pytest.raises(
        UserError, match="study.launch: .*-m specformer train smoke larger --seed 0 ended with"
    ):
        pipeline._train(profile(python), "larger", 0)
    with pytest.raises(UserError, match="'nothing-here' does not start"):
        pipeline._train(profile("nothing-here"), "specformer", 0)


def test_two_nodes_train_what_one_process_trains(profile):
    """Two torchruns that meet at an address, as on two machines."""
    run = profile("null")
    environment = ONE_THREAD | {"PYTHONPATH": str(pipeline.find_root())}
    command = ("-m", "specformer", "train", "smoke", "specformer")
    subprocess.run([sys.executable, *command], cwd=run.root, env=environment, check=True, timeout=240)
    one = losses(run, "specformer")
    shutil.rmtree(run.paths.drafts)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"),
                *(f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}", *command),
            ],
            cwd=run.root,
            env=environment,
        )
        for rank in range(2)
    ]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    assert losses(run, "specformer") == pytest.approx(one, rel=1e-5)
