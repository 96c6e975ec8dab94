"""k auto: the choice by hand, and an engine that drafts now and then and loses nothing."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import nano_base, perturbed_specformer, prompts, run

from specformer import budget, hardware
from specformer.budget import Budget, StepCosts
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.target import Target

# verifying is free for one row, and costs as many steps as tokens for 16
COSTS = StepCosts((1, 16), ((1.0, 1.0, 1.0), (1.0, 2.0, 3.0)), ((0.1, 0.1),) * 2)


@pytest.fixture(scope="module")
def nano(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320, stop_token_ids=(0,))


def test_costs_between_measured_batch_sizes():
    assert COSTS.seconds(1, 0) == 1.0 and COSTS.seconds(1, 2) == 1.1
    assert COSTS.seconds(16, 2) == pytest.approx(3.1)
    assert COSTS.seconds(6, 2) == pytest.approx(1.1 + (3.1 - 1.1) / 3)
    assert COSTS.seconds(64, 0) == 1.0, "beyond the largest: the line goes on"
    assert StepCosts((4,), ((1.0, 1.0),), ((0.5,),)).seconds(4, 1) == 1.5


def test_the_choice_by_hand():
    chosen = Budget(COSTS, 2)
    assert chosen.tokens(2) == 1 + 0.5 + 0.25, "what is believed before anything was seen"
    assert chosen.choose(1) == 2 and chosen.choose(16) == 0
    for _ in range(500):
        chosen.record([(2, 0)])
    assert chosen.tokens(1) < 1.2 and chosen.choose(16) == 0
    for _ in range(500):
        chosen.record([(2, 2)] * 4)
    assert chosen.tokens(2) == pytest.approx(3.0, abs=0.2)
    assert chosen.choose(1) == 2 and chosen.choose(16) == 0, "3 tokens for 3.1 steps do not pay"


def test_positions_count_only_where_they_were_reached():
    seen = Budget(COSTS, 2)
    seen.record([(2, 1), (2, 0), (1, 1), (0, 0)])
    assert seen._reached == [3.0, 1.0] and seen._accepted == [2.0, 0.0]
    before = seen.tokens(2)
    seen.record([(0, 0)])
    assert seen.tokens(2) == before, "a step without drafts forgets nothing"


def test_a_gain_within_the_noise_is_not_taken():
    close = StepCosts((1,), ((1.0, 1.0),), ((0.475,),))  # 1.5 tokens for 1.475 steps: 1.7 %
    assert Budget(close, 1).choose(1) == 0


class Script(Budget):
    """Chooses what it is told, over and over."""

    def __init__(self, *ks: int):
        super().__init__(COSTS, 3)
        self.ks, self.at = ks, 0

    def choose(self, rows: int) -> int:
        self.at += 1
        return self.ks[self.at % len(self.ks)]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("ks", [(0,), (3,), (0, 0, 3, 1), (0,) * 9 + (2,) * 3])
def test_any_pattern_of_k_gives_the_text_of_plain_decoding(nano, ks, sampled):
    requests = [
        Request(str(i), p, 4 + 5 * i, temperature=0.8 * sampled, seed=i)
        for i, p in enumerate(prompts(nano, 10))
    ]
    draft = perturbed_specformer(nano)
    plain, _ = run(nano, requests, batch_size=3, max_length=96)
    engine = Engine(nano, draft, k=3, batch_size=3, max_length=96, prefill_chunk=7)
    engine.budget = Script(*ks)
    found = {result.id: result for result in engine.run(requests)}
    assert {r: found[r].ids for r in plain} == {r: plain[r].ids for r in plain}
    assert {step.drafted for r in found for step in found[r].steps} <= {*ks}
    for result in found.values():
        assert len(result.ids) == 1 + sum(step.committed for step in result.steps)


def test_drafts_after_a_pause_are_those_of_a_draft_that_never_paused(nano):
    """What was missed is read before it drafts again: the draft's cache has no gap."""
    requests = [Request(str(i), p, 24) for i, p in enumerate(prompts(nano, 2))]
    draft = perturbed_specformer(nano)
    steady = Engine(nano, draft, k=3, batch_size=2, max_length=96)
    paused = Engine(nano, draft, k=3, batch_size=2, max_length=96)
    paused.budget = Script(*(0,) * 6, 3, 3, 3)

    def caches(engine):
        """Keys and values of the draft for all committed tokens of a row that it has read whole."""
        seen = {}
        step = engine._step

        def spy(slots):
            step(slots)
            for b, row in enumerate(slots):
                if engine._held == 3 and row.read == row.length and not row.finished:
                    seen[row.request.id, row.length] = engine.draft_store.kv[0][:, b, :, : row.length].clone()

        engine._step = spy
        list(engine.run(requests))
        return seen

    expected, found = caches(steady), caches(paused)
    common = expected.keys() & found.keys()
    assert len(common) > 3
    for key in common:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-4)


