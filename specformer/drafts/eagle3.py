"""EAGLE-3 (SafeAILab/EAGLE, traineagle3): three layers' hidden states fused, and an LM head of its own.

Departures: drafts are chains, not trees; training-time test runs through all l_d places, not 7; the soft
labels are the base's most probable tokens inside the draft vocabulary (`soft_labels` of training; 0 learns
from the text's), not all of it; with init "base" the LM head starts as the base's rows, `fc` as the last of
the hooks and the layer as the identity, where the source draws them at random.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specformer.base import Base
from specformer.drafts.chain import ChainDraft
from specformer.drafts.interface import DraftConfig, register
from specformer.errors import UserError
from specformer.layers import RMSNorm
from specformer.target import Head, Target


@register("eagle3")
class Eagle3(ChainDraft):
    """`fc` fuses the hooks to a feature; the attention reads [norm(embedding); norm(feature)], 2H wide, while
    the residual stream is the feature; the layer yields the next feature, and through a norm and a Linear
    H -> V' the logits over the draft vocabulary.

    Raises UserError for a config without a draft vocabulary.
    """

    label = "EAGLE-3 (chain)"
    recipe = {"lr": 1e-4, "soft_labels": 64, "position_weights": 0.8}

    def __init__(self, config: DraftConfig):
        if not config.vocabulary:
            raise UserError(f"draft.vocabulary is 0: {self.label} has its own LM head, give its tokens")
        H = config.hidden_size
        super().__init__(config, inputs=2 * H, norm=False)
        self.fc = nn.Linear(len(config.hooks) * H, H, bias=False)
        self.token_norm, self.feature_norm = RMSNorm(H, config.eps), RMSNorm(H, config.eps)
        self.out_norm = RMSNorm(H, config.eps)
        self.lm_head = nn.Linear(H, config.vocabulary, bias=False)

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        """What layers 2, L/2 and L-3 read; fewer where they coincide in a shallow base."""
        return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))

    def start_from(self, base: Base) -> None:
        super().start_from(base)
        H = self.config.hidden_size
        nn.init.zeros_(self.fc.weight)
        self.fc.weight.data[:, -H:] = torch.eye(H)
        self.feature_norm.weight.data.copy_(base.model.model.layers[-1].input_layernorm.weight)
        self.out_norm.weight.data.copy_(base.model.model.norm.weight)
        self.lm_head.weight.data.copy_(base.model.lm_head.weight[self.vocabulary])

    def make_head(self, target: Target) -> Head:
        return Head(
            None,
            self.config.eps,
            self.lm_head.weight,
            self.vocabulary,
            target.head.tokens,
            self.lm_head,
            trainable=True,
        )

    def features(self, taps: Tensor, target: Target) -> Tensor:
        return self.fc(taps.flatten(2))

    def enter(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.token_norm(embedded), self.feature_norm(feature)), -1), feature

    def leave(self, feature: Tensor) -> Tensor:
        return self.out_norm(feature)
