"""Building blocks shared by the base LLM's forward pass and the draft models.

Shapes use B rows, n tokens per row, H hidden size, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specformer import native
from specformer.cache import KVStore, Window
from specformer.errors import UserError

TRITON = find_spec("triton") is not None


def kernel_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the Triton kernel takes x (..., groups, H) with weight (groups, H): on CUDA, up to 32 bits."""
    return TRITON and x.is_cuda and weight.dim() == 2 and x.dtype.itemsize <= 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) over its last dimension, times weight (H,); the mean square in float32, rounded once."""
    if native.serves(x, weight):
        return native.rms_norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, (..., I) each."""
    return native.swiglu(gate, up) if native.serves(gate, up) else F.silu(gate) * up


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, in the input's dtype with the mean square in float32.

    dim: H, or (groups, H) for one scale vector per group (the grouped RMSNorm of the paper, Equation 7);
    scales start at 1. Input (..., *dim), output of the same shape and dtype. Groups on CUDA take the Triton
    kernel (kernels.py).
    """

    def __init__(self, dim: int | tuple[int, int], eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        if kernel_serves(x, self.weight):
            from specformer.kernels import grouped_rms_norm  # needs triton

            return grouped_rms_norm(x, self.weight, self.eps)
        if self.weight.dim() == 1 and native.serves(x, self.weight):
            return native.rms_norm(x, self.weight, self.eps)
        # the cast matters under autocast: float32 scales would lift the whole stream to float32
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight.to(x.dtype)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, the base LLM's feed-forward shape; (..., H) -> (..., H)."""

    def __init__(self, dim: int, intermediate: int):
        super().__init__()
        self.gate = nn.Linear(dim, intermediate, bias=False)
        self.up = nn.Linear(dim, intermediate, bias=False)
        self.down = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Llama and Qwen.

    x (B, n, heads, D); cos and sin (B, n, 1, D) in x's dtype, sin with its first half negated
    (`RotaryTable` makes it so), which turns "rotate half" into one roll.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def split_heads(
    h: Tensor,
    heads: int,
    kv_heads: int,
    scale: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One fused projection h (B, n, heads + 2 * kv_heads, D), which may be overwritten -> q (B, n, heads, D),
    k and v (B, n, kv_heads, D). q and k: RMSNorm per head where there is a scale (heads + kv_heads, D), as in
    Qwen3, then RoPE where there are cos and sin (`rotate`)."""
    rotated = heads + kv_heads
    if cos is not None and sin is not None and native.serves(h, cos):
        if h.shape[-1] in native.HEAD_SIZES and (scale is None or scale.dtype == h.dtype):
            native.rope_(h, cos, sin, rotated, scale, eps)
            return h[:, :, :heads], h[:, :, heads:rotated], h[:, :, rotated:]
    qk, v = h[:, :, :rotated], h[:, :, rotated:]
    if scale is not None:
        qk = F.rms_norm(qk, qk.shape[-1:], None, eps) * scale
    if cos is not None and sin is not None:
        qk = rotate(qk, cos, sin)
    return qk[:, :, :heads], qk[:, :, heads:], v


class RotaryTable:
    """cos and sin for every position up to `length`, from the base LLM's own rotary embedding.

    Asking the model's module keeps rope_theta and every static scaling rule (linear, llama3, yarn)
    exactly as transformers computes them.
    """

    def __init__(self, rotary: nn.Module, length: int, dtype: torch.dtype, device: torch.device):
        positions = torch.arange(length, device=device)[None]
        cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
        half = sin.shape[-1] // 2
        self.cos = cos[0].to(dtype)
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B, n) int64 -> cos, sin, each (B, n, 1, D)."""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of whole sequences among themselves, keys and values shared by groups of query heads.

    q (B, n, Hq, D), k and v (B, n, Hkv, D) -> (B, n, Hq * D); causal False: every position sees all.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal and q.shape[1] > 1,
        enable_gqa=q.shape[2] > k.shape[2],
    )
    return out.transpose(1, 2).flatten(2)


