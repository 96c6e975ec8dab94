"""A preallocated key/value store in which every row has its own length.

A step writes its n tokens of each row at `length .. length + n - 1`, attends under a mask made from the
lengths alone, and commits by raising the length. What was rejected lies beyond the length and is
overwritten by the next step: there is no rollback, no re-padding and no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specformer import native
from specformer.errors import UserError

SEGMENT_COST = 256
"""What one more attention call costs, in cached tokens read (measured on a CPU: about 30 us)."""


def segments(ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut rows into runs of similar length: (first row, behind the last, longest).

    One attention call reads every row of its run up to the longest of them, so a long row among short ones
    would make all of them long. Greedy: a row joins the run where that costs less than a call of its own.
    """
    runs = [(0, 1, ends[0])]
    for row in range(1, len(ends)):
        first, stop, longest = runs[-1]
        joint = (stop - first + 1) * max(longest, ends[row])
        if joint <= (stop - first) * longest + ends[row] + SEGMENT_COST:
            runs[-1] = (first, row + 1, max(longest, ends[row]))
        else:
            runs.append((row, row + 1, ends[row]))
    return runs


@dataclass
class Window:
    """Where the n tokens of this forward pass lie, for the B rows that take part.

    rows: the store's rows, a slice (the first B) or an int64 tensor (B,); positions (B, n) int64; upto: all
    keys lie before it; dtype of the masks; fresh: every row starts at 0; runs: rows that are attended
    together, see `segments`.
    """

    rows: slice | Tensor
    positions: Tensor
    upto: int
    dtype: torch.dtype
    fresh: bool
    runs: list[tuple[int, int, int]]
    _grouped: dict[int, list[Tensor]] = field(default_factory=dict)
    _lengths: Tensor | None = None

    @classmethod
    def at(
        cls,
        rows: slice | Tensor,
        start: Tensor,
        n: int,
        upto: int,
        dtype: torch.dtype,
        fresh: bool,
        ends: Sequence[int] | None = None,
    ) -> Window:
        """A window of n tokens behind `start` (B,). The host knows `upto` >= start.max() + n, and `ends`
        (start + n per row) where rows are to be read to their own length; nothing waits for the device."""
        B = start.shape[0]
        positions = start[:, None] + torch.arange(n, device=start.device)
        return cls(rows, positions, upto, dtype, fresh, segments(ends) if ends else [(0, B, upto)])

    def pick(self, index: Tensor, dtype: torch.dtype) -> Window:
        """The same rows, but only the query at `index` (B,) of each: a masked window of one token."""
        return self.behind(index, 0, self.upto, dtype)

    def behind(self, index: Tensor, places: int, limit: int, dtype: torch.dtype, n: int = 1) -> Window:
        """The same rows, n tokens of each: from some places behind the one at `index` (B,), where a draft's
        own tokens lie. limit: positions there are; beyond them, where only rows that have ended come, all
        share the last one."""
        start, further = self.positions.gather(1, index[:, None])[:, 0] + places, places + n - 1
        window = Window.at(self.rows, start, n, min(self.upto + further, limit), dtype, fresh=False)
        window.positions.clamp_(max=limit - 1)
        window.runs = [(a, b, min(longest + further, limit)) for a, b, longest in self.runs]
        return window

    @property
    def mask(self) -> Tensor:
        """Additive (B, 1, n, upto), 0 where a key may be seen, -inf elsewhere: query i of a row that held s
        tokens sees keys at positions <= s + i."""
        visible = torch.arange(self.upto, device=self.positions.device) <= self.positions[:, :, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.positions.device)
        return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)

    def grouped_masks(self, groups: int) -> list[Tensor]:
        """The mask of each run (rows, 1, groups * n, longest) for queries laid out by key/value head; made
        once, whatever the number of layers."""
        if groups not in self._grouped:
            mask = self.mask
            self._grouped[groups] = [
                mask[a:b, :, :, :upto].repeat(1, 1, groups, 1) for a, b, upto in self.runs
            ]
        return self._grouped[groups]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row with the new ones (B,) int32, for kernels that take lengths, not masks; made
        once (torch.compile cannot look into a cached_property)."""
        if self._lengths is None:
            self._lengths = (self.positions[:, -1] + 1).int()
        return self._lengths


class KVStore:
    """Keys and values of some layers: per layer one tensor (2, rows, Hkv, capacity, D).

    Head-major, because attention on a CPU reads it twice as fast as token-major; grows in steps of
    `step` tokens up to `limit`, so short work does not pay for the longest request allowed.
    attention: the backend that reads it (`layers.BACKENDS`).
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        step: int = 256,
        attention: str = "sdpa",
    ):
        self.attention = attention
        self.rows, self.kv_heads, self.head_dim = rows, kv_heads, head_dim
        self.limit, self.step, self.capacity = limit, step, 0
        self.kv = [
            torch.zeros(2, rows, kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)
        ]

    def ensure(self, tokens: int) -> None:
        """Make room for `tokens` per row. Raises UserError beyond the limit."""
        if tokens <= self.capacity:
            return
        if tokens > self.limit:
            raise UserError(
                f"the cache holds {self.limit} tokens per row, {tokens} are needed: raise max_length"
            )
        self.capacity = min(self.limit, -(-tokens // self.step) * self.step)
        for i, old in enumerate(self.kv):
            new = old.new_zeros(2, self.rows, self.kv_heads, self.capacity, self.head_dim)
            new[:, :, :, : old.shape[3]] = old
            self.kv[i] = new

    def write(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        """k and v (B, n, Hkv, D) go to the window's positions of its rows.

        Raises ValueError for a window that ends beyond what `ensure` made room for."""
        if window.upto > self.capacity:
            raise ValueError(f"room for {self.capacity} tokens a row, the window ends at {window.upto}")
        kv = self.kv[layer]
        rows = window.rows
        if native.serves(k, kv) and native.token_major(k) and k.stride() == v.stride():
            native.write(k, v, kv, None if isinstance(rows, slice) else rows, window.positions)
            return
        if isinstance(rows, slice):
            rows = torch.arange(rows.stop, device=k.device)
        # one indexed copy: (2, B, n, Hkv, D) rows of the (2, rows, capacity, Hkv, D) view
        kv.transpose(2, 3)[:, rows[:, None], window.positions] = torch.stack((k, v))

    def read(self, layer: int, window: Window) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, upto, D) of the window's rows; a view when the rows are a slice."""
        kv = self.kv[layer][:, window.rows, :, : window.upto]
        return kv[0], kv[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` tokens to another row (closing the gap of a finished row)."""
        for kv in self.kv:
            kv[:, target, :, :length] = kv[:, source, :, :length]

    def bytes(self) -> int:
        """Memory held now, in bytes."""
        return sum(kv.numel() * kv.element_size() for kv in self.kv)
