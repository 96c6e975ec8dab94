"""The verify step compiled: always the same rows and tokens, with CUDA graphs on a GPU.

Measured once, SmolLM2's sizes in bfloat16, one thread of a shared 2-core CPU, eager against compiled in turn:
1 row x 1 token 32.8 ms against 26.0 (1.26x), 16 rows x 5 tokens 181 against 162 (1.12x), after 60 to 90 s of
compiling. That pays after some thousands of steps, so it is off by default on a CPU.
"""

from __future__ import annotations

import os
import shutil
import sys

import torch
from torch import Tensor

from specformer.cache import KVStore, Window
from specformer.errors import UserError
from specformer.target import Target

WORTH_STEPS = 5000
"""Verify steps that win back the compile time: about a minute, at about 10 ms won a step."""
BUCKET = 128
"""Cache lengths are rounded up to this many tokens: on a GPU each is recorded as a graph of its own."""


def choose_compile(setting: bool | str) -> bool | str:
    """The setting as this machine can have it: "auto" is False without a C++ compiler.

    Raises UserError for anything but False, True and "auto", and for True without a C++ compiler.
    """
    if setting not in (False, True, "auto"):
        raise UserError(f"engine.compile: {setting!r} is not true, false or auto")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if not setting or shutil.which(compiler) is not None:
        return setting
    if setting == "auto":
        return False
    raise UserError(
        f"engine.compile: torch.compile needs a C++ compiler, and {compiler} is not installed: install "
        "it, name another one in CXX, or set engine.compile to false"
    )


def worth_compiling(batch_size: int) -> int:
    """New tokens from which compiling pays: WORTH_STEPS steps of plain decoding. Drafts shorten the work, but
    the answer must be one for all k, or a comparison of them would compare compiled with eager."""
    return WORTH_STEPS * batch_size


def bucket(longest: int, capacity: int) -> int | None:
    """`longest` tokens rounded up to a multiple of BUCKET; None where that is all of a store's capacity or
    more: reading the whole of it is another case to torch.compile, which is left to the eager step."""
    upto = -(-longest // BUCKET) * BUCKET
    return upto if upto < capacity else None


class CompiledVerify:
    """The target's forward and logits for `n` tokens of each of the first `rows` rows of `store`.

    Only the longest row's length changes from step to step: keys are read up to a multiple of BUCKET, and
    that one size is dynamic, so that it is compiled once. The store is taken to its limit at once, because
    graphs hold its addresses. hooks: hidden states to tap, as for `Target.forward`.
    """

    def __init__(self, target: Target, store: KVStore, rows: int, n: int, hooks: tuple[int, ...]):
        store.ensure(store.limit)
        self.target, self.store, self.rows = target, store, rows
        on_gpu = target.device.type == "cuda"
        groups = target.heads // target.kv_heads
        if on_gpu:
            for kv in store.kv:  # written in place: a graph would refuse it otherwise
                torch._dynamo.mark_static_address(kv)

        def verify(ids: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
            upto = store.capacity if mask is None else mask.shape[-1]
            masks = {} if mask is None else {groups: [mask]}
            runs = [(0, rows, upto)]
            window = Window(slice(0, rows), positions, upto, target.dtype, False, runs, masks)
            hidden, taps = target.forward(ids, window, store, hooks)
            return target.logits(hidden), taps

        self._verify = torch.compile(verify, fullgraph=True, mode="reduce-overhead" if on_gpu else None)
        self._groups = groups

    def window(self, start: Tensor, n: int, longest: int) -> Window | None:
        """The window of n tokens behind `start` (rows,), for rows of at most `longest` tokens with them; None
        near the store's end (`bucket`)."""
        upto = bucket(longest, self.store.capacity)
        if upto is None:
            return None
        return Window.at(slice(0, self.rows), start, n, upto, self.target.dtype, fresh=False)

    def __call__(self, ids: Tensor, window: Window) -> tuple[Tensor, Tensor | None]:
        """ids (rows, n) -> logits (rows, n, V) and taps (rows, n, hooks, H) or None; on a GPU both are
        overwritten by the next call."""
        mask = None
        if self.store.attention != "flash":
            mask = window.grouped_masks(self._groups)[0]
            torch._dynamo.mark_dynamic(mask, 3)
        torch.compiler.cudagraph_mark_step_begin()
        return self._verify(ids, window.positions, mask)
