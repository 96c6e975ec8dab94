"""DFlash (z-lab/dflash; trained as in sgl-project/SpecForge): a block of masks filled in by one pass.

The block of anchor t is the token t + 1, which the base has just produced, and a mask for every draft
position, at RoPE positions t + 1 on. Each layer's queries come of the block; its keys and values of the block
and, projected by the same weights, of the base's hidden states up to t, which are fused once for all layers.
Nothing is masked inside the block.

Departures: one layer by default, at the budget of the other drafts, where the source has five (`layers` 5);
the hooks are the source's for five layers, whatever `layers`; the mask is a learned vector, starting as the
mean of the base's embeddings, where the source takes the frozen embedding of a spare token; q/k norm and bias
are the base's choice, not Qwen3's; a draft shorter than l_d has a shorter block than it was trained with, as
in the source; with init "base" the hidden states start as the last hook, the layers as the identity with the
weights of the base's last one, and the final norm as the base's, where the source draws them at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.drafts.blocks import DecoderLayer, side_by_side
from specformer.drafts.interface import Choose, Draft, DraftConfig, register
from specformer.layers import RMSNorm, chain_attention, ragged_attention
from specformer.target import Target, fresh_window

HOOKS = 5
"""Hidden states that the published drafts read."""

KV = tuple[Tensor, Tensor]


def together(q: Tensor, kv_heads: int, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention of queries (..., m, Hq, D) that all see the same keys: `attend` takes them as heads of one,
    (..., m * Hq, D) grouped by key/value head, and gives (..., m * Hq * D); -> (..., m, Hq * D)."""
    folded = q.unflatten(-2, (kv_heads, -1)).transpose(-4, -3).flatten(-4, -2)
    mixed = attend(folded).unflatten(-1, (kv_heads, q.shape[-3], -1))
    return mixed.transpose(-3, -2).flatten(-2)


@register("dflash")
class DFlash(Draft):
    """`fc` fuses the hooks, a norm follows; decoder layers of the base's shape run over the block; then a
    final norm of its own, and the base's frozen LM head."""

    label = "DFlash (chain)"
    recipe = {"lr": 6e-4, "warmup": 0.04, "position_weights": math.exp(-1 / 7)}
    switches = ("layers",)
    final_norm = False

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        H = config.hidden_size
        self.cache_layers = config.layers
        self.fc = nn.Linear(len(config.hooks) * H, H, bias=False)
        self.feature_norm, self.out_norm = RMSNorm(H, config.eps), RMSNorm(H, config.eps)
        self.mask_token = nn.Parameter(torch.randn(H) * 0.02)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        """What layers 1 to L - 3 (0-based) yield, five evenly spread; fewer where they coincide."""
        span = max(layers - 4, 0)
        return tuple(sorted({min(round(1 + i * span / (HOOKS - 1)) + 1, layers) for i in range(HOOKS)}))

    def start_from(self, base: Base) -> None:
        H, layer = self.config.hidden_size, base.model.model.layers[-1]
        nn.init.zeros_(self.fc.weight)
        self.fc.weight.data[:, -H:] = torch.eye(H)
        self.feature_norm.weight.data.copy_(layer.input_layernorm.weight)
        self.out_norm.weight.data.copy_(base.model.model.norm.weight)
        self.mask_token.data.copy_(base.model.model.embed_tokens.weight.float().mean(0))
        for own in self.layers:
            cast(DecoderLayer, own).start(layer)

    def draft(
        self,
        taps: Tensor,
        newest: Tensor,
        at: Tensor,
        positions: Tensor,
        target: Target,
        masks: int,
        attend: Callable[[int, Tensor, KV, KV], Tensor],
    ) -> Tensor:
        """What the LM head reads of so many masks: (B, A, masks, H).

        taps (B, T, hooks, H) and their positions (B, T) int64; newest (B, A) int64, the tokens that begin the
        A blocks of each row; at (B, A, 1 + masks) int64, where the blocks lie. attend(layer, q (B, A, 1 +
        masks, Hq, D), keys and values of the text (B, T, Hkv, D), and of the blocks) -> q's shape, flat.
        """
        first = F.embedding(newest, target.embedding).unsqueeze(2)
        mask = self.mask_token.to(first.dtype).expand(*newest.shape, masks, -1)
        x, features = torch.cat((first, mask), 2), self.feature_norm(self.fc(taps.flatten(2)))
        text, own = target.rotary.at(positions), target.rotary.at(at.flatten(1))
        for i, layer in enumerate(cast(Iterable[DecoderLayer], self.layers)):
            attention = layer.attention
            _, keys, values = attention.project(features, *text)
            projected = attention.project(layer.norm(x).flatten(1, 2), *own)
            q, k, v = (t.unflatten(1, at.shape[1:]) for t in projected)
            x = layer.finish(x, attention.out(attend(i, q, (keys, values), (k, v))))
        return self.out_norm(x[:, :, 1:])

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
            raise ValueError("a block needs a cache")
        block = window.behind(last, 1, store.limit, taps.dtype, 1 + k)
        whole = block.pick(torch.full_like(last, k), taps.dtype)  # its last place sees all of it

        def attend(i: int, q: Tensor, context: KV, own: KV) -> Tensor:
            store.write(i, window, *context)
            store.write(i, block, own[0][:, 0], own[1][:, 0])
            return together(q, store.kv_heads, lambda q: ragged_attention(q, store, i, whole))

        newest, at = following.gather(1, last[:, None]), block.positions.unsqueeze(1)
        hidden = self.draft(taps, newest, at, window.positions, target, k, attend)
        return choose(self.head(target)(hidden[:, 0]), 0)

    def training_hidden(
        self, taps: Tensor, following: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        anchors, slots = side_by_side(rows, columns, len(taps))
        places = 1 + torch.arange(1 + self.draft_length, device=rows.device)
        # where the tabulated positions end, only texts cut there have blocks, and those share the last one
        at = (anchors.unsqueeze(-1) + places).clamp(max=target.max_length - 1)

        def attend(i: int, q: Tensor, context: KV, own: KV) -> Tensor:
            chain = list(zip(own[0].unbind(2), own[1].unbind(2), strict=True))
            return together(q, own[0].shape[3], lambda q: chain_attention(q, *context, anchors, chain))

        positions, newest = fresh_window(following).positions, following.gather(1, anchors)
        hidden = self.draft(taps, newest, at, positions, target, self.draft_length, attend)
        return hidden[rows, slots]
