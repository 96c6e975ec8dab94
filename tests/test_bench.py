"""The timing protocol: what is recorded, what is compared, what a killed run keeps."""

from __future__ import annotations

import pandas as pd
import pytest
from helpers import BigramDraft, nano_base, prompts

from specformer import bench
from specformer.budget import StepCosts
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.target import Target

THROUGHPUT = {
    "method", "batch_size", "k", "round", "requests", "tokens", "seconds", "prefill_seconds",
    "draft_seconds", "verify_seconds", "rest_seconds", "prompt_tokens_mean", "cpu", "dtype", "threads",
}  # fmt: skip
STEPS = [
    "method", "batch_size", "k", "round", "set", "request", "step", "drafted", "accepted", "committed",
    "truncated",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320, stop_token_ids=(0, 2))


@pytest.fixture(scope="module")
def requests(base):
    return [Request(f"set{i % 2}/{i}", p, 6 + i) for i, p in enumerate(prompts(base, 7))]


def measure(base, requests, folder, **changes):
    options = {"batch_sizes": [1, 3], "ks": {"bigram": [2, 4]}, "rounds": 2, "round_requests": 5}
    options |= {"max_length": 96, "prefill_chunk": 64} | changes
    return bench.measure(base, {"bigram": BigramDraft(base)}, requests, folder, **options)


