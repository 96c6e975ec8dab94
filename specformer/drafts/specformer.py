"""SpecFormer: all draft tokens in one pass, with mostly position-independent parameters (paper, Eq. 7-10).

Notation: HS[i] the base's hidden state after layer i; H hidden size; l_d the draft length; t the position
that is drafted from. Draft position j (0-based) predicts token t + 2 + j: t + 1 is the base's own.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.drafts.blocks import Attention, DecoderLayer
from specformer.drafts.interface import SWITCHES, Choose, Draft, DraftConfig, register
from specformer.layers import RMSNorm, causal_attention
from specformer.target import Target, fresh_window

# FlashAttention-2 refuses batches above 4095; the draft attention's batch is every anchor of a batch.
ATTENTION_SEGMENT = 3072


class ContextAttention(nn.Module):
    """Context causal attention (Equation 8): pre-norm, masked, RoPE, residual; the LLM's layer L + 1."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.attention = Attention(config)

    def forward(
        self, x: Tensor, last: Tensor | None, window: Window, store: KVStore | None, target: Target
    ) -> Tensor:
        """x (B, n, H) -> (B, n, H); with `last` (B,), keys and values are cached for all n tokens but only
        the query at `last` is computed: (B, 1, H)."""
        mixed = self.attention.over_cache(self.norm(x), last, window, store, target)
        if last is not None:
            x = x[torch.arange(x.shape[0], device=x.device), last].unsqueeze(1)
        return x + mixed


class PositionalFFN(nn.Module):
    """RMSNorm, then linear H -> l_d * H with bias, no residual (Equation 9): the only weights that know
    the draft position. (..., H) -> (..., l_d, H)."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.linear = nn.Linear(config.hidden_size, config.draft_length * config.hidden_size)
        self.shape = (config.draft_length, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).unflatten(-1, self.shape)

    def start(self) -> None:
        """Every position starts as the identity."""
        length, dim = self.shape
        self.linear.weight.data.copy_(torch.eye(dim).repeat(length, 1))
        nn.init.zeros_(self.linear.bias)


class PositionalEmbedding(nn.Module):
    """The ablation of Table 4: RMSNorm, plus one learned vector per draft position."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.embedding = nn.Parameter(torch.randn(config.draft_length, config.hidden_size) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).unsqueeze(-2) + self.embedding

    def start(self) -> None:
        nn.init.normal_(self.embedding, std=0.02)


class AnchorToken(nn.Module):
    """Beyond the paper: the embedding of the token after a position joins the stream there.

    The paper's draft has to infer from HS[L] which token the base has just produced; here it is told.
    RMSNorm, then linear H -> H, starting at zero. x (..., H), tokens (...) int64 -> (..., H).
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor, tokens: Tensor, target: Target) -> Tensor:
        return x + self.linear(self.norm(F.embedding(tokens, target.embedding)))


class DraftBlock(DecoderLayer):
    """Attention over the l_d draft positions, then SwiGLU, both pre-norm with residual (Equation 10).

    Bidirectional: no mask, no RoPE. Causal (the ablation of Table 4): masked, with RoPE.
    """

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        self.causal = config.draft_attention == "causal"

    def forward(self, x: Tensor, target: Target) -> Tensor:
        """x (N, l_d, H) -> (N, l_d, H)."""
        cos = sin = None
        if self.causal:
            cos, sin = target.rotary.at(torch.arange(x.shape[1], device=x.device)[None])
        q, k, v = self.attention.project(self.norm(x), cos, sin)
        parts = zip(*(t.split(ATTENTION_SEGMENT) for t in (q, k, v)), strict=True)
        mixed = [causal_attention(*part, causal=self.causal) for part in parts]
        return self.finish(x, self.attention.out(torch.cat(mixed) if len(mixed) > 1 else mixed[0]))


@register("specformer")
class SpecFormer(Draft):
    """The paper's draft model: hook, grouped RMSNorm, downsampler, context causal attention, positional FFN,
    bidirectional draft attention with SwiGLU; then the base's frozen final norm and LM head.

    `layers` stacks the draft block, the part whose weights all positions share (the paper's "larger").
    `anchor_token` "positional" lets the newest token join before the positional FFN, "context" lets each
    position's next token join before the context attention, so that its keys and values know it too.
    """

    label = "SpecFormer"
    switches = SWITCHES
    cache_layers = 1

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        H, groups = config.hidden_size, len(config.hooks)
        self.grouped_norm = RMSNorm((groups, H), config.eps)
        self.downsampler = nn.Linear(groups * H, H, bias=False)
        self.context = ContextAttention(config)
        self.positional = PositionalFFN(config) if config.positional == "ffn" else PositionalEmbedding(config)
        self.blocks = nn.ModuleList(DraftBlock(config) for _ in range(config.layers))
        self.anchor = AnchorToken(config) if config.anchor_token != "none" else None

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        return 0, layers // 2, layers - 1, layers

    def start_from(self, base: Base) -> None:
        """Begin from what the base knows: the downsampler passes HS[L] through, every draft position is the
        identity, attention and feed-forward weights are the last layer's with zeroed outputs. The draft then
        starts by predicting what the base's own head predicts, and learns to look ahead from there."""
        H = self.config.hidden_size
        last = self.config.hooks.index(max(self.config.hooks))
        nn.init.zeros_(self.downsampler.weight)
        self.downsampler.weight.data[:, last * H : (last + 1) * H] = torch.eye(H)
        layer = base.model.model.layers[-1]
        self.context.attention.copy_from(layer.self_attn)
        self.context.norm.weight.data.copy_(layer.input_layernorm.weight)
        self.positional.start()
        for block in self.blocks:
            cast(DraftBlock, block).start(layer)

    def downsample(self, taps: Tensor) -> Tensor:
        """Grouped RMSNorm and downsampler (Equation 7): (B, n, groups, H) -> (B, n, H)."""
        return self.downsampler(self.grouped_norm(taps).flatten(-2))

    def join(self, x: Tensor, tokens: Tensor, target: Target, place: str) -> Tensor:
        """x (..., H) with the embedding of `tokens` (...) where the config wants it, else x itself."""
        if self.anchor is None or self.config.anchor_token != place:
            return x
        return self.anchor(x, tokens, target)

    def draft(self, x: Tensor, target: Target) -> Tensor:
        """Positional FFN and draft blocks (Equations 9, 10): (N, H) -> (N, l_d, H), before the final norm."""
        h = self.positional(x)
        for block in self.blocks:
            h = block(h, target)
        return h

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
        x = self.join(self.downsample(taps), following, target, "context")
        x = self.context(x, last, window, store, target)[:, 0]
        if self.config.anchor_token == "positional":
            newest = following.gather(1, last[:, None])[:, 0]
            x = self.join(x, newest, target, "positional")
        return choose(self.head(target)(self.draft(x, target)[:, :k]), 0)

    def training_hidden(
        self, taps: Tensor, following: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        x = self.join(self.downsample(taps), following, target, "context")
        x = self.context(x, None, fresh_window(following), None, target)[rows, columns]
        return self.draft(self.join(x, following[rows, columns], target, "positional"), target)

    def position_parameters(self) -> int:
        H = self.config.hidden_size
        return H * H + H if self.config.positional == "ffn" else H
