"""The attention backends agree, and one that cannot run says what it lacks."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import attended, perturbed_specformer, prompts, run

from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.layers import choose_attention

CUDA = torch.device("cuda")


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("rows", [slice(0, 3), torch.tensor([3, 0, 2])])
@pytest.mark.parametrize("n", [1, 5])
def test_flash_equals_sdpa_on_ragged_rows(flash_calls, heads, rows, n):
    torch.manual_seed(0)
    (Hq, Hkv), start, D = heads, torch.tensor([0, 37, 11]), 8
    q, k, v = torch.randn(3, n, Hq, D), torch.randn(3, n, Hkv, D), torch.randn(3, n, Hkv, D)
    found, store = attended(q, k, v, rows, start)
    torch.testing.assert_close(found["flash"], found["sdpa"], rtol=1e-5, atol=1e-5)
    assert found["flash"].shape == (3, n, Hq * D)
    ((_, cache, lengths, index),) = flash_calls
    assert lengths.tolist() == (start + n).tolist()
    assert cache.shape == (3 if index is None else 4, 64, Hkv, D)
    assert cache.untyped_storage().data_ptr() == store.kv[0].untyped_storage().data_ptr(), "copied"


@pytest.mark.parametrize("k", [0, 4])
def test_the_engine_gives_the_same_greedy_answers_by_flash(tiny_qwen3, flash_calls, monkeypatch, k):
    """Chunked prefill, which reads rows by index, and decoding, which reads the first rows."""
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(tiny_qwen3, 9))]
    draft = perturbed_specformer(tiny_qwen3) if k else None
    options = {"k": k, "batch_size": 4, "prefill_chunk": 16}
    plain, _ = run(tiny_qwen3, requests, draft, **options, attention="sdpa")
    assert not flash_calls
    monkeypatch.setattr("specformer.target.choose_attention", lambda *asked: "flash")
    flash, engine = run(tiny_qwen3, requests, draft, **options)
    assert engine.store.attention == "flash"
    assert {index is None for _, _, _, index in flash_calls} == {True, False}
    assert {r: plain[r].ids for r in plain} == {r: flash[r].ids for r in flash}
    assert [plain[r].steps for r in plain] == [flash[r].steps for r in plain]


def test_auto_takes_flash_where_it_can_run(flash_calls, monkeypatch):
    assert choose_attention("auto", CUDA, torch.bfloat16) == "flash"
    assert choose_attention("flash", CUDA, torch.float16) == "flash"
    assert choose_attention("auto", CUDA, torch.float32) == "sdpa"
    assert choose_attention("sdpa", CUDA, torch.bfloat16) == "sdpa"
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    assert choose_attention("auto", CUDA, torch.bfloat16) == "sdpa"
    with pytest.raises(UserError, match=r"the package flash-attn.*pip install specformer\[gpu\]"):
        choose_attention("flash", CUDA, torch.bfloat16)


def test_a_backend_that_cannot_run_says_what_it_lacks(tiny_llama):
    with pytest.raises(UserError, match="engine.attention: 'paged' is not auto, sdpa, native, flash"):
        Engine(tiny_llama, attention="paged", max_length=64)
    with pytest.raises(UserError, match="flash needs a CUDA device, and this runs on cpu"):
        Engine(tiny_llama, attention="flash", max_length=64)
    with pytest.raises(UserError, match="flash needs base.dtype bfloat16 or float16, not float32"):
        choose_attention("flash", CUDA, torch.float32)
