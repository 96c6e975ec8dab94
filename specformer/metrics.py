"""Step records and timed rounds in, the numbers of the paper out: pure functions, no I/O.

Names. `accepted` never holds the base LLM's own token; `tokens_per_step` always does (the paper's
`a`, and its `kappa` for a chain). Averages are pooled over steps (micro), as Spec-Bench does.

The paper states the quantities of the first half in its Equations 1-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
import pandas as pd

from specformer.errors import UserError

STEP_COLUMNS = ("drafted", "accepted", "committed", "truncated")


# --- Equations 1-5 ---------------------------------------------------------------------------


def arithmetic_intensity_model(bytes_per_parameter: float = 2.0) -> float:
    """AI_m in FLOP/byte of decoding one token with batch 1 (Equations 1-5).

    Each parameter costs 2 FLOP and is read once: 2M / (bytes * M). bf16 gives 1, float32 0.5.
    """
    return 2.0 / _positive("bytes_per_parameter", bytes_per_parameter)


def arithmetic_intensity_chip(peak_flops: float, bandwidth: float) -> float:
    """AI_c in FLOP/byte: peak FLOP/s over memory bytes/s (Equations 1-5)."""
    return _positive("peak_flops", peak_flops) / _positive("bandwidth", bandwidth)


def redundancy_ratio(intensity_chip: float, intensity_model: float = 1.0) -> float:
    """rho = AI_c / AI_m (Equations 1-5): ideal batch size, upper bound of what batching gains."""
    return _positive("intensity_chip", intensity_chip) / _positive("intensity_model", intensity_model)


def budget_k(rho: float, batch_size: int) -> float:
    """r2's bound (Equations 1-5): the k that can be verified for free is at most rho / batch_size.

    Returned as a float; the largest whole k is its floor.
    """
    return _positive("rho", rho) / _positive("batch_size", batch_size)


def compute_growth(m_s: float, m_p: float, draft_length: int, base_parameters: float) -> float:
    """p = 1 + (m_s + l_d * m_p) / M (Equations 1-5): how much a step's compute grows by drafting.

    m_s: parameters shared by all draft positions; m_p: parameters per position;
    draft_length: l_d; base_parameters: M.
    """
    if m_s < 0 or m_p < 0 or draft_length < 0:
        raise ValueError(f"negative size: m_s={m_s}, m_p={m_p}, draft_length={draft_length}")
    return 1.0 + (m_s + draft_length * m_p) / _positive("base_parameters", base_parameters)


def useful_gain(a: float, p: float, intensity_model: float = 1.0) -> float:
    """r1 = a / p * AI_m (Equations 1-5): useful FLOP/byte when a step yields `a` tokens."""
    return _positive("a", a) / _positive("p", p) * intensity_model


def kappa(a: float, draft_length: int, k: int) -> float:
    """kappa = a * l_d / k: a for a chain (l_d = k), less for a tree of k tokens and depth l_d.

    `a` counts the base LLM's own token. Plain decoding (k = 0) has kappa = a = 1.
    """
    if k == 0 and draft_length == 0:
        return float(a)
    return a * _positive("draft_length", draft_length) / _positive("k", k)


def theta(kappa: float, speedup: float) -> float:
    """theta = kappa / speedup: what is lost on the way to tokens per second (lower is better)."""
    return _positive("kappa", kappa) / _positive("speedup", speedup)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value


# --- step records ----------------------------------------------------------------------------


class StepLike(Protocol):
    """One verify call for one row; specformer.engine.Step is one."""

    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def truncated(self) -> int: ...


Steps = pd.DataFrame | Iterable[StepLike]


@dataclass(frozen=True)
class _Columns:
    """The step records as int64 arrays of one length, checked."""

    drafted: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    truncated: np.ndarray


def _columns(steps: Steps) -> _Columns:
    if isinstance(steps, pd.DataFrame):
        require_columns(steps, STEP_COLUMNS, "step records")
        found = [steps[name].to_numpy(dtype=np.int64) for name in STEP_COLUMNS]
    else:
        rows = [(s.drafted, s.accepted, s.committed, s.truncated) for s in steps]
        found = list(np.array(rows, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)).T)
    c = _Columns(*found)
    wrong = (
        (c.accepted < 0)
        | (c.accepted > c.drafted)
        | (c.truncated < 0)
        | (c.committed < 0)
        | (c.committed != c.accepted + 1 - c.truncated)
    )
    if wrong.any():
        i = int(wrong.argmax())
        raise UserError(
            f"step record {i} is impossible: drafted={c.drafted[i]}, accepted={c.accepted[i]}, "
            f"committed={c.committed[i]}, truncated={c.truncated[i]}. Needed: 0 <= accepted <= "
            "drafted and committed = accepted + 1 - truncated >= 0. Measure again."
        )
    if not len(c.drafted):
        raise ValueError("no step was recorded, so there is nothing to average")
    return c


def require_columns(frame: pd.DataFrame, names: Iterable[str], what: str) -> None:
    """UserError that names the columns of `names` that `frame` (`what`, in words) lacks."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise UserError(
            f"{what} lack the column(s) {', '.join(missing)}; found: "
            f"{', '.join(map(str, frame.columns))}. Were they written by another version? "
            "Run the measuring stage again."
        )


