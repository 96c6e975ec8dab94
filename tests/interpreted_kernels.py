"""The Triton kernels on the CPU, against float64; test_kernels.py runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from specformer import kernels, layers
from specformer.kernels import grouped_rms_norm
from specformer.layers import RMSNorm

EPS = 1e-5
# Relative to the largest element: the rounding of one number of that dtype, twice.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def reference(x, scale, grad):
    """Output and both gradients in float64, by autograd."""
    x, scale = x.detach().double().requires_grad_(), scale.detach().double().requires_grad_()
    out = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * scale
    out.backward(grad.double())
    return out.detach(), x.grad, scale.grad


def case(shape, dtype=torch.float32, scale_dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand(shape[:-1], generator=generator)[..., None] * 9
    scale = 1 + 0.5 * torch.randn(shape[-2:], generator=generator)
    grad = torch.randn(shape, generator=generator)
    return x.to(dtype), scale.to(scale_dtype), grad.to(dtype)


def check(x, scale, grad):
    x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
    out = grouped_rms_norm(x, scale, EPS)
    out.backward(grad)
    assert x.grad is not None and scale.grad is not None
    found = (out.detach(), x.grad, scale.grad)
    assert [t.dtype for t in found] == [x.dtype, x.dtype, scale.dtype]
    for ours, wanted in zip(found, reference(x, scale, grad), strict=True):
        assert ours.shape == wanted.shape
        if wanted.numel():
            assert (ours.double() - wanted).abs().max() <= TOLERANCE[ours.dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 3, 4, 576), (5, 3, 80), (7, 1, 64), (1, 2, 3), (4, 33)])
def test_forward_and_gradients_equal_float64(shape, dtype):
    check(*case(shape, dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scales_may_have_any_dtype(dtype):
    check(*case((6, 2, 80), torch.bfloat16, dtype))
    check(*case((6, 2, 80), dtype, dtype))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 9, 10])
def test_any_number_of_rows_is_shared_out_among_the_parts(rows, monkeypatch):
    monkeypatch.setattr(kernels, "PARTS", 3)
    check(*case((rows, 2, 40)))


def test_no_rows_give_no_gradient():
    x, scale, grad = case((0, 4, 576))
    scale.requires_grad_()
    grouped_rms_norm(x, scale, EPS).backward(grad)
    assert scale.grad is not None and scale.grad.shape == (4, 576) and not scale.grad.any()


def test_strides_do_not_matter():
    x, scale, grad = case((6, 4, 80))
    check(x.transpose(0, 1).contiguous().transpose(0, 1), scale, grad)
    check(x[::2], scale, grad[::2])
    check(x, scale.T.contiguous().T, grad.transpose(0, 1).contiguous().transpose(0, 1))
    check(x, scale, grad[:1].expand(6, -1, -1))


def test_frozen_input_gets_no_gradient_and_is_left_alone():
    x, scale, grad = case((5, 2, 80))
    before = x.clone()
    scale.requires_grad_()
    grouped_rms_norm(x, scale, EPS).backward(grad)
    assert x.grad is None and torch.equal(x, before)
    wanted = reference(x, scale, grad)[2]
    assert wanted is not None
    torch.testing.assert_close(scale.grad, wanted.float())


def test_wrong_shapes_and_dtypes_are_refused():
    x, scale, _ = case((5, 2, 80))
    for bad in (scale[:1], scale[0], scale[:, :40]):
        with pytest.raises(ValueError, match="does not end in the scale's"):
            grouped_rms_norm(x, bad, EPS)
    with pytest.raises(ValueError, match="x is torch.float64"):
        grouped_rms_norm(x.double(), scale, EPS)


def test_the_layer_gives_the_same_with_the_kernel(monkeypatch):
    """As in training: float32 scales under bfloat16 hidden states."""
    x, _, grad = case((3, 7, 4, 64), torch.bfloat16)
    norm = RMSNorm((4, 64), EPS)
    norm.weight.data += torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    results = []
    for serves in (False, True):
        monkeypatch.setattr(layers, "kernel_serves", lambda *_, serves=serves: serves)
        norm.zero_grad()
        out = norm(x)
        out.backward(grad)
        assert out.dtype == torch.bfloat16 and norm.weight.grad is not None
        results.append((out.detach().float(), norm.weight.grad.clone()))
    for plain, ours in zip(*results, strict=True):
        assert (plain - ours).abs().max() / plain.abs().max() < 2e-2
        assert not torch.equal(plain, ours), "the kernel rounds once, so it was not called"