@pytest.fixture(scope="module")
def measured(base, requests, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return *measure(base, requests, folder), folder


def test_throughput_records(measured):
    throughput, _, _ = measured
    assert set(throughput.columns) >= THROUGHPUT
    keys = throughput[["batch_size", "round", "method", "k"]].apply(tuple, axis=1).tolist()
    field = [("none", 0), ("bigram", 2), ("bigram", 4)]
    assert sorted(keys) == sorted((b, r, m, k) for b in (1, 3) for r in (0, 1) for m, k in field)
    for (_, r), group in throughput.groupby(["batch_size", "round"], sort=False):
        order = group["k"].tolist()
        assert order == ([0, 2, 4] if r == 0 else [4, 2, 0]), "every second round runs the other way"
    phases = throughput[["prefill_seconds", "draft_seconds", "verify_seconds", "rest_seconds"]]
    assert (phases >= 0).all().all()
    assert phases.sum(axis=1).to_numpy() == pytest.approx(throughput["seconds"].to_numpy())
    assert (throughput.loc[throughput["k"] == 0, "draft_seconds"] < throughput["verify_seconds"].min()).all()
    assert (throughput["tokens"] > 0).all() and (throughput["requests"] >= 5).all()


def test_step_records(measured, requests):
    _, steps, _ = measured
    assert list(steps.columns) == STEPS
    assert set(steps["set"]) == {"set0", "set1"} and set(steps["request"]) <= {r.id for r in requests}
    assert (steps["committed"] == steps["accepted"] + 1 - steps["truncated"]).all()
    assert (steps["drafted"] == steps["k"]).all() and (steps.loc[steps["k"] == 0, "accepted"] == 0).all()
    # the same requests for every contender of a round, and the same answers: lossless
    sums = steps.groupby(["batch_size", "round", "request", "k"])["committed"].sum().unstack("k")
    assert (sums[0] == sums[2]).all() and (sums[0] == sums[4]).all()
    assert steps.loc[steps["k"] == 4, "accepted"].max() >= 2
    assert {r for _, r in steps.groupby(["batch_size", "round"])["request"].nunique().items()} == {5}


def test_auto_is_timed_beside_the_fixed_ks(base, requests, tmp_path, monkeypatch):
    free = StepCosts((1, 3), ((1.0,) * 5,) * 2, ((0.0,) * 4,) * 2)
    monkeypatch.setattr(bench, "step_costs", lambda target, draft, rows, attention: free)
    throughput, steps = measure(base, requests, tmp_path, ks={"bigram": [2]}, rounds=1, auto=["bigram"])
    assert set(throughput.groupby(["method", "k"]).groups) == {("none", 0), ("bigram", 2), ("bigram_auto", 4)}
    keys = ["batch_size", "request"]
    answers = steps.pivot_table(index=keys, columns="method", values="committed", aggfunc="sum")
    assert answers["none"].equals(answers["bigram_auto"])
    assert set(steps.loc[steps["method"] == "bigram_auto", "drafted"]) == {4}


def test_a_killed_run_keeps_its_rounds_and_goes_on(base, requests, tmp_path, monkeypatch):
    timed, calls = bench.timed_round, []

    def stop_in_the_third_round(*arguments):
        calls.append(1)
        if len(calls) > 8:  # three contenders a round
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(bench, "timed_round", stop_in_the_third_round)
    with pytest.raises(KeyboardInterrupt):
        measure(base, requests, tmp_path)
    kept = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(kept) == [
        f"batch1-round{r}.{kind}.parquet" for r in (0, 1) for kind in ("steps", "throughput")
    ]
    calls.clear()
    monkeypatch.setattr(bench, "timed_round", lambda *a: calls.append(1) or timed(*a))
    throughput, _ = measure(base, requests, tmp_path)
    assert len(calls) == 6 and len(throughput) == 12
    assert all((tmp_path / name).read_bytes() == content for name, content in kept.items())
    calls.clear()
    again, _ = measure(base, requests, tmp_path)
    assert not calls
    pd.testing.assert_frame_equal(again, throughput)


def test_fillers_keep_every_slot_busy_until_the_last_request_is_done(base, requests, monkeypatch):
    engine = Engine(base, batch_size=3, max_length=96)
    busy, step = [], engine._step
    monkeypatch.setattr(engine, "_step", lambda slots: busy.append(len(slots)) or step(slots))
    chosen, fillers = bench.take(requests, 0, 4), bench.take(requests, 4, 6)
    found = bench.timed_round(engine, chosen, fillers)
    assert {r.id for r in found.results} == {r.id for r in chosen}
    assert set(busy) == {3}
    # counted is all that was decoded, the fillers' tokens too
    assert found.stats.tokens > sum(len(r.ids) for r in found.results)
    assert found.stats.steps == len(busy) and 0 < found.stats.seconds <= found.seconds


def test_prompts_are_cycled_with_ids_of_their_own(requests):
    taken = bench.take(requests, 5, 9)
    assert [r.id for r in taken[:3]] == ["set1/5#5", "set0/6#6", "set0/0#7"]
    assert len({r.id for r in taken}) == 9
    assert taken[2].prompt_ids == requests[0].prompt_ids
    with pytest.raises(UserError, match="no prompts"):
        bench.take([], 0, 1)


def test_the_baseline_is_always_there(base):
    draft = BigramDraft(base)
    found = [
        (c.method, c.k, c.draft is None)
        for c in bench.contenders({"a": draft, "b": draft}, {"a": [2, 4], "b": [2, 4]})
    ]
    assert found == [
        ("none", 0, True),
        ("a", 2, False),
        ("a", 4, False),
        ("b", 2, False),
        ("b", 4, False),
    ]


def test_forward_costs(base):
    options = {"batch_sizes": [1, 2], "tokens_per_request": [1, 5], "context": 8, "rounds": 3}
    costs = bench.forward_costs(Target(base, 64), [5, 6, 7], **options)
    assert list(costs.columns) == ["batch_size", "tokens_per_request", "round", "tokens", "seconds"]
    assert len(costs) == 2 * 2 * 3 and min(costs["seconds"]) > 0
    assert list(costs["tokens"]) == list(costs["batch_size"] * costs["tokens_per_request"])
    assert set(costs["round"]) == {0, 1, 2}


def test_evaluation_sets_are_interleaved():
    rows = [{"id": f"{s}{i}", "set": s, "messages": [i]} for s, n in (("a", 3), ("b", 1)) for i in range(n)]
    found = bench.evaluation_requests(rows, lambda messages: [*messages, 9], 12, per_set=2)
    assert [(r.id, r.prompt_ids, r.max_new_tokens) for r in found] == [
        ("a/a0", [0, 9], 12),
        ("b/b0", [0, 9], 12),
        ("a/a1", [1, 9], 12),
    ]