def _kept(c: _Columns) -> np.ndarray:
    # A cut takes the base's own token first, then accepted draft tokens from the end.
    return np.minimum(c.accepted, c.committed)


def tokens_per_step(steps: Steps) -> float:
    """The paper's `a`: tokens kept per call of the base LLM, its own token in, cut ones out."""
    return float(_columns(steps).committed.mean())


def accepted_per_step(steps: Steps) -> float:
    """Draft tokens accepted and kept per call of the base LLM; the base's own token is out."""
    return float(_kept(_columns(steps)).mean())


def total_tokens(steps: Steps, requests: int) -> int:
    """Tokens given out: one per request from its prefill, and what every step kept."""
    return requests + int(_columns(steps).committed.sum())


def acceptance_by_position(steps: Steps, k: int) -> pd.DataFrame:
    """How often each draft position is accepted.

    Returns a DataFrame of k rows: position (1..k), steps and accepted (int, of the unconditional
    share), unconditional (accepted >= j among the steps that drafted >= j and were not cut before
    j), reached (int) and conditional (the same among those with positions 1..j-1 accepted).
    A position that no step reached is NaN. A step is cut before j when it was truncated to fewer
    than j tokens: nothing comes after the end of a text, so there is nothing to be right about.
    """
    c = _columns(steps)
    rows = []
    for j in range(1, k + 1):
        seen = (c.drafted >= j) & ((c.truncated == 0) | (c.committed >= j))
        reached = seen & (c.accepted >= j - 1)
        accepted = int((seen & (c.accepted >= j)).sum())
        rows.append(
            {
                "position": j,
                "steps": int(seen.sum()),
                "accepted": accepted,
                "unconditional": accepted / seen.sum() if seen.any() else np.nan,
                "reached": int(reached.sum()),
                "conditional": accepted / reached.sum() if reached.any() else np.nan,
            }
        )
    columns = ["position", "steps", "accepted", "unconditional", "reached", "conditional"]
    return pd.DataFrame(rows, columns=columns)


def summarize(steps: Steps) -> dict[str, float]:
    """steps, drafted, accepted, committed, truncated (sums), accepted_per_step, tokens_per_step.

    `accepted` counts draft tokens that were kept, so cut ones are in `truncated` only.
    """
    c = _columns(steps)
    kept = _kept(c)
    return {
        "steps": len(c.drafted),
        "drafted": int(c.drafted.sum()),
        "accepted": int(kept.sum()),
        "committed": int(c.committed.sum()),
        "truncated": int(c.truncated.sum()),
        "accepted_per_step": float(kept.mean()),
        "tokens_per_step": float(c.committed.mean()),
    }


# --- timed rounds ----------------------------------------------------------------------------


def throughput(tokens: Any, seconds: Any) -> Any:
    """Tokens per second; numbers or columns."""
    return tokens / seconds


def serving_throughput(
    answer_tokens: Any, tokens: Any, requests: Any, seconds: Any, prefill_seconds: Any
) -> Any:
    """Tokens per second of a batch that is refilled for ever, prefill in; numbers or columns.

    answer_tokens: mean length of an answer. An answer costs one prefill and answer_tokens - 1 decoded
    tokens, each at its price in the round: prefill_seconds / requests and 1 / decode_throughput. Plain
    tokens / seconds would charge a round for the prompts of answers that it began but did not finish, more of
    them with a draft, whose rows end at different steps. The two agree where every answer is finished.
    """
    decoded = (answer_tokens - 1) / decode_throughput(tokens, requests, seconds, prefill_seconds)
    return answer_tokens / (prefill_seconds / requests + decoded)


def decode_throughput(tokens: Any, requests: Any, seconds: Any, prefill_seconds: Any) -> Any:
    """Tokens per second, prefill out: its time, and the one token it gives each request."""
    return (tokens - requests) / (seconds - prefill_seconds)


@dataclass(frozen=True)
class Spread:
    """A median over rounds with the smallest and the largest round."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, min and max of at least one round."""
    if not len(values):
        raise ValueError("no round was measured")
    return Spread(float(median(values)), float(min(values)), float(max(values)))


def speedup(method_tps: Sequence[float], baseline_tps: Sequence[float]) -> Spread:
    """Ratio of the medians of two lists of tokens per second, paired by round in one run.

    min and max are those of the paired ratios, so the ratio of the medians lies between them.
    Equal lists give exactly 1. Raises ValueError for lists of unequal length or rates <= 0.
    """
    if len(method_tps) != len(baseline_tps):
        raise ValueError(
            f"rounds do not pair: {len(method_tps)} of the method, {len(baseline_tps)} of the baseline"
        )
    for value in (*method_tps, *baseline_tps):
        _positive("tokens per second", value)
    pairs = [a / b for a, b in zip(method_tps, baseline_tps, strict=True)]
    ratio = spread(method_tps).median / spread(baseline_tps).median
    return Spread(ratio, min(pairs), max(pairs))
