"""What several draft models are made of: attention with the base's head geometry, and its decoder layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.cache import KVStore, Window
from specformer.drafts.interface import DraftConfig
from specformer.layers import RMSNorm, SwiGLU, cached_attention, ragged_attention, split_heads
from specformer.target import Target


def side_by_side(rows: Tensor, columns: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Anchors rows, columns (N,) int64 of so many rows, as (B, A) columns, where a row with fewer than A
    repeats position 0; and the place of each anchor in its row (N,)."""
    slots = F.one_hot(rows, count).cumsum(0).gather(1, rows[:, None])[:, 0] - 1
    at = columns.new_zeros(count, int(slots.max()) + 1)
    at[rows, slots] = columns
    return at, slots


class Attention(nn.Module):
    """Projections of one self-attention with the base's head geometry (bias and q/k norm as the base has).

    inputs: width of what is projected, H by default.
    """

    def __init__(self, config: DraftConfig, inputs: int | None = None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.eps = config.eps
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(inputs or config.hidden_size, width, bias=config.attention_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)
        self.q_k_norm = (
            nn.Parameter(torch.ones(config.heads + config.kv_heads, config.head_dim))
            if config.q_k_norm
            else None
        )

    def project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, n, inputs) -> q (B, n, Hq, D), k and v (B, n, Hkv, D); RoPE where cos and sin are given."""
        h = self.qkv(x).view(*x.shape[:2], -1, self.head_dim)
        return split_heads(h, self.heads, self.kv_heads, self.q_k_norm, cos, sin, self.eps)

    def over_cache(
        self, x: Tensor, last: Tensor | None, window: Window, store: KVStore | None, target: Target
    ) -> Tensor:
        """x (B, n, inputs) at the window's positions -> what they gather from all before them (B, n, H).

        With `last` (B,) keys and values are cached for all n tokens, but only the query at `last` is
        computed: (B, 1, H); ValueError without a store.
        """
        q, k, v = self.project(x, *target.rotary.at(window.positions))
        if last is None:
            return self.out(cached_attention(q, k, v, store, 0, window))
        if store is None:
            raise ValueError("drafting from single positions needs a cache")
        store.write(0, window, k, v)
        b = torch.arange(x.shape[0], device=x.device)
        return self.out(ragged_attention(q[b, last].unsqueeze(1), store, 0, window.pick(last, x.dtype)))

    def copy_from(self, layer: Any) -> None:
        """The base layer's projections, of the last H of the inputs; the output starts at zero, so the block
        starts as the identity."""
        projections = [layer.q_proj, layer.k_proj, layer.v_proj]
        weight = torch.cat([m.weight for m in projections])
        nn.init.zeros_(self.qkv.weight)
        self.qkv.weight.data[:, -weight.shape[1] :] = weight
        if self.qkv.bias is not None:
            self.qkv.bias.data.copy_(torch.cat([m.bias for m in projections]))
        if self.q_k_norm is not None:
            self.q_k_norm.data[: self.heads] = layer.q_norm.weight
            self.q_k_norm.data[self.heads :] = layer.k_norm.weight
        nn.init.zeros_(self.out.weight)


class DecoderLayer(nn.Module):
    """A decoder layer of the base's shape: attention, then SwiGLU, both pre-norm with residual.

    inputs: width of what the attention reads, H by default; norm: whether it has a norm of its own.
    """

    def __init__(self, config: DraftConfig, inputs: int | None = None, norm: bool = True):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.eps) if norm else nn.Identity()
        self.attention = Attention(config, inputs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def start(self, layer: Any) -> None:
        """The base layer's weights, with zeroed outputs: the layer starts as the identity."""
        self.attention.copy_from(layer.self_attn)
        if isinstance(self.norm, RMSNorm):
            self.norm.weight.data.copy_(layer.input_layernorm.weight)
        self.mlp_norm.weight.data.copy_(layer.post_attention_layernorm.weight)
        self.mlp.gate.weight.data.copy_(layer.mlp.gate_proj.weight)
        self.mlp.up.weight.data.copy_(layer.mlp.up_proj.weight)
        nn.init.zeros_(self.mlp.down.weight)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream x (..., H) with what the attention gathered, and then the feed-forward."""
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x))
