"""MTP, multi-token prediction as in DeepSeek-V3 (deepseek_mtp in vllm-project/vllm, mtp in
vllm-project/speculators): one decoder layer, run again for each further token.

Departures: in training a place sees the first place's keys up to its anchor and its own chain's, as it does
when drafting, where DeepSeek lets place j see place j's keys at all earlier positions (which drafting with
one cache cannot give); all l_d places are trained, not 3; the features are HS[L] before the base's final
norm, which have a norm of their own here anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specformer.base import Base
from specformer.drafts.chain import ChainDraft
from specformer.drafts.interface import DraftConfig, register
from specformer.layers import RMSNorm
from specformer.target import Target


@register("mtp")
class MTP(ChainDraft):
    """Linear 2H -> H on [norm(embedding); norm(feature)], a decoder layer, a final norm of its own, and the
    base's LM head."""

    label = "MTP"
    tapped = 1
    recipe = {"position_weights": 0.6}

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        H = config.hidden_size
        self.token_norm, self.feature_norm = RMSNorm(H, config.eps), RMSNorm(H, config.eps)
        self.join = nn.Linear(2 * H, H, bias=False)
        self.out_norm = RMSNorm(H, config.eps)

    def start_from(self, base: Base) -> None:
        """Begin by predicting what the base predicts: the feature passes through, the layer is the identity,
        the final norm is the base's."""
        super().start_from(base)
        H = self.config.hidden_size
        self.join.weight.data.copy_(torch.cat((torch.zeros(H, H), torch.eye(H)), 1))
        self.out_norm.weight.data.copy_(base.model.model.norm.weight)

    def features(self, taps: Tensor, target: Target) -> Tensor:
        return taps[:, :, 0]

    def enter(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        x = self.join(torch.cat((self.token_norm(embedded), self.feature_norm(feature)), -1))
        return self.layer.norm(x), x

    def leave(self, feature: Tensor) -> Tensor:
        return self.out_norm(feature)
