"""Medusa-1 (FasterDecoding/Medusa): a residual block per draft position on the base's last hidden state.

Departures: the LM head is the base's, frozen and shared by all positions, where the paper gives each position
a copy of its own to train (l_d x V x H parameters more); the blocks' biases start at zero like their weights,
so every position starts as the base's own; drafts are chains, not trees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.cache import KVStore, Window
from specformer.drafts.interface import Choose, Draft, DraftConfig, register
from specformer.target import Target


@register("medusa")
class Medusa(Draft):
    """`h + SiLU(W_j h + b_j)` for draft position j, h being HS[L] after the final norm; all positions come of
    one pass, and none knows the others, nor the base's newest token."""

    label = "Medusa-1 (chain)"
    recipe = {"lr": 1e-3, "warmup": 0.1, "weight_decay": 0.0, "position_weights": 0.8}
    tapped = 1
    final_norm = False

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.blocks = nn.Linear(config.hidden_size, config.draft_length * config.hidden_size)
        nn.init.zeros_(self.blocks.weight)
        nn.init.zeros_(self.blocks.bias)

    def draft(self, state: Tensor, target: Target) -> Tensor:
        """HS[L] (N, H) -> what the LM head reads (N, l_d, H)."""
        h = target.head.norm(state)
        return h.unsqueeze(-2) + F.silu(self.blocks(h)).unflatten(-1, (self.draft_length, -1))

    @torch.no_grad()
    def propose(
        self,
        taps: Tensor,
        last: Tensor,
        following: Tensor,
        window: Window,
        store: KVStore | None,
        target: Target,
        k: int,
        choose: Choose,
    ) -> Tensor:
        state = taps[torch.arange(len(last), device=last.device), last, 0]
        return choose(self.head(target)(self.draft(state, target)[:, :k]), 0)

    def training_hidden(
        self, taps: Tensor, following: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        return self.draft(taps[rows, columns, 0], target)

    def position_parameters(self) -> int:
        H = self.config.hidden_size
        return H * H + H
