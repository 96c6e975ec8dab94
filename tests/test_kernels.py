"""The Triton kernels: run through the interpreter in a process of their own, and called on CUDA alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from specformer import layers
from specformer.layers import RMSNorm, kernel_serves

pytest.importorskip("triton", reason="triton has no build for this system")


def test_kernels_in_the_interpreter():
    """A process of its own: triton reads TRITON_INTERPRET when it is imported, once for all."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/interpreted_kernels.py"],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_grouped_weights_on_cuda_take_the_kernel(monkeypatch):
    grouped, single = RMSNorm((4, 64), 1e-5).weight, RMSNorm(64, 1e-5).weight
    with FakeTensorMode():  # no such device is needed
        on_cuda = torch.empty(3, 4, 64, device="cuda")
    assert kernel_serves(on_cuda, grouped)
    assert not kernel_serves(on_cuda, single)
    assert not kernel_serves(on_cuda.double(), grouped)
    assert not kernel_serves(torch.empty(3, 4, 64), grouped)
    monkeypatch.setattr(layers, "TRITON", False)
    assert not kernel_serves(on_cuda, grouped)
