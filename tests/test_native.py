"""The C++ kernels compute what PyTorch's operators compute, and are done without where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import perturbed_specformer, prompts, run

from specformer import native
from specformer.cache import KVStore, Window
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.layers import choose_attention, ragged_attention, rotate, split_heads

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C++ compiler on this machine")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def by_torch(monkeypatch):
    """Calls a function as it runs on a machine without a compiler."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            return function(*arguments, **options)

    return call


def assert_same(found, expected):
    """float32 up to the order of a sum; bfloat16 to its last bit, but for a sum that falls on a tie."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    else:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
        assert (found == expected).float().mean() > 0.995


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 576), (3, 5, 40), (40, 5, 576)])  # the last one on all threads
def test_rms_norm_and_swiglu(dtype, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).mul(7).to(dtype), torch.rand(shape[-1]).to(dtype)
    assert_same(native.rms_norm(x, weight, 1e-5), F.rms_norm(x, shape[-1:], weight, 1e-5))
    gate, up = x.chunk(2, -1)
    assert_same(native.swiglu(gate, up), F.silu(gate) * up)
    assert_same(
        native.swiglu(gate.transpose(0, 1), up.contiguous().transpose(0, 1)),
        (F.silu(gate) * up).transpose(0, 1),
    )


@needs_kernels
def test_swiglu_far_from_zero():
    gate = torch.tensor([-300.0, -90, -20, -1e-30, 0, 20, 90, 300]).repeat(4)
    torch.testing.assert_close(native.swiglu(gate, torch.ones(32)), F.silu(gate), rtol=1e-6, atol=1e-30)
    bad = torch.tensor([float("nan"), float("inf")]).repeat(16).bfloat16()
    assert native.rms_norm(bad, torch.ones(32).bfloat16(), 1e-5).isnan().any(), "a NaN is not hidden"


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", native.HEAD_SIZES)
@pytest.mark.parametrize("scaled", [False, True])
def test_rope_with_and_without_norms_per_head(by_torch, dtype, D, scaled):
    torch.manual_seed(0)
    h, angle = torch.randn(2, 3, 6 + 2 * 2, D).to(dtype), torch.rand(2, 3, 1, D)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    scale = torch.rand(8, D).to(dtype) if scaled else None
    expected = by_torch(split_heads, h.clone(), 6, 2, scale, cos, sin, 1e-6)
    for found, right in zip(split_heads(h.clone(), 6, 2, scale, cos, sin, 1e-6), expected, strict=True):
        assert found.shape == right.shape
        assert_same(found, right)
    if not scaled:
        assert torch.equal(expected[0], rotate(h[:, :, :6], cos, sin))
    shared = split_heads(h.clone(), 6, 2, scale, cos[:1], sin[:1], 1e-6)  # the same positions in every row
    assert_same(shared[0], by_torch(split_heads, h.clone(), 6, 2, scale, cos[:1], sin[:1], 1e-6)[0])


@needs_kernels
def test_scales_of_another_dtype_go_to_torch(by_torch):
    """A draft's float32 weights under autocast, beside bfloat16 projections."""
    torch.manual_seed(0)
    h, ones, scale = (
        torch.randn(1, 2, 4, 32).bfloat16(),
        torch.ones(1, 2, 1, 32).bfloat16(),
        torch.rand(3, 32),
    )
    expected = by_torch(split_heads, h.clone(), 2, 1, scale, ones, ones, 1e-6)
    for found, right in zip(split_heads(h.clone(), 2, 1, scale, ones, ones, 1e-6), expected, strict=True):
        torch.testing.assert_close(found, right)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", native.HEAD_SIZES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("rows", [slice(0, 3), torch.tensor([3, 0, 2])])
