"""What the chunked head loss saves: time and peak memory against the plain loss, each in its own process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch

from specformer.base import load_base
from specformer.drafts import SpecFormer, new_draft
from specformer.hardware import describe, peak_memory
from specformer.losses import head_loss
from specformer.probes import in_own_process, plain_head_loss
from specformer.target import Target


def _work(kind: str, folder: str, anchors: int, draft_length: int, repeats: int) -> dict[str, Any]:
    base = load_base(folder)
    target = Target(base, 64)
    L = base.num_layers
    hooks = (0, L // 2, L - 1, L)
    made = new_draft(base, "specformer", [], hooks=hooks, init="base", seed=0, draft_length=draft_length)
    draft = cast(SpecFormer, made.to(base.dtype))
    x = torch.randn(anchors, draft.config.hidden_size, dtype=base.dtype)
    labels = torch.randint(0, base.model.config.vocab_size, (anchors, draft_length))
    weights = torch.full((draft_length,), 1 / (anchors * draft_length))
    before = peak_memory()
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        hidden = draft.draft(x, target)
        if kind == "plain":
            value, grad = plain_head_loss(hidden, labels, weights, target.head)
        else:
            scored = head_loss(hidden.detach(), labels, weights, target.head)
            value, grad = scored.loss, scored.grad
        hidden.backward(grad)
        seconds.append(time.perf_counter() - start)
        draft.zero_grad(set_to_none=True)
    return {"loss": value, "seconds": sorted(seconds[1:])[repeats // 2], "gib": peak_memory() - before}


def bench_loss(
    folder: str | Path, *, anchors: int = 512, draft_length: int = 8, repeats: int = 3
) -> dict[str, Any]:
    """Score `anchors` positions x `draft_length` over the base's whole vocabulary, backward through the draft
    included: plain logits with autograd against `losses.head_loss`.

    Returns the two runs (loss, median seconds, peak GiB above the start) and memory_ratio, time_ratio
    (chunked / plain), with the machine.
    """
    runs = {
        kind: in_own_process(_work, kind, str(folder), anchors, draft_length, repeats)
        for kind in ("plain", "chunked")
    }
    plain, chunked = runs["plain"], runs["chunked"]
    return {
        "anchors": anchors,
        "draft_length": draft_length,
        **{f"{kind}_{key}": value for kind, run in runs.items() for key, value in run.items()},
        "memory_ratio": chunked["gib"] / plain["gib"],
        "time_ratio": chunked["seconds"] / plain["seconds"],
        "machine": describe(),
    }
