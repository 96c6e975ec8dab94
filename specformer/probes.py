"""What the notebooks look at while they explain: who sees whom, the plain loss, memory, fingerprints."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from specformer.target import Head

MIB = 2**20


def visibility(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Which positions a block lets each position see, found by asking its gradients.

    x (1, n, H), anything but zero; block maps it to (1, n, H). Returns bool (n, n): [i, j] is True when
    output i changes with input j. A block whose mixing weights are zero shows the diagonal only.
    """
    x = x.detach().clone().requires_grad_()
    out = block(x)
    rows = []
    for i in range(x.shape[1]):
        (grad,) = torch.autograd.grad(out[0, i].sum(), x, retain_graph=True)
        rows.append(grad[0].abs().amax(-1) > 0)
    return torch.stack(rows)


def plain_head_loss(hidden: Tensor, labels: Tensor, weights: Tensor, head: Head) -> tuple[float, Tensor]:
    """What `losses.head_loss` computes, by ordinary autograd over all logits at once.

    hidden (N, l_d, H), labels (N, l_d), below 0 where there is none to learn, weights (l_d,); the loss and
    its gradient by hidden. The head is a plain matmul here: the packed one has no gradient.
    """
    leaf = hidden.detach().clone().requires_grad_()
    logits = F.linear(head.norm(leaf.to(head.weight.dtype)), head.weight)
    known = labels.masked_fill(labels < 0, -100)
    each = F.cross_entropy(logits.flatten(0, 1), known.flatten(), reduction="none", ignore_index=-100)
    loss = (each.view(labels.shape) * weights).sum()
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def peak_mib(work: Callable[[], Any], device: torch.device) -> float:
    """Memory in MiB that the tensors made by `work` take at their peak, as torch's allocator counts it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    ordered = sorted(events, key=lambda e: e.start_ns())
    held = accumulate(e.nbytes() for e in ordered)  # type: ignore[attr-defined]
    return max(held, default=0) / MIB


def in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments)` returns, from a fresh process: one that ran something else before keeps that
    one's freed memory, which hides a peak."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-able settings: records of other settings lie in another folder."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def digests(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """File below `folder` -> SHA-256 of its bytes."""
    found = {}
    for file in sorted(path for path in folder.glob(pattern) if path.is_file()):
        with file.open("rb") as stream:
            found[str(file.relative_to(folder))] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found