def test_auto_measures_once_and_keeps_it(nano, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "busy", lambda: True)
    draft, target = perturbed_specformer(nano), Target(nano, 300)
    costs = budget.step_costs(target, draft, 3)
    assert costs.rows == (1, 2, 3) and len(costs.verify[0]) == draft.draft_length + 1
    assert all(s > 0 for part in (*costs.verify, *costs.draft) for s in part)
    assert [len(part) for part in costs.draft] == [draft.draft_length] * 3
    assert "measuring once" in capsys.readouterr().out
    assert not budget.cache_file().exists(), "another's load would be kept"
    monkeypatch.setattr(hardware, "busy", lambda: False)
    costs = budget.step_costs(target, draft, 3)
    monkeypatch.setattr(budget, "measure_costs", lambda *asked: pytest.fail("measured again"))
    assert budget.step_costs(target, draft, 3) == costs
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        budget.step_costs(target, draft, 4)
    (tmp_path / "specformer" / "step_costs.json").write_text(json.dumps([1]))
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        budget.step_costs(target, draft, 3)


def test_auto_decodes_what_plain_decoding_does(nano):
    requests = [Request(str(i), p, 20) for i, p in enumerate(prompts(nano, 6))]
    plain, _ = run(nano, requests, batch_size=4, max_length=96)
    free = StepCosts((1, 4), ((1.0,) * 5,) * 2, ((0.0,) * 4,) * 2)
    dear = StepCosts((1, 4), ((1.0, 2.0, 3.0, 4.0, 5.0),) * 2, ((9.0,) * 4,) * 2)
    for costs, expected in ((free, {4}), (dear, {0})):
        engine = Engine(nano, perturbed_specformer(nano), k="auto", batch_size=4, max_length=96, costs=costs)
        found = {result.id: result for result in engine.run(requests)}
        assert {r: found[r].ids for r in plain} == {r: plain[r].ids for r in plain}
        assert {step.drafted for r in found.values() for step in r.steps} == expected


def test_what_auto_cannot_do_is_said(nano):
    with pytest.raises(UserError, match="k is auto: without a draft model only 0 is possible"):
        Engine(nano, k="auto", max_length=64)
    with pytest.raises(UserError, match="engine.compile is for one k"):
        Engine(nano, perturbed_specformer(nano), k="auto", compile=True, max_length=64, costs=COSTS)
    with pytest.raises(UserError, match=r"k is many: 0\.\.4 or auto"):
        Engine(nano, perturbed_specformer(nano), k="many", max_length=64)


@pytest.mark.parametrize("ks", [(0,), (0, 0, 0, 0, 2)])
def test_a_resting_draft_keeps_only_so_much(nano, monkeypatch, ks):
    """Beyond the limit it reads what it missed, in passes of prefill's size, and the text stays the same."""
    monkeypatch.setattr("specformer.engine.MISSED_BYTES", 0)
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(nano, 5))]
    plain, _ = run(nano, requests, batch_size=2, max_length=96)
    engine = Engine(nano, perturbed_specformer(nano), k=3, batch_size=2, max_length=96, prefill_chunk=5)
    engine.budget = Script(*ks)
    kept = []
    step = engine._step

    def spy(slots):
        step(slots)
        kept.extend(sum(map(len, row.missed)) for row in slots)

    engine._step = spy
    found = {result.id: result.ids for result in engine.run(requests)}
    assert found == {r: plain[r].ids for r in plain}
    assert max(kept) <= 1 or len(ks) > 1
    assert max(kept) <= 8, "a prompt that comes in chunks, or a step's tokens"
