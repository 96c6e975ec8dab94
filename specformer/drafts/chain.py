"""What autoregressive drafts share: one decoder layer that runs once for each token of a chain.

Every place of a chain reads a feature and the token after it, and yields the next feature, which the LM head
turns into the next token. The first place reads the base's feature at position t and token t + 1, at RoPE
position t; place j (0-based) what place j - 1 yielded, at t + j. It sees the keys and values that the layer
made of the base's own features up to t, and those of its own chain.

In training true tokens stand for drafted ones, and every place sees what it will see when drafting: what was
trained is what decodes (HASS calls it aligned training, EAGLE-3 training-time test).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.drafts.blocks import DecoderLayer, side_by_side
from specformer.drafts.interface import Choose, Draft, DraftConfig
from specformer.layers import causal_attention, chain_attention
from specformer.target import Target, fresh_window


class ChainDraft(Draft):
    """A draft that yields one token a pass.

    inputs: width of what the layer's attention reads, H by default; norm: whether the layer norms it first;
    trained_places: places of the chain that training runs through, None for all; detached: whether a place's
    feature passes no gradient back to the one before.
    """

    cache_layers = 1
    final_norm = False
    trained_places: int | None = None
    detached: bool = False

    def __init__(self, config: DraftConfig, inputs: int | None = None, norm: bool = True):
        super().__init__(config)
        self.layer = DecoderLayer(config, inputs, norm)

    @property
    def trained_length(self) -> int:
        return min(self.draft_length, self.trained_places or self.draft_length)

    def passes(self, k: int) -> int:
        return k

    def start_from(self, base: Base) -> None:
        """The layer starts as the identity, with the weights of the base's last one."""
        self.layer.start(base.model.model.layers[-1])

    def features(self, taps: Tensor, target: Target) -> Tensor:
        """What the first place reads of the base: taps (B, n, hooks, H) -> (B, n, H)."""
        raise NotImplementedError

    def enter(self, feature: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """A feature and the embedding of the token after it (..., H) -> what the layer's attention reads
        (..., inputs), and the residual stream (..., H)."""
        raise NotImplementedError

    def leave(self, feature: Tensor) -> Tensor:
        """What the LM head reads of a feature that the layer yielded: (..., H) -> (..., H)."""
        return feature

    def _enter(self, feature: Tensor, tokens: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        return self.enter(feature, F.embedding(tokens, target.embedding))

    def onward(self, feature: Tensor, tokens: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """What `enter` yields for a place behind the first, of the feature (..., H) that the place before
        yielded and the token after it (...) int64."""
        return self._enter(feature, tokens, target)

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
            raise ValueError("a chain needs a cache")
        head, attention = self.head(target), self.layer.attention
        read, x = self._enter(self.features(taps, target), following, target)
        mixed = attention.over_cache(read, last, window, store, target)
        x = x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)
        tokens = []
        for j in range(k):
            if j:
                read, x = self.onward(x, tokens[-1], target)
                own = window.behind(last, j, store.limit, x.dtype)
                mixed = attention.over_cache(read, None, own, store, target)
            x = self.layer.finish(x, mixed)
            tokens.append(choose(head(self.leave(x)), j))
        return torch.cat(tokens, 1)

    def training_hidden(
        self, taps: Tensor, following: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        attention = self.layer.attention
        read, x = self._enter(self.features(taps, target), following, target)
        positions = fresh_window(following).positions
        q, k, v = attention.project(read, *target.rotary.at(positions))
        mixed = causal_attention(q, k, v, causal=True)

        at, slots = side_by_side(rows, columns, len(taps))
        b = torch.arange(len(taps), device=rows.device)[:, None]
        x = self.layer.finish(x[b, at], attention.out(mixed[b, at]))
        places, chain = [x], []
        for j in range(1, self.trained_length if self.training else self.draft_length):
            # beyond the text's end lie no labels: any token and position serve
            tokens = following[b, (at + j).clamp(max=following.shape[1] - 1)]
            read, x = self.onward(x.detach() if self.detached else x, tokens, target)
            positions = (at + j).clamp(max=target.max_length - 1)
            q, own_k, own_v = attention.project(read, *target.rotary.at(positions))
            chain.append((own_k, own_v))
            x = self.layer.finish(x, attention.out(chain_attention(q, k, v, at, chain)))
            places.append(x)
        return self.leave(torch.stack(places, 2)[rows, slots])
