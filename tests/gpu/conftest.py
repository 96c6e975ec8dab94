"""Tests that need a CUDA device; `make test-gpu` runs them and prints a report for the README."""

from __future__ import annotations

import pytest
import torch

from specformer import hardware
from specformer.base import load_base

DEVICE = "cuda"


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen3"])
def pair(request):
    """A tiny model in float32, on the CPU and on the device."""
    folder = request.getfixturevalue(f"{request.param}_folder")
    return request.getfixturevalue(request.param), load_base(folder, dtype="float32", device=DEVICE)


@pytest.fixture
def base(pair):
    return pair[1]


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def smollm2_bf16(smollm2_folder):
    return load_base(smollm2_folder, dtype="bfloat16", device=DEVICE)


@pytest.fixture
def tell(record_property):
    """tell(what, value): a line of the report."""
    return lambda what, value: record_property("report", f"{what}: {value}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The report: what ran where, and what the tests told."""
    ran = [r for key in ("passed", "failed") for r in terminalreporter.stats.get(key, []) if r.when == "call"]
    ran = [report for report in ran if "tests/gpu/" in report.nodeid]
    if not ran or not torch.cuda.is_available():
        return
    passed = sum(report.passed for report in ran)
    skipped = {r.longrepr[2] for r in terminalreporter.stats.get("skipped", []) if "tests/gpu/" in r.nodeid}
    terminalreporter.section("report for the README")
    machine = hardware.caption(hardware.describe(device=DEVICE))
    terminalreporter.write_line(f"{passed} of {len(ran)} GPU tests pass on {machine}.")
    for reason in sorted(skipped):
        terminalreporter.write_line(f"- {reason}")
    for report in ran:
        for name, line in report.user_properties:
            if name == "report":
                terminalreporter.write_line(f"- {line}")
