"""The paper's own numbers, identities, and steps small enough to count by hand."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest

from specformer import metrics
from specformer.errors import UserError


@dataclass(frozen=True)
class Step:
    drafted: int
    accepted: int
    committed: int
    truncated: int


def step(drafted: int, accepted: int, truncated: int = 0) -> Step:
    return Step(drafted, accepted, accepted + 1 - truncated, truncated)


def paper(name: str) -> pd.DataFrame:
    return pd.read_csv(str(files("specformer") / "paper" / name))


def random_steps(seed: int, n: int = 500) -> list[Step]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        drafted = int(rng.integers(0, 9))
        accepted = int(rng.integers(0, drafted + 1))
        cut = int(rng.integers(0, accepted + 1)) if rng.random() < 0.1 else 0
        out.append(step(drafted, accepted, cut))
    return out


def test_a100_redundancy_ratio():
    chip = metrics.arithmetic_intensity_chip(311.84e12, 2.04e12)
    rho = metrics.redundancy_ratio(chip, metrics.arithmetic_intensity_model())
    assert round(rho, 2) == 152.86
    assert metrics.arithmetic_intensity_model(4.0) == 0.5  # float32: twice the bytes
    assert metrics.budget_k(rho, 128) < 2 < metrics.budget_k(rho, 64) < 3


def test_compute_growth_and_useful_gain_by_hand():
    assert metrics.compute_growth(10, 5, 8, 100) == pytest.approx(1.5)
    assert metrics.compute_growth(0, 0, 0, 100) == 1.0
    assert metrics.useful_gain(2.1, 1.5, 1.0) == pytest.approx(1.4)
    assert metrics.useful_gain(2.1, 1.5, 0.5) == pytest.approx(0.7)


def test_kappa_is_a_for_a_chain_and_less_for_a_tree():
    assert metrics.kappa(2.2, 8, 8) == 2.2
    assert metrics.kappa(3.0, 6, 60) == pytest.approx(0.3)
    assert metrics.kappa(1.0, 0, 0) == 1.0


def test_theta_of_every_row_of_table_3():
    table = paper("table3_base_size.csv")
    base = table[table.k == 0].set_index(["batch_size", "base_model"]).tps
    off = []
    for row in table.to_dict("records"):
        ours = metrics.theta(row["kappa"], row["speedup"])
        if round(ours, 2) != row["theta"]:
            off.append((row["batch_size"], row["k"], row["base_model"]))
            # The printed kappa and speedup are themselves rounded; unrounded tps settles it.
            ratio = row["tps"] / base[(row["batch_size"], row["base_model"])]
            assert round(metrics.theta(row["kappa"], ratio), 2) == row["theta"]
    assert off == [(4, 4, "Qwen3-14B")]


def test_table_1_speedups_agree_with_its_throughput_within_rounding():
    table = paper("table1_throughput.csv")
    base = table[table.method == "none"].set_index(["batch_size", "k"]).tps
    off = []
    for row in table.to_dict("records"):
        none = base[(row["batch_size"], row["k"])]
        low, high = (row["tps"] - 0.5) / (none + 0.5), (row["tps"] + 0.5) / (none - 0.5)
        if not low - 0.005 <= row["speedup"] <= high + 0.005:
            off.append((row["batch_size"], row["k"], row["method"]))
            assert row["speedup"] == pytest.approx(row["tps"] / none, abs=0.01)
    assert off == [(16, 6, "hass")]  # printed 1.74 for 1190 / 681 = 1.747


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.theta(2.0, 0.0),
        lambda: metrics.kappa(2.0, 8, 0),
        lambda: metrics.budget_k(152.0, 0),
        lambda: metrics.compute_growth(1, -1, 8, 100),
        lambda: metrics.arithmetic_intensity_chip(1e12, 0),
        lambda: metrics.useful_gain(2.0, float("nan")),
    ],
)
def test_impossible_inputs_are_refused(call):
    with pytest.raises(ValueError, match=r"0\b|negative|nan"):
        call()


def test_counts_by_hand():
    # 4 drafted each: all taken, none taken, cut to 2 of 4 kept, two taken
    steps = [step(4, 4), step(4, 0), step(4, 3, truncated=2), step(4, 2)]
    assert metrics.tokens_per_step(steps) == (5 + 1 + 2 + 3) / 4
    assert metrics.accepted_per_step(steps) == (4 + 0 + 2 + 2) / 4  # the third lost 1 draft token
    assert metrics.total_tokens(steps, requests=1) == 12
    assert metrics.summarize(steps) == {
        "steps": 4,
        "drafted": 16,
        "accepted": 8,
        "committed": 11,
        "truncated": 2,
        "accepted_per_step": 2.0,
        "tokens_per_step": 2.75,
    }


def test_acceptance_by_position_by_hand():
    # The third step ended after 2 tokens: positions 3 and 4 do not exist for it.
    steps = [step(4, 4), step(4, 0), step(4, 3, truncated=2), step(2, 1)]
    table = metrics.acceptance_by_position(steps, 5)
    assert table.position.tolist() == [1, 2, 3, 4, 5]
    assert table.steps.tolist() == [4, 4, 2, 2, 0]
    assert table.accepted.tolist() == [3, 2, 1, 1, 0]
    assert table.unconditional.tolist()[:4] == [3 / 4, 2 / 4, 1 / 2, 1 / 2]
    assert table.reached.tolist() == [4, 3, 1, 1, 0]
    assert table.conditional.tolist()[:4] == [3 / 4, 2 / 3, 1.0, 1.0]
    assert table.unconditional.isna().tolist() == [False] * 4 + [True]


def test_a_stop_token_from_the_base_itself_still_counts_the_rejected_position():
    # truncated = 0: the step's own verdict on position 2 stands although the text ended there
    table = metrics.acceptance_by_position([step(4, 1)], 2)
    assert table.unconditional.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_identities(seed):
    steps = random_steps(seed)
    sums = {name: sum(getattr(s, name) for s in steps) for name in ("accepted", "truncated")}
    requests = 17
    total = metrics.total_tokens(steps, requests)
    assert total == requests + sums["accepted"] + len(steps) - sums["truncated"]
    assert metrics.tokens_per_step(steps) * len(steps) == pytest.approx(total - requests)
    frame = pd.DataFrame([vars(s) for s in steps])
    assert metrics.summarize(frame) == metrics.summarize(steps)
    whole = [s for s in steps if s.truncated == 0]
    assert metrics.tokens_per_step(whole) == pytest.approx(1 + metrics.accepted_per_step(whole))
    # uncut steps of one k: a = 1 + the sum of the unconditional shares
    full = [step(8, s.accepted) for s in whole]
    table = metrics.acceptance_by_position(full, 8)
    assert metrics.tokens_per_step(full) == pytest.approx(1 + table.unconditional.sum())
    assert np.allclose(table.conditional.cumprod(), table.unconditional)


def test_pooled_over_steps_not_over_requests():
    long, short = [step(4, 0)] * 9, [step(4, 4)]
    assert metrics.tokens_per_step(long + short) == pytest.approx(1.4)  # macro would say 3.0


def test_plain_decoding_has_one_token_per_step():
    assert metrics.tokens_per_step([step(0, 0)] * 5) == 1.0


@pytest.mark.parametrize("bad", [Step(2, 3, 4, 0), Step(4, 2, 2, 0), Step(4, 2, 4, -1), Step(4, 0, -1, 2)])
def test_impossible_records_are_named(bad):
    with pytest.raises(UserError, match=r"step record 1 .*drafted="):
        metrics.summarize([step(4, 1), bad])


def test_no_steps_and_missing_columns():
    with pytest.raises(ValueError, match="no step"):
        metrics.tokens_per_step([])
    with pytest.raises(UserError, match="truncated"):
        metrics.summarize(pd.DataFrame({"drafted": [1], "accepted": [1], "committed": [2]}))


def test_throughput_with_and_without_prefill():
    assert metrics.throughput(120, 4.0) == 30.0
    assert metrics.decode_throughput(120, 20, 4.0, 2.0) == 50.0
    assert metrics.serving_throughput(6, 120, 20, 4.0, 2.0) == 30.0  # 20 whole answers of 6: as above
    assert metrics.serving_throughput(11, 120, 20, 4.0, 2.0) == pytest.approx(11 / (0.1 + 10 / 50))


def test_speedup_of_identical_rounds_is_exactly_one():
    rounds = [31.7, 30.1, 29.93, 33.3]
    assert metrics.speedup(rounds, list(rounds)) == metrics.Spread(1.0, 1.0, 1.0)


def test_speedup_is_the_ratio_of_medians_inside_the_paired_spread():
    got = metrics.speedup([20.0, 30.0, 24.0], [10.0, 20.0, 16.0])
    assert (got.median, got.min, got.max) == (1.5, 1.5, 2.0)
    rng = np.random.default_rng(0)
    for n in range(1, 8):
        a, b = rng.uniform(1, 9, n).tolist(), rng.uniform(1, 9, n).tolist()
        one = metrics.speedup(a, b)
        assert one.min - 1e-12 <= one.median <= one.max + 1e-12


def test_speedup_refuses_unpaired_and_empty():
    with pytest.raises(ValueError, match="2 of the method, 1"):
        metrics.speedup([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no round"):
        metrics.speedup([], [])
    with pytest.raises(ValueError, match="above 0"):
        metrics.speedup([1.0], [0.0])
