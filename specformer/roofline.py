"""The machine's peak rate and bandwidth, measured: what the paper's rho and budget of k rest on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from specformer import metrics
from specformer.hardware import describe

MATMUL_SIZES = {"cpu": (512, 1024, 1536), "cuda": (4096, 8192)}
# Far beyond any cache; three such arrays are alive at once.
TRIAD_BYTES = {"cpu": 128 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True)
class Chip:
    """A device in one dtype. peak_flops in FLOP/s, bandwidth in bytes/s."""

    name: str
    dtype: str
    threads: int
    peak_flops: float
    bandwidth: float

    @property
    def intensity(self) -> float:
        """AI_c in FLOP/byte."""
        return metrics.arithmetic_intensity_chip(self.peak_flops, self.bandwidth)

    @property
    def rho(self) -> float:
        """Redundancy ratio of decoding in this dtype (its AI_m follows from the bytes)."""
        return metrics.redundancy_ratio(self.intensity, self.intensity_model)

    @property
    def intensity_model(self) -> float:
        """AI_m in FLOP/byte of this dtype."""
        return metrics.arithmetic_intensity_model(_torch_dtype(self.dtype).itemsize)

    def budget_k(self, batch_size: int) -> float:
        """The k that can be verified for free at this batch size (r2)."""
        return metrics.budget_k(self.rho, batch_size)


A100 = Chip("A100-80G", "bfloat16", 0, peak_flops=311.84e12, bandwidth=2.04e12)
"""The chip of the paper's example (rho = 152.86)."""


def measure_chip(
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    *,
    seconds: float = 3.0,
) -> Chip:
    """Measure this machine for about `seconds` (wall time), half on each quantity.

    Peak: the best of repeated square matmuls of a few sizes, 2 n^3 FLOP each. Bandwidth: the best
    of repeated triads a = b + s * c over arrays larger than the caches, three arrays' bytes each.
    The best and not the mean, because everything that disturbs only makes them slower.
    """
    dtype = _torch_dtype(dtype)
    device = torch.device(device)
    record = describe(dtype, device)
    return Chip(
        name=record["cpu"] if device.type == "cpu" else record["accelerator"],
        dtype=record["dtype"],
        threads=record["threads"],
        peak_flops=_peak_flops(dtype, device, seconds / 2),
        bandwidth=_bandwidth(dtype, device, seconds / 2),
    )


def attainable(intensity: float, peak_flops: float, bandwidth: float) -> float:
    """FLOP/s a kernel of `intensity` FLOP/byte can reach: min(peak, intensity * bandwidth)."""
    return min(peak_flops, intensity * bandwidth)


def forward_seconds(parameters: float, tokens: int, chip: Chip) -> float:
    """The roofline's lower bound for one forward pass of `tokens` tokens (all rows together).

    2 FLOP per parameter and token against reading each parameter once in the chip's dtype;
    attention and activations are left out, so real passes are slower.
    """
    flops = 2.0 * parameters * tokens
    intensity = flops / (parameters * _torch_dtype(chip.dtype).itemsize)
    return flops / attainable(intensity, chip.peak_flops, chip.bandwidth)


def ideal_speedups(
    table: pd.DataFrame, forwards: pd.DataFrame, chip: Chip, parameters: float
) -> pd.DataFrame:
    """What each row of Table 1 could gain at best, beside what it gained.

    table: `tables.build_table1`'s rows; forwards: timed bare passes (batch_size, tokens_per_request,
    seconds); parameters: M of the base. Returns batch_size, k, method, kappa, p, speedup of the rows whose p
    is known, and roofline: kappa / p x t(B) / t(B (k + 1)) with t the roofline's seconds (`forward_seconds`);
    forwards: kappa x the same ratio of timed passes, NaN where they were not timed; achieved: speedup /
    roofline.
    """
    seconds: Any = forwards.groupby(["batch_size", "tokens_per_request"])["seconds"].median()
    found = table.loc[
        table["p"].notna() & (table["kappa"] > 1),
        ["batch_size", "k", "method", "kappa", "p", "speedup"],
    ].reset_index(drop=True)

    def bound(row: Any) -> float:
        ratio = forward_seconds(parameters, row.batch_size, chip) / forward_seconds(
            parameters, row.batch_size * (row.k + 1), chip
        )
        return row.kappa / row.p * ratio

    def timed(row: Any) -> float:
        one, many = (seconds.get((row.batch_size, n), math.nan) for n in (1, row.k + 1))
        return row.kappa * one / many

    rows = list(found.itertuples())
    found = found.assign(roofline=[bound(row) for row in rows], forwards=[timed(row) for row in rows])
    return found.assign(achieved=found["speedup"] / found["roofline"])


def useless_from(table: pd.DataFrame) -> dict[str, int | None]:
    """Method -> the smallest measured batch size from which no k beats plain decoding; None: none is."""
    best: Any = table.groupby(["method", "batch_size"])["speedup"].max()
    found: dict[str, int | None] = {}
    for method, own in best.groupby("method", sort=False):
        slow = own.droplevel("method").sort_index(ascending=False) < 1
        lost = [int(batch_size) for batch_size, still in slow.cummin().items() if still]
        found[str(method)] = min(lost) if lost else None
    return found


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating torch dtype such as 'float32', got {dtype!r}")
    return found


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"


def _peak_flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    sizes = MATMUL_SIZES[_kind(device)]
    best, last = 0.0, 0.0
    for n in sizes:
        # A dtype without fast kernels (float16 on many CPUs) needs no larger size to show it.
        if last and 3 * last * 8 > seconds:
            break
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, dtype=dtype, device=device)
        last = _fastest(partial(torch.mm, a, b, out=out), device, seconds / len(sizes))
        best = max(best, 2 * n**3 / last)
    return best


def _bandwidth(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    count = TRIAD_BYTES[_kind(device)] // dtype.itemsize
    b, c = (torch.ones(count, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(b)
    fastest = _fastest(partial(torch.add, b, c, alpha=0.5, out=out), device, seconds)
    return 3 * count * dtype.itemsize / fastest


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest run: one warm-up, then at least two runs within `seconds`."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    end = time.perf_counter() + seconds
    timed()
    runs = [timed(), timed()]
    while time.perf_counter() < end:
        runs.append(timed())
    return min(runs)