@pytest.mark.parametrize("n", [1, 5])
def test_ragged_attention_equals_float64(dtype, D, heads, rows, n):
    """Rows that begin, that end amid a block of keys and at its end; other rows stay as they are."""
    torch.manual_seed(0)
    (Hq, Hkv), start = heads, torch.tensor([0, 37, 48 - n])
    h = torch.randn(3, n, Hq + 2 * Hkv, D).to(dtype)
    q, k, v = h.split((Hq, Hkv, Hkv), 2)
    window = Window.at(rows, start, n, 48, dtype, fresh=False, ends=(start + n).tolist())
    store = KVStore(1, 4, Hkv, D, 64, dtype, CPU, attention="native")
    store.ensure(64)
    store.kv[0].copy_(torch.randn(store.kv[0].shape))
    before = store.kv[0].clone()
    store.write(0, window, k, v)
    found = ragged_attention(q, store, 0, window)
    taken = rows.tolist() if isinstance(rows, torch.Tensor) else [0, 1, 2]
    for b, row in enumerate(taken):
        at = slice(int(start[b]), int(start[b]) + n)
        before[:, row, :, at] = torch.stack((k[b], v[b])).transpose(1, 2)
    assert torch.equal(store.kv[0], before), "only the window's positions are written"
    for b, row in enumerate(taken):
        for i in range(n):
            keys, values = before[:, row, :, : int(start[b]) + i + 1].double().repeat_interleave(Hq // Hkv, 1)
            weights = (keys @ q[b, i].double()[:, :, None] * D**-0.5).softmax(1)
            right = (weights * values).sum(1).flatten()
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found[b, i].double(), right, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("k", [0, 4])
def test_the_engine_gives_the_same_greedy_answers_by_them(tiny_qwen3, by_torch, k):
    """Chunked prefill, which reads rows by index, and decoding, which reads the first rows."""
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(tiny_qwen3, 9))]
    draft = perturbed_specformer(tiny_qwen3) if k else None
    options = {"k": k, "batch_size": 4, "prefill_chunk": 16}
    plain, engine = by_torch(run, tiny_qwen3, requests, draft, **options)
    assert engine.store.attention == "sdpa"
    found, engine = run(tiny_qwen3, requests, draft, **options)
    assert engine.store.attention == "native"
    assert {r: plain[r].ids for r in plain} == {r: found[r].ids for r in found}
    assert [plain[r].steps for r in plain] == [found[r].steps for r in plain]


@needs_kernels
def test_what_is_to_be_differentiated_or_mixed_goes_to_torch():
    x, half = torch.randn(2, 32), torch.randn(2, 32).bfloat16()
    assert native.serves(x, x) and native.serves(half, half)
    assert not native.serves(x, half) and not native.serves(x.double(), x.double())
    with torch.enable_grad():
        assert not native.serves(x, x)


def test_a_head_size_without_a_kernel_goes_to_torch(tiny_llama, monkeypatch):
    requests = [Request(str(i), p, 6) for i, p in enumerate(prompts(tiny_llama, 3))]
    right, _ = run(tiny_llama, requests, batch_size=2)
    monkeypatch.setattr(native, "HEAD_SIZES", ())
    found, _ = run(tiny_llama, requests, batch_size=2)
    assert {r: right[r].ids for r in right} == {r: found[r].ids for r in found}
    with pytest.raises(ValueError, match="head size 24 is not one of"):
        native.attention(
            torch.zeros(1, 1, 1, 24), torch.zeros(2, 1, 1, 8, 24), None, torch.zeros(1, 1).long()
        )


def test_without_a_compiler_auto_is_sdpa_and_native_says_what_it_lacks(tiny_llama, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert choose_attention("auto", CPU, torch.bfloat16) == "sdpa"
    with pytest.raises(
        UserError, match=r"native runs on a CPU with a C\+\+ compiler.*this is cpu without one"
    ):
        Engine(tiny_llama, attention="native", max_length=64)
    with pytest.raises(UserError, match="native runs on a CPU .* this is cuda"):
        choose_attention("native", torch.device("cuda"), torch.bfloat16)


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """No kernels built so far, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPECFORMER_NATIVE", raising=False)
    native.library.cache_clear()
    yield tmp_path / "specformer"
    native.library.cache_clear()


@needs_kernels
def test_kernels_are_built_once_for_a_source_and_cpu(afresh, monkeypatch):
    assert native.library() is not None
    (built,) = afresh.iterdir()  # no temporary folder is left
    native.library.cache_clear()
    monkeypatch.setattr(native, "build", lambda *asked: pytest.fail("built again"))
    assert native.library() is not None
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    assert native._key(str(native.compiler())) not in built.name


def test_a_compiler_that_fails_is_said_once_and_done_without(afresh, monkeypatch, capsys):
    broken = afresh.parent / "broken-c++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho "no such flag" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert native.library() is None and native.library() is None
    said = capsys.readouterr().err
    assert said.count("no such flag") == 1 and "decoding goes on with PyTorch's operators" in said
    assert not list(afresh.glob("*.so"))


@needs_kernels
def test_a_cache_folder_that_cannot_be_written_is_done_without(afresh, monkeypatch, capsys):
    (afresh.parent / "specformer").write_text("a file where the folder should be")
    assert native.library() is None
    assert "built no kernels" in capsys.readouterr().err


def test_they_can_be_switched_off(afresh, monkeypatch):
    monkeypatch.setenv("SPECFORMER_NATIVE", "0")
    assert native.library() is None and not afresh.exists()


@needs_kernels
def test_they_use_the_threads_that_torch_uses():
    """A second OpenMP runtime would bring threads of its own, which wait for each other's cores."""
    code = (
        "import torch; torch.set_num_threads(2); x = torch.ones(400, 576); torch.mm(x, x.T)\n"
        "from specformer import native; torch.set_grad_enabled(False)\n"
        "native.rms_norm(x, torch.ones(576), 1e-5)\n"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.split()[-1]}))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert found.stdout.strip() == "1"