def chain_attention(
    q: Tensor, k: Tensor, v: Tensor, at: Tensor, chain: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of draft chains, each from its own anchor: a chain sees its row's text up to the anchor, and
    itself.

    q (B, A, Hq, D): a query of each of the A chains of a row; k and v (B, T, Hkv, D): the text's; at (B, A)
    int64: the anchors; chain: keys and values (B, A, Hkv, D) of each place of the chains up to the query's.
    -> (B, A, Hq * D); softmax in float32. Holds B x Hq x A x (T + chain) scores.
    """
    T, own = k.shape[1], [torch.stack(part, 2) for part in zip(*chain, strict=True)]
    q = q.unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5
    text = torch.einsum("bahgd,bthd->bahgt", q, k)
    later = torch.arange(T, device=q.device) > at[:, :, None]
    text = text.masked_fill(later[:, :, None, None], float("-inf"))
    scores = torch.cat((text, torch.einsum("bahgd,bashd->bahgs", q, own[0])), -1)
    of_text, of_chain = scores.float().softmax(-1).to(v.dtype).split((T, len(chain)), -1)
    mixed = torch.einsum("bahgt,bthd->bahgd", of_text, v)
    mixed = mixed + torch.einsum("bahgs,bashd->bahgd", of_chain, own[1])
    return mixed.flatten(2)


def choose_attention(attention: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend of `ragged_attention` for a setting: "sdpa", "native", "flash", or "auto", which is native
    on a CPU where its kernels can be built, flash on a GPU in bfloat16 or float16 where the package is
    installed, else sdpa.

    Raises UserError for an unknown name, and saying what a backend that is asked for lacks where it cannot
    run.
    """
    if attention not in ("auto", *BACKENDS):
        raise UserError(f"engine.attention: {attention!r} is not auto, {', '.join(BACKENDS)}")
    if attention == "sdpa":
        return "sdpa"
    ready = device.type == "cpu" and native.library() is not None
    if attention == "native" and not ready:
        raise UserError(
            f"engine.attention: native runs on a CPU with a C++ compiler (g++, clang++ or CXX), this is "
            f"{device.type}{' without one' if native.compiler() is None else ''}: use auto or sdpa"
        )
    if attention in ("auto", "native") and ready:
        return "native"
    lacks = None
    if device.type != "cuda":
        lacks = f"a CUDA device, and this runs on {device.type}: use auto or sdpa"
    elif dtype not in (torch.bfloat16, torch.float16):
        lacks = f"base.dtype bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    else:
        try:
            import flash_attn  # noqa: F401  # type: ignore[import-not-found]
        except ImportError as error:
            lacks = f"the package flash-attn ({error}): pip install specformer[gpu]"
    if lacks is None:
        return "flash"
    if attention == "flash":
        raise UserError(f"engine.attention: flash needs {lacks}")
    return "sdpa"


def _sdpa(q: Tensor, store: KVStore, layer: int, window: Window) -> Tensor:
    """PyTorch's attention under the window's mask, a call per run of rows of similar length. The query heads
    of one group are laid along the query axis, so keys and values are read once per group, never repeated."""
    B, n, Hq, D = q.shape
    Hkv = store.kv_heads
    groups = Hq // Hkv
    q = q.view(B, n, Hkv, groups, D).permute(0, 2, 3, 1, 4).reshape(B, Hkv, groups * n, D)
    keys, values = store.read(layer, window)
    parts = [
        F.scaled_dot_product_attention(q[a:b], keys[a:b, :, :upto], values[a:b, :, :upto], attn_mask=mask)
        for (a, b, upto), mask in zip(window.runs, window.grouped_masks(groups), strict=True)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.view(B, Hkv, groups, n, D).permute(0, 3, 1, 2, 4).reshape(B, n, Hq * D)


def _flash(q: Tensor, store: KVStore, layer: int, window: Window) -> Tensor:
    """flash-attn's cache kernel, which knows each row's length: no mask, no runs, no gathered rows.

    It wants (rows, capacity, Hkv, D) and asks of the strides only that the last dimension be contiguous, so
    the head-major store is handed over as a transposed view; nothing is copied. Its causal mask is aligned
    to the end of each row, which is where the n new tokens lie.
    """
    kv, index = store.kv[layer].transpose(2, 3), None
    if isinstance(window.rows, slice):
        kv = kv[:, window.rows]
    else:
        index = window.rows.int()
    return _flash_op(q, kv[0], kv[1], window.lengths, index).flatten(2)


# An operator of its own, because torch.compile cannot look into the package's extension.
@torch.library.custom_op("specformer::flash_attention", mutates_args=())
def _flash_op(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, rows: Tensor | None) -> Tensor:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    return flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, cache_batch_idx=rows, causal=True)


@_flash_op.register_fake
def _(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, rows: Tensor | None) -> Tensor:
    return q.new_empty(q.shape)


def _native(q: Tensor, store: KVStore, layer: int, window: Window) -> Tensor:
    """Our own kernel, for the few queries of a decode step; each row is read to its own length. Chunks of
    prompts go to PyTorch's attention, which is made for them."""
    kv = store.kv[layer]
    many = q.shape[1] * q.shape[2] > native.MOST_QUERIES * store.kv_heads
    if many or q.shape[3] not in native.HEAD_SIZES or not native.serves(q, kv):
        return _sdpa(q, store, layer, window)
    rows = None if isinstance(window.rows, slice) else window.rows
    return native.attention(q if native.token_major(q) else q.contiguous(), kv, rows, window.positions)


BACKENDS = {"sdpa": _sdpa, "native": _native, "flash": _flash}


def ragged_attention(q: Tensor, store: KVStore, layer: int, window: Window) -> Tensor:
    """Attention of the window's n queries over the cache, each row to its own length, by the store's backend
    (`choose_attention`). q (B, n, Hq, D) -> (B, n, Hq * D)."""
    return BACKENDS[store.attention](q, store, layer, window)


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, store: KVStore | None, layer: int, window: Window
) -> Tensor:
    """Attend from the window's n new tokens over everything committed before and themselves.

    q (B, n, Hq, D), k and v (B, n, Hkv, D). The new keys and values are written to `store` at the rows'
    own positions. Rows whose window begins at 0 need no cache read: plain causal attention serves.
    """
    if store is not None:
        store.write(layer, window, k, v)
    if store is None or window.fresh:
        return causal_attention(q, k, v, causal=True)
    return ragged_attention(q, store, layer, window)
