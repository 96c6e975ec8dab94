"""Triton kernels: the grouped RMSNorm of the paper (Equation 7), forward and backward, for CUDA.

One program normalises one group of one row, so a row of groups x H is read once and written once; PyTorch's
form reads and writes it three times. `TRITON_INTERPRET=1`, set before triton is imported, runs them on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Programs per group that sum the gradient of the scales; each leaves one partial sum of H float32 numbers.
PARTS = 256


@triton.jit
def _forward(x_ptr, scale_ptr, out_ptr, groups, H, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    x = tl.load(x_ptr + i * H + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + i % groups * H + at, mask=inside, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + i * H + at, (x * root * scale).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr,
    scale_ptr,
    grad_ptr,
    x_grad_ptr,
    part_ptr,
    rows,
    per_part,
    groups,
    H,
    eps,
    WITH_X: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # program (part, group): rows part * per_part and on, so each partial sum has one writer and one order
    part, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < H
    scale = tl.load(scale_ptr + group * H + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * per_part, tl.minimum((part + 1) * per_part, rows)):
        i = (row * groups + group) * H + at
        x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + i, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
        normed = x * root
        total += grad * normed
        if WITH_X:
            scaled = grad * scale
            x_grad = root * (scaled - normed * (tl.sum(scaled * normed, 0) / H))
            tl.store(x_grad_ptr + i, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(part_ptr + (part * groups + group) * H + at, total, mask=inside)


def _launch(H: int) -> dict[str, Any]:
    block = 1 << (H - 1).bit_length()  # the power of two that holds H
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


class _GroupedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        x, scale = x.contiguous(), scale.contiguous()
        groups, H = scale.shape
        out = torch.empty_like(x)
        ctx.save_for_backward(x, scale)
        ctx.eps = eps
        if x.numel():  # CUDA refuses an empty grid
            with torch.cuda.device_of(x):
                _forward[(x.numel() // H,)](x, scale, out, groups, H, eps, **_launch(H))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, scale = ctx.saved_tensors
        groups, H = scale.shape
        rows = x.numel() // (groups * H)
        with_x = ctx.needs_input_grad[0]  # not for a frozen base's hidden states
        x_grad = torch.empty_like(x) if with_x else x
        per_part = max(math.ceil(rows / PARTS), 1)
        parts = math.ceil(rows / per_part)
        sums = torch.empty((parts, groups, H), dtype=torch.float32, device=x.device)
        if rows:
            with torch.cuda.device_of(x):
                _backward[(parts, groups)](
                    x,
                    scale,
                    grad.contiguous(),
                    x_grad,
                    sums,
                    rows,
                    per_part,
                    groups,
                    H,
                    ctx.eps,
                    WITH_X=with_x,
                    **_launch(H),
                )
        return x_grad if with_x else None, sums.sum(0).to(scale.dtype), None


def grouped_rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dimension, one scale vector per group.

    x (..., groups, H), bfloat16, float16 or float32, any strides; scale (groups, H), any of these dtypes;
    the output has x's shape and dtype. Statistics, scaling and sums are float32, rounded once at the end.
    Gradients by x (in its dtype) and by scale (in its dtype, summed in a fixed order: the same bits at every
    run). Raises ValueError for other shapes or dtypes. Source: Equation 7 of the paper.
    """
    if scale.dim() != 2 or x.shape[-2:] != scale.shape:
        raise ValueError(f"x {tuple(x.shape)} does not end in the scale's (groups, H) {tuple(scale.shape)}")
    for name, t in (("x", x), ("scale", scale)):
        if t.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"{name} is {t.dtype}: bfloat16, float16 or float32 is needed")
    return _GroupedRMSNorm.apply(x, scale, eps)
