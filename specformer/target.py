"""The base LLM's forward pass, ragged and lean: what the engine verifies with and training reads from.

transformers' weights, run by a plain loop over layers: fused query/key/value and gate/up matmuls, one mask
and one RoPE look-up per step instead of one per layer, hidden states tapped where a draft model wants them.
Float32 results equal transformers' own (tests/test_target.py). Llama, Qwen2 and Qwen3 shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.errors import UserError
from specformer.layers import RotaryTable, cached_attention, choose_attention, rms_norm, split_heads, swiglu
from specformer.matmul import Linear, linear


def fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Stack the weights (and biases) of linears that read the same input; the originals become views of
    the stacked tensor, so no memory is used twice."""
    if len(linears) == 1:
        return linears[0].weight.data, None if linears[0].bias is None else linears[0].bias.data
    weight = torch.cat([m.weight.data for m in linears])
    bias = None if linears[0].bias is None else torch.cat([m.bias.data for m in linears])
    start = 0
    for m in linears:
        stop = start + m.out_features
        m.weight.data = weight[start:stop]
        if bias is not None:
            m.bias.data = bias[start:stop]
        start = stop
    return weight, bias


def pack_linears(module: nn.Module) -> None:
    """Give every linear of a draft model the same inference matmul as the base LLM (`matmul.linear`)."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            run = linear(m.weight.data, None if m.bias is None else m.bias.data)
            m.forward = run  # type: ignore[method-assign]


def unpack_linears(module: nn.Module) -> None:
    """Undo `pack_linears`: packed weights are copies that learn nothing and follow no change of dtype."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            m.__dict__.pop("forward", None)


@dataclass
class Layer:
    """One decoder layer's weights, ready to run. q_k_norm: Qwen3's per-head scales (Hq + Hkv, D)."""

    norm: Tensor
    qkv: Linear
    q_k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


OUTSIDE = -1
"""The index of a token that a head's vocabulary lacks."""


