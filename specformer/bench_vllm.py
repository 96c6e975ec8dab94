"""vLLM with our draft against vLLM alone: same model, dtype, prompts and caps, alternating in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specformer.bench import take
from specformer.bench_engine import FEWEST, VLLM, Timing, in_turn
from specformer.engine import Request
from specformer.metrics import speedup, spread, throughput
from specformer.progress import Progress


def bench_vllm(
    python: str,
    folder: Path,
    draft: Path,
    requests: Sequence[Request],
    *,
    batch_sizes: Sequence[int],
    k: int,
    rounds: int,
    max_length: int,
    machine: Mapping[str, Any],
    waves: int = 1,
    keep: Callable[[pd.DataFrame], None] = lambda table: None,
) -> pd.DataFrame:
    """Time vLLM alone and with the draft in `draft`, k tokens a step, at each number of concurrent requests.

    python: of vLLM's environment; folder: the base LLM's; machine: a `hardware.describe` record, whose dtype
    both run in. A round gives both `waves` times the batch size of requests, and not less than FEWEST; the
    first one is for warming up. Returns a row per batch size and k (`summarise`), and hands what it has to
    `keep` after each batch size. Raises UserError where vLLM does not start or stops.
    """
    rows = []
    answers = {b: max(b * waves, FEWEST) for b in batch_sizes}
    with Progress("bench vllm", sum(answers.values()) * (rounds + 1), "answers a system") as bar:
        for batch_size, count in answers.items():
            systems: dict[int, VLLM] = {}
            try:
                for drafted in (0, k):
                    systems[drafted] = VLLM(
                        python,
                        folder,
                        machine["dtype"],
                        max_length,
                        batch_size,
                        draft if drafted else None,
                        drafted,
                    )
                timings: dict[int, list[Timing]] = {drafted: [] for drafted in systems}
                for r in range(rounds + 1):
                    for drafted, timing in in_turn(systems, take(requests, r * count, count), r).items():
                        if r > 0:
                            timings[drafted].append(timing)
                    bar.advance(count, f"batch {batch_size}")
            finally:
                for system in systems.values():
                    system.close()
            rows += summarise(timings, batch_size, machine)
            keep(pd.DataFrame(rows))
    return pd.DataFrame(rows)


def summarise(
    timings: Mapping[int, Sequence[Timing]], batch_size: int, machine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of the table from the timings of one batch size, by k: tps (median, min, max), the ratio to vLLM
    alone with its smallest and largest round, tokens_per_step."""
    tps = {k: [throughput(t.tokens, t.seconds) for t in runs] for k, runs in timings.items()}
    rows = []
    for k, runs in timings.items():
        own, ratio = spread(tps[k]), speedup(tps[k], tps[0])
        rows.append(
            {
                "batch_size": batch_size,
                "k": k,
                "tps_median": own.median,
                "tps_min": own.min,
                "tps_max": own.max,
                "ratio": ratio.median,
                "ratio_min": ratio.min,
                "ratio_max": ratio.max,
                "tokens_per_step": sum(t.tokens_per_step for t in runs) / len(runs),
                "rounds": len(runs),
            }
            | {key: machine[key] for key in ("dtype", "cpu", "threads", "kernels")}
        )
    return rows
