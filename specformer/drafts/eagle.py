"""EAGLE-1 (SafeAILab/EAGLE): the base's last hidden states, one position ahead of the text.

Departures: drafts are chains, not trees; the soft labels are the base's most probable tokens (`soft_labels`
of training; 0 learns from the text's), not all of V; the noise is the source's for texts of 512 tokens, where
the source makes it smaller for longer ones; with init "base" `fc` passes the feature and the layer starts as
the identity with the base's weights, where the source draws both at random.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.base import Base
from specformer.drafts.chain import ChainDraft
from specformer.drafts.interface import DraftConfig, register
from specformer.target import Target

NOISE = 0.1
"""Uniform noise of +-NOISE on the features in training."""


@register("eagle")
class Eagle(ChainDraft):
    """`fc` 2H -> H on [embedding; feature] and a decoder layer without its input norm; it yields the base's
    next feature, HS[L] after the final norm, which the bare LM head reads. Training goes through the first
    place of the chain alone: SmoothL1 of the feature, plus 0.1 cross-entropy.
    """

    label = "EAGLE-1 (chain)"
    recipe = {"lr": 3e-5, "betas": (0.9, 0.95), "soft_labels": 64, "position_weights": 1.0}
    tapped = 1
    trained_places = 1
    head_share = 0.1

    def __init__(self, config: DraftConfig):
        super().__init__(config, norm=False)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def start_from(self, base: Base) -> None:
        """Begin by predicting what the base predicts: `fc` passes the feature, the layer is the identity."""
        super().start_from(base)
        H = self.config.hidden_size
        self.fc.weight.data.copy_(torch.cat((torch.zeros(H, H), torch.eye(H)), 1))
        nn.init.zeros_(self.fc.bias)

    def features(self, taps: Tensor, target: Target) -> Tensor:
        h = target.head.norm(taps[:, :, 0])
        return h + (2 * torch.rand_like(h) - 1) * NOISE if self.training else h

    def enter(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embedded, feature), -1))
        return x, x

    def feature_loss(
        self, hidden: Tensor, taps: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        after = columns[:, None] + 1 + torch.arange(hidden.shape[1], device=columns.device)
        states = taps[rows[:, None], after.clamp(max=taps.shape[1] - 1), 0]
        wanted = target.head.norm(states).float()
        return F.smooth_l1_loss(hidden.float(), wanted, reduction="none").mean(-1)
