"""P-EAGLE (peagle in vllm-project/speculators): EAGLE-3 that drafts all tokens in one pass.

Depth 0 of a draft is EAGLE-3's first place. Depth d > 0 knows neither the token nor the feature it would
follow: at both it reads a learned mask, one for all depths, at RoPE position t + d. It sees what the layer
made of the text up to its anchor t, and depths 1 .. d of its own draft: a causal pass over the text with the
masks behind it.

Departures: those of `eagle3`, training-time test aside; one layer, where the source may stack more; the mask
is a vector in place of an embedding, starting as the mean of the base's, where the source takes a spare token
of the vocabulary and trains the whole embedding; the masked feature starts small, where the source draws it
from the standard normal distribution; a depth is trained at the anchors that `anchor_decay` of training
leaves it, where the source keeps a share 0.7^d of them, but at least 0.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.drafts.eagle3 import Eagle3
from specformer.drafts.interface import Choose, DraftConfig, register
from specformer.target import Target


@register("p_eagle")
class PEagle(Eagle3):
    """EAGLE-3 with a mask in place of the embedding (H,), and one in place of the hidden states (hooks * H,),
    which `fc` turns into a feature like theirs."""

    label = "P-EAGLE (chain)"
    recipe = {"lr": 1e-4, "soft_labels": 64, "position_weights": 1.0}

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.mask_token = nn.Parameter(torch.randn(config.hidden_size) * 0.02)
        self.mask_hidden = nn.Parameter(torch.randn(len(config.hooks) * config.hidden_size) * 0.02)

    def passes(self, k: int) -> int:
        return 1

    def start_from(self, base: Base) -> None:
        super().start_from(base)
        self.mask_token.data.copy_(base.model.model.embed_tokens.weight.float().mean(0))

    def masks(self, rows: int, n: int) -> tuple[Tensor, Tensor]:
        """What `enter` yields for masks: (rows, n, 2H) and (rows, n, H)."""
        return self.enter(self.fc(self.mask_hidden).expand(rows, n, -1), self.mask_token.expand(rows, n, -1))

    def onward(self, feature: Tensor, tokens: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        return self.masks(*tokens.shape)

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
        if store is None:
            raise ValueError("the masks of a draft need a cache")
        attention, b = self.layer.attention, torch.arange(len(last), device=last.device)
        read, x = self._enter(self.features(taps, target), following, target)
        _, keys, values = attention.project(read, *target.rotary.at(window.positions))
        store.write(0, window, keys, values)
        mask_read, mask_x = self.masks(len(last), k - 1)
        read = torch.cat((read[b, last].unsqueeze(1), mask_read), 1)
        x = torch.cat((x[b, last].unsqueeze(1), mask_x), 1)
        own = window.behind(last, 0, store.limit, x.dtype, k)
        mixed = attention.over_cache(read, None, own, store, target)
        return choose(self.head(target)(self.leave(self.layer.finish(x, mixed))), 0)