class Head:
    """A final norm and LM head: a base LLM's, whole or cut to a draft vocabulary, or a draft model's own.

    norm (H,): scales of the final norm, None for none; weight (V', H); vocabulary: token ids (V',) int64,
    distinct, in the order of the logits, or None for all; tokens: V; matmul: runs the weight (default:
    `matmul.linear`); trainable: whether the weight learns with the draft.
    """

    def __init__(
        self,
        norm: Tensor | None,
        eps: float,
        weight: Tensor,
        vocabulary: Tensor | None = None,
        tokens: int | None = None,
        matmul: Linear | None = None,
        trainable: bool = False,
    ):
        self.norm_weight, self.eps, self.weight, self.vocabulary = norm, eps, weight, vocabulary
        self.tokens, self.trainable = tokens or weight.shape[0], trainable
        self.matmul = matmul or linear(weight)
        if vocabulary is not None:
            self._index = torch.full((self.tokens,), OUTSIDE, device=weight.device)
            self._index[vocabulary] = torch.arange(len(vocabulary), device=weight.device)

    def norm(self, x: Tensor) -> Tensor:
        """The final RMSNorm, or x itself without one."""
        if self.norm_weight is None:
            return x
        return rms_norm(x, self.norm_weight, self.eps)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Pre-norm hidden states (..., H) -> logits (..., V') in the model's dtype."""
        return self.matmul(self.norm(hidden))

    def to_tokens(self, index: Tensor) -> Tensor:
        """Places in the logits (int64) -> token ids."""
        return index if self.vocabulary is None else self.vocabulary[index]

    def to_index(self, tokens: Tensor) -> Tensor:
        """Token ids -> their places in the logits, OUTSIDE where there is none; negative ids stay."""
        if self.vocabulary is None:
            return tokens
        return torch.where(tokens < 0, tokens, self._index[tokens.clamp(min=0)])

    def spread(self, probabilities: Tensor) -> Tensor:
        """Probabilities (..., V') -> the same over all tokens (..., V), 0 outside the vocabulary."""
        if self.vocabulary is None:
            return probabilities
        full = probabilities.new_zeros(*probabilities.shape[:-1], self.tokens)
        full[..., self.vocabulary] = probabilities
        return full


class Target:
    """Runs a base LLM over ragged rows.

    base: the frozen LLM; max_length: positions for which RoPE is tabulated.
    """

    def __init__(self, base: Base, max_length: int = 4096):
        model = base.model
        config = model.config
        self.base, self.config = base, config
        self.dtype, self.device = base.dtype, base.device
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.max_length = max_length
        self.rotary = RotaryTable(model.model.rotary_emb, max_length, self.dtype, self.device)
        self.embedding = model.model.embed_tokens.weight
        self.head = Head(model.model.norm.weight, self.eps, model.lm_head.weight)
        # a base that is spread over devices runs as transformers has it
        self.layers = [] if base.spread else [self._prepare(layer) for layer in model.model.layers]

    def _prepare(self, layer) -> Layer:
        a, m = layer.self_attn, layer.mlp
        q_k_norm = None
        if hasattr(a, "q_norm"):
            q_k_norm = torch.cat(
                (
                    a.q_norm.weight.expand(self.heads, -1),
                    a.k_norm.weight.expand(self.kv_heads, -1),
                )
            )
        return Layer(
            norm=layer.input_layernorm.weight,
            qkv=linear(*fuse([a.q_proj, a.k_proj, a.v_proj])),
            q_k_norm=q_k_norm,
            out=linear(*fuse([a.o_proj])),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=linear(*fuse([m.gate_proj, m.up_proj])),
            down=linear(*fuse([m.down_proj])),
        )

    def new_store(
        self,
        rows: int,
        limit: int,
        layers: int | None = None,
        attention: str = "auto",
        kind: type[KVStore] = KVStore,
    ) -> KVStore:
        """A key/value store of the LLM's head geometry for `rows` rows of at most `limit` tokens, read by an
        attention backend (UserError for one that cannot run here, see `layers.choose_attention`, and for a
        base that is spread over devices)."""
        if self.base.spread:
            raise UserError(
                f"{self.base.name} is spread over devices (base.max_memory) and can only be learnt from: to "
                "decode, give a base.device that holds it and set base.max_memory to null"
            )
        count = self.config.num_hidden_layers if layers is None else layers
        backend = choose_attention(attention, self.device, self.dtype)
        return kind(
            count, rows, self.kv_heads, self.head_dim, limit, self.dtype, self.device, attention=backend
        )

    def cut_head(self, vocabulary: Tensor | None, norm: bool = True) -> Head:
        """The LM head over a draft vocabulary (V',) alone, whose rows are copied (None: all of it); norm:
        behind the final norm, or bare."""
        scales, whole = self.head.norm_weight if norm else None, self.head
        if vocabulary is None:
            return Head(scales, self.eps, whole.weight, matmul=whole.matmul)
        return Head(scales, self.eps, whole.weight[vocabulary], vocabulary, whole.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Pre-norm hidden states (..., H) -> logits (..., V) through the final norm and LM head, in the
        model's dtype."""
        return self.head(hidden)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, window: Window, store: KVStore | None = None, hooks: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids (B, n) at the window's positions -> last hidden state before the final norm (B, n, H) and
        the tapped hidden states (B, n, len(hooks), H), or None without hooks.

        hooks: indices i of HS[i], 0 the embedding and i the output of layer i. HS[L] is the last layer's own
        output, before the final norm (transformers' hidden_states[-1] is after it). A base that is
        spread over devices takes whole sequences only."""
        if self.base.spread:
            return self._forward_spread(ids, hooks)
        B, n = ids.shape
        cos, sin = self.rotary.at(window.positions)
        x = F.embedding(ids, self.embedding)
        states = {0: x}
        for i, layer in enumerate(self.layers):
            h = layer.qkv(rms_norm(x, layer.norm, self.eps)).view(B, n, -1, self.head_dim)
            q, k, v = split_heads(h, self.heads, self.kv_heads, layer.q_k_norm, cos, sin, self.eps)
            x = x + layer.out(cached_attention(q, k, v, store, i, window))
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.eps)).chunk(2, -1)
            x = x + layer.down(swiglu(gate, up))
            if i + 1 in hooks:
                states[i + 1] = x
        taps = torch.stack([states[i] for i in hooks], 2) if hooks else None
        return x, taps

    def _forward_spread(self, ids: Tensor, hooks: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """`forward` by transformers' own modules, which accelerate brings together layer by layer."""
        model: Any = self.base.model.model
        states = {0: F.embedding(ids, self.embedding)}

        def keep(i: int):
            def hook(module: nn.Module, given: Any, out: Any) -> None:
                states[i] = (out[0] if isinstance(out, tuple) else out).to(self.device)

            return hook

        last = self.config.num_hidden_layers
        watched = [model.layers[i - 1].register_forward_hook(keep(i)) for i in {*hooks, last} - {0}]
        try:
            model(input_ids=ids, use_cache=False)
        finally:
            for handle in watched:
                handle.remove()
        return states[last], torch.stack([states[i] for i in hooks], 2) if hooks else None

    def taps_of(self, ids: Tensor, taps: Tensor | None) -> Tensor:
        """What `forward` tapped for ids (B, n), as a draft reads it: (B, n, hooks, H), hooks or none."""
        if taps is None:
            return torch.empty(*ids.shape, 0, self.config.hidden_size, device=ids.device)
        return taps

    def encode(self, ids: Tensor, hooks: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """`forward` over whole right-padded sequences (B, n) without a cache: causal attention makes the
        padding harmless, so no mask is needed."""
        return self.forward(ids, fresh_window(ids), hooks=hooks)


def fresh_window(ids: Tensor) -> Window:
    """The window of whole sequences (B, n) that begin at position 0."""
    B, n = ids.shape
    start = torch.zeros(B, dtype=torch.long, device=ids.device)
    return Window.at(slice(0, B), start, n, n, torch.float32, fresh=True)
