"""The engine's benchmark: the same tokens for everyone, and ratios that mean what they say."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import perturbed_specformer, prompts

from specformer import hardware
from specformer.bench_engine import (
    Timing,
    bench_engine,
    count_answer,
    in_turn,
    ours,
    summarise,
    transformers_continuous,
    transformers_generate,
)
from specformer.bench_vllm import bench_vllm
from specformer.bench_vllm import summarise as summarise_vllm
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.pretrained import packaged_folder


@pytest.fixture
def requests(tiny_llama):
    return [Request(str(i), p, 12) for i, p in enumerate(prompts(tiny_llama, 6))]


def test_tokens_count_up_to_the_first_stop():
    assert count_answer([5, 6, 0, 0, 0], [0, 2]) == 3
    assert count_answer([5, 2, 6], [0, 2]) == 2
    assert count_answer([5, 6], [0]) == 2


def test_all_systems_decode_the_same_number_of_tokens(tiny_llama, requests):
    draft = perturbed_specformer(tiny_llama)
    plain = ours(Engine(tiny_llama, batch_size=3, max_length=128))(requests)
    drafted = ours(Engine(tiny_llama, draft, k=2, batch_size=3, max_length=128))(requests)
    theirs = transformers_generate(tiny_llama, 3)(requests)
    assert plain.tokens == drafted.tokens == theirs.tokens > 0
    assert plain.tokens_per_step == 1.0 and drafted.tokens_per_step >= 1.0
    assert 0 < drafted.draft_share < 1


def test_continuous_batching_runs_here_or_says_that_it_does_not(tiny_llama, requests):
    attention = tiny_llama.model.config._attn_implementation
    try:
        found = transformers_continuous(tiny_llama, 3)(requests)
    except UserError as error:
        assert "does not run here" in str(error)
    else:
        assert found.tokens == transformers_generate(tiny_llama, 3)(requests).tokens
    assert tiny_llama.model.config._attn_implementation == attention


def test_systems_take_turns():
    order = []

    def system(name):
        return lambda requests: order.append(name) or Timing(len(requests), 1.0)

    systems = {name: system(name) for name in "ab"}
    requests = [Request("1", [1], 2)] * 3
    rounds = [in_turn(systems, requests, r) for r in (0, 1)]
    assert rounds == [dict.fromkeys("ab", Timing(3, 1.0))] * 2
    assert order == ["a", "b", "b", "a"]


def test_vllm_with_a_draft_is_set_against_vllm_alone():
    """Rounds pair: 2, 1 and 1.5 times as fast in turn, medians 150 to 100."""
    alone = [Timing(100, 1.0), Timing(100, 2.0), Timing(100, 1.0)]
    drafted = [Timing(100, 0.5, 0.0, 1.5), Timing(100, 2.0, 0.0, 1.7), Timing(300, 2.0, 0.0, 1.6)]
    machine = {"dtype": "bfloat16", "cpu": "x", "threads": 2, "kernels": "native"}
    plain, row = summarise_vllm({0: alone, 4: drafted}, 16, machine)
    assert (plain["k"], plain["ratio"], plain["ratio_min"], plain["ratio_max"]) == (0, 1, 1, 1)
    assert (row["batch_size"], row["k"], row["rounds"], row["dtype"]) == (16, 4, 3, "bfloat16")
    assert (row["tps_median"], row["tps_min"], row["tps_max"]) == (150, 50, 200)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (1.5, 1.0, 2.0)
    assert row["tokens_per_step"] == pytest.approx(1.6)


@pytest.mark.server
@pytest.mark.skipif("SPECFORMER_VLLM_PYTHON" not in os.environ, reason="names no environment with vLLM")
def test_vllm_is_timed_with_and_without_a_draft(smollm2, smollm2_folder):
    """Compiled, as people run it: the hidden states come out of the compiled model."""
    kept, draft = [], packaged_folder(smollm2)
    assert draft is not None
    table = bench_vllm(
        os.environ["SPECFORMER_VLLM_PYTHON"],
        smollm2_folder,
        draft,
        [Request(str(i), p, 8) for i, p in enumerate(prompts(smollm2, 4))],
        batch_sizes=[2],
        k=2,
        rounds=1,
        max_length=64,
        machine=hardware.describe(torch.float32, torch.device("cpu")),
        keep=kept.append,
    )
    assert len(kept) == 1 and kept[0].equals(table)
    assert list(table["k"]) == [0, 2] and min(table["tps_median"]) > 0
    assert table["tokens_per_step"].tolist()[0] == 1 < table["tokens_per_step"].tolist()[1]


def test_ratios_theta_and_efficiency():
    """Twice transformers' speed, 1.5 tokens a step, k + 1 tokens at 1.2 times the cost of one."""
    timings = {
        ("specformer", 0): [Timing(100, 1.0), Timing(100, 2.0), Timing(100, 1.0)],
        ("specformer", 4): [Timing(100, 0.8, 0.1, 1.5)] * 3,
        ("transformers", 0): [Timing(100, 2.0)] * 3,
        ("vllm", 0): [Timing(100, 1.25)] * 3,
    }
    forwards = {1: [0.9, 1.0, 5.0], 5: [1.2, 1.2, 1.2]}
    machine = {"dtype": "bfloat16", "cpu": "x", "threads": 2, "kernels": "native"}
    rows = {(r["system"], r["k"]): r for r in summarise(timings, forwards, 4, machine)}
    plain, drafted = rows["specformer", 0], rows["specformer", 4]
    assert (plain["tps_median"], plain["tps_min"], plain["tps_max"]) == (100, 50, 100)
    assert plain["ratio_to_transformers"] == 2.0 and plain["ratio_to_vllm"] == pytest.approx(1.25)
    assert drafted["theta"] == pytest.approx(1.5 / 1.25)
    assert drafted["efficiency"] == pytest.approx(1.25 / (1.5 / 1.2))
    assert drafted["draft_share"] == pytest.approx(0.1)
    assert rows["transformers", 0]["ratio_to_transformers"] == 1.0
    del timings["vllm", 0]
    assert summarise(timings, forwards, 4, machine)[0]["ratio_to_vllm"] is None


def test_a_whole_run_has_a_row_for_every_system_and_batch(tiny_llama, requests):
    draft, kept = perturbed_specformer(tiny_llama), []
    table = bench_engine(
        tiny_llama,
        draft,
        requests,
        batch_sizes=[1, 2],
        k=2,
        rounds=1,
        waves=3,
        max_length=96,
        keep=kept.append,
    )
    assert [sorted(set(part["batch_size"])) for part in kept] == [[1], [1, 2]], "kept as it goes"
    keys = set(zip(table["system"], table["batch_size"], table["k"], strict=True))
    assert {("specformer", b, k) for b in (1, 2) for k in (0, 2)} <= keys
    assert {("transformers", 1, 0), ("transformers", 2, 0), ("transformers prompt lookup", 1, 2)} <= keys
    drafted = table[(table["system"] == "specformer") & (table["k"] == 2)]
    for column in ("tps_median", "ratio_to_transformers", "kappa", "theta", "efficiency", "draft_share"):
        assert min(drafted[column]) > 0, column
