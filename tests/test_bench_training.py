"""The training benchmark: both loops train the same, its record, and the memory formula against peaks."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys

import pyarrow as pa
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specformer import cli, pipeline
from specformer.bench_training import KINDS, Loops, Workload
from specformer.distill import ROWS
from specformer.probes import MIB, peak_mib
from specformer.settings import load_settings
from specformer.shards import write_table


def random_rows(count, vocabulary=320, answers=(5, 40)):
    rng = random.Random(0)

    def ids(shortest, longest):
        return [rng.randrange(vocabulary) for _ in range(rng.randint(shortest, longest))]

    return [{"id": f"d{i}", "prompt_ids": ids(1, 6), "answer_ids": ids(*answers)} for i in range(count)]


def workload(folder, rows, **changes):
    options = {
        "draft": {"draft_length": 5},
        "steps": 2,
        "sequences_per_step": 6,
        "micro_batch": 3,
        "max_length": 64,
        "anchor_fraction": 0.5,
        "anchor_decay": 0.8,
        "lr": 1e-3,
        "clip": 1.0,
        "dtype": "float32",
        "device": "cpu",
    }
    return Workload(str(folder), rows, (0, 0.5, -2, -1), **options | changes)


@pytest.mark.parametrize("folder", ["tiny_llama_folder", "tiny_qwen3_folder"])
def test_all_loops_have_the_same_loss_and_gradients(folder, request, tmp_path):
    loops = Loops(workload(request.getfixturevalue(folder), random_rows(12)), tmp_path)
    for p in loops.draft.parameters():  # off the identity, where half of the gradients vanish
        p.data += 0.02 * torch.randn_like(p)
    batches = loops.steps[0]
    assert len(batches) == 2 and any(len({len(s.ids) for s in b.sequences}) > 1 for b in batches)
    found = {}
    for kind in (*KINDS, "cached"):  # the second time from disk
        loops.draft.zero_grad()
        loss = loops.gradients(kind, batches)
        found[kind] = loss, [p.grad.clone() for p in loops.draft.parameters() if p.grad is not None]
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    loss, gradients = found["plain"]
    assert loss > 1 and len(gradients) == len(list(loops.draft.parameters()))
    for kind in ("computed", "cached", "profile"):
        assert found[kind][0] == pytest.approx(loss, rel=1e-5)
        for ours, plain in zip(found[kind][1], gradients, strict=True):
            assert (ours - plain).norm() < 1e-4 * plain.norm()


def test_the_profiles_loop_scores_its_own_vocabulary(tiny_llama_folder, tmp_path):
    """As the whole one does when all labels are in it; fewer labels where some are not."""
    rows = random_rows(12, 100)
    work = workload(tiny_llama_folder, rows, draft={"draft_length": 5, "vocabulary": 60})
    loops = Loops(work, tmp_path)
    head = loops.draft.head(loops.target)
    assert head.weight.shape[0] == 60
    labels = torch.cat([batch.labels for batch in loops.steps[0]])
    known = (head.to_index(labels) >= 0).sum()
    assert 0 < known < (labels >= 0).sum()
    assert 0 < loops.gradients("profile", loops.steps[0]) < loops.gradients("cached", loops.steps[0])


def test_the_command_records_finite_ratios(tiny_llama_folder, tmp_path, monkeypatch, capsys):
    root = tmp_path / "repository"
    settings = load_settings("smoke", pipeline.find_root())
    settings = settings.model_copy(update={"draft": settings.draft.model_copy(update={"vocabulary": 64})})
    run = pipeline.Run("smoke", root, settings)
    shutil.copytree(tiny_llama_folder, run.paths.base)
    rows = random_rows(6)
    write_table(pa.Table.from_pylist(rows, ROWS), run.paths.distilled / "train" / "shard-00000.parquet")
    monkeypatch.setattr(pipeline, "open_run", lambda profile: run)
    monkeypatch.setattr(
        sys, "argv", ["specformer", "bench", "training", "smoke", "--steps", "3", "--repeats", "2"]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    record = json.loads((run.paths.results / "training_bench.json").read_text())
    assert record["draft_length"] == 8 and record["hidden_states"] == "computed"
    assert record["tokens"] == sum(len(r["prompt_ids"]) + len(r["answer_ids"]) for r in rows)
    assert record["anchors"] == sum(len(r["answer_ids"]) - 1 for r in rows)
    assert record["vocabulary"] == 64 and 0 < record["computed_tensors_peak_gib"] < 1
    for name in ("throughput_ratio", "throughput_ratio_cached", "throughput_ratio_profile"):
        low, high = record[f"{name}_spread"]
        assert 0 < low <= record[name] <= high < math.inf
        assert 0 < record[f"peak_memory_{name.removeprefix('throughput_')}"] < math.inf
    for kind in KINDS:
        assert len(record[f"{kind}_seconds"]) == 2
        assert 0 < record[f"{kind}_tokens_per_second"] < math.inf and record[f"{kind}_peak_gib"] > 0
    assert record["machine"]["dtype"] == "float32"
    assert f"computed: throughput {record['throughput_ratio']:.2f}x" in capsys.readouterr().out


def wide_base(folder, tokenizer, vocabulary):
    """Wide enough that what the formula leaves out is small beside what it counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("vocabulary", "fraction"),
    [(1024, 1.0), (16384, 1.0), (1024, 0.1)],
    ids=["draft-outweighs", "head-outweighs", "context-outweighs"],
)
def test_the_memory_formula_is_near_the_measured_peak(tiny_tokenizer, tmp_path, dtype, vocabulary, fraction):
    """What stays to a thousandth, a step's and the base forward's peak within 15 %."""
    wide_base(tmp_path, tiny_tokenizer, vocabulary)
    work = workload(
        tmp_path,
        random_rows(8, vocabulary, answers=(90, 120)),
        draft={"draft_length": 8},
        steps=1,
        sequences_per_step=8,
        micro_batch=4,
        max_length=128,
        anchor_fraction=fraction,
        anchor_decay=1.0,
        dtype=dtype,
    )
    loops = Loops(work, tmp_path / "hidden")
    loops.warm_up("computed")
    estimate = loops.estimate()

    def size(tensors):
        return sum(t.nbytes for t in tensors)

    moments = [t for state in loops.optimizer.state.values() for t in state.values()]
    assert estimate.base_weights == size(loops.base.model.parameters())
    assert estimate.draft_weights == estimate.gradients == size(loops.draft.parameters())
    assert estimate.optimizer == pytest.approx(size(moments), rel=1e-3)
    assert estimate.total == estimate.fixed + estimate.step
    measured = peak_mib(lambda: loops.run("computed"), loops.base.device) * MIB
    assert estimate.step == pytest.approx(measured, rel=0.15)
    longest = loops.steps[0][0].ids
    measured = peak_mib(lambda: loops.target.encode(longest, loops.draft.hooks), loops.base.device) * MIB
    assert estimate.base_forward == pytest.approx(measured, rel=0.15)
