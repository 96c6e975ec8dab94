"""Roofline arithmetic by hand; the measurement is held to what physics and time allow."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from specformer import hardware, roofline


def test_a100_of_the_paper():
    assert round(roofline.A100.rho, 2) == 152.86
    assert roofline.A100.budget_k(64) == pytest.approx(152.86 / 64, abs=1e-3)


def test_float32_has_half_the_model_intensity():
    chip = roofline.Chip("x", "float32", 1, peak_flops=1e12, bandwidth=1e11)
    assert chip.intensity == pytest.approx(10)
    assert chip.intensity_model == 0.5
    assert chip.rho == pytest.approx(20)


def test_attainable_has_its_knee_at_the_chip_intensity():
    assert roofline.attainable(2.0, 100.0, 10.0) == 20.0
    assert roofline.attainable(10.0, 100.0, 10.0) == 100.0
    assert roofline.attainable(50.0, 100.0, 10.0) == 100.0


def test_forward_is_flat_up_to_rho_tokens_and_linear_beyond():
    chip = roofline.Chip("x", "bfloat16", 1, peak_flops=1e12, bandwidth=1e11)  # rho = 10
    one = roofline.forward_seconds(1e9, 1, chip)
    assert one == pytest.approx(2e9 / 1e11)  # two bytes a parameter, read once
    assert roofline.forward_seconds(1e9, 10, chip) == pytest.approx(one)
    assert roofline.forward_seconds(1e9, 40, chip) == pytest.approx(4 * one)


def test_ideal_speedups_by_hand():
    """rho = 10: of 4 tokens in 2 rows all are free, in 10 rows a pass of 40 takes four times one of 10."""
    chip = roofline.Chip("x", "bfloat16", 1, peak_flops=1e12, bandwidth=1e11)
    rows = [(2, 3, "a", 2.2, 1.1, 1.5), (10, 3, "a", 2.2, 1.1, 0.4), (2, 3, "a_auto", 2.0, math.nan, 1.2)]
    rows += [(b, 3, "none", 1.0, 1.0, 1.0) for b in (2, 10)]
    table = pd.DataFrame(rows, columns=pd.Index(["batch_size", "k", "method", "kappa", "p", "speedup"]))
    times = [(2, 1, 1.0), (2, 1, 1.2), (2, 1, 9.0), (2, 4, 1.5), (10, 1, 1.0)]
    forwards = pd.DataFrame(times, columns=pd.Index(["batch_size", "tokens_per_request", "seconds"]))
    found = roofline.ideal_speedups(table, forwards, chip, 1e9)
    assert found[["batch_size", "method"]].values.tolist() == [[2, "a"], [10, "a"]]
    assert found["roofline"].tolist() == pytest.approx([2.0, 0.5])
    timed, untimed = found["forwards"].tolist()
    assert timed == pytest.approx(2.2 * 1.2 / 1.5) and math.isnan(untimed)
    assert found["achieved"].tolist() == pytest.approx([0.75, 0.8])


def test_a_method_is_useless_from_where_it_never_wins_again():
    speeds = {"dip": (1.2, 0.9, 1.1), "early": (1.2, 0.9, 0.8), "late": (1.5, 1.2, 0.9), "even": (1.5, 1, 1)}
    rows = [
        (method, batch_size, k, speed - k / 100)
        for method, own in speeds.items()
        for batch_size, speed in zip((1, 4, 16), own, strict=True)
        for k in (0, 2)
    ]
    table = pd.DataFrame(rows, columns=pd.Index(["method", "batch_size", "k", "speedup"]))
    assert roofline.useless_from(table) == {"dip": None, "early": 4, "late": 16, "even": None}


@pytest.mark.parametrize("dtype", [torch.float32, "bfloat16"])
def test_measuring_this_machine_is_quick_and_plausible(dtype):
    start = time.perf_counter()
    chip = roofline.measure_chip(dtype, seconds=0.5)
    assert time.perf_counter() - start < 30  # 0.5 s on an idle machine; shared ones are slower
    assert 1e8 < chip.peak_flops < 1e16
    assert 1e8 < chip.bandwidth < 1e13
    assert chip.dtype == str(dtype).removeprefix("torch.")
    assert chip.name == hardware.describe()["cpu"]
    assert chip.rho == pytest.approx(chip.intensity / chip.intensity_model)


def test_best_of_repeats_counts_flops_and_bytes(monkeypatch):
    monkeypatch.setattr(roofline, "_fastest", lambda work, device, seconds: 1e-3)
    chip = roofline.measure_chip("float32", seconds=1.0)
    largest = max(roofline.MATMUL_SIZES["cpu"])
    assert chip.peak_flops == 2 * largest**3 / 1e-3
    assert chip.bandwidth == 3 * roofline.TRIAD_BYTES["cpu"] / 1e-3


def test_wrong_dtype_is_named():
    with pytest.raises(ValueError, match="'int8'"):
        roofline.measure_chip("int8")


def test_describe_names_the_machine():
    record = hardware.describe(torch.bfloat16)
    assert record["dtype"] == "bfloat16"
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["cores"] >= 1 and record["memory_gib"] > 0.1
    assert record["accelerator"] == "none"
    assert record["commit"] == "" or len(record["commit"]) == 12
    line = hardware.caption(record)
    assert record["cpu"] in line and "bfloat16" in line and "\n" not in line
    assert hardware.caption(record | {"accelerator": "H200"}).startswith("H200, host ")


def test_peak_memory_is_the_kernels_own_high_water_mark():
    status = Path("/proc/self/status").read_text()
    high_water = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    assert hardware.peak_memory() == pytest.approx(int(high_water.split()[1]) / 2**20, rel=0.02)


def test_a_slow_dtype_skips_the_large_sizes(monkeypatch):
    sizes = []

    def fastest(work, device, seconds):
        sizes.append(work)
        return 1.0  # second a matmul, far too slow for the time given

    monkeypatch.setattr(roofline, "_fastest", fastest)
    smallest = min(roofline.MATMUL_SIZES["cpu"])
    assert roofline.measure_chip("float32", seconds=1.0).peak_flops == 2 * smallest**3
    assert len(sizes) == 2  # one matmul size and the triad
