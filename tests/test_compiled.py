"""The compiled verify step: the same tokens, compiled once, and only where that pays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import BigramDraft, nano_base, perturbed_specformer, prompts, run

from specformer import compiled
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.matmul import linear, packed_matmul_available


@pytest.fixture(scope="module")
def nano(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320)


@pytest.fixture
def once():
    """Compile afresh, and refuse to compile anything twice."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def test_compiled_answers_equal_eager_ones(nano, once, monkeypatch, capsys):
    """Slots refilled, a draining batch, rows that cross from bucket to bucket and reach the last one."""
    monkeypatch.setattr(compiled, "BUCKET", 16)
    requests = [Request("long", [5, 6], 94)]
    requests += [Request(str(i), p, 4 + 5 * i) for i, p in enumerate(prompts(nano, 10))]
    draft = perturbed_specformer(nano)
    options = {"k": 3, "batch_size": 3, "max_length": 96}
    eager, _ = run(nano, requests, draft, **options)
    found, engine = run(nano, requests, draft, **options, compile=True)
    assert {r: found[r].ids for r in found} == {r: eager[r].ids for r in eager}
    assert [found[r].steps for r in eager] == [eager[r].steps for r in eager]
    assert 0 < engine.stats.compile < engine.stats.seconds
    assert "compiled the verify step for 3 rows x 4 tokens: " in capsys.readouterr().err


def test_the_flash_backend_can_be_compiled(nano, once, flash_calls, monkeypatch):
    monkeypatch.setattr(compiled, "BUCKET", 16)
    requests = [Request(str(i), p, 20) for i, p in enumerate(prompts(nano, 4, longest=12))]
    eager, _ = run(nano, requests, batch_size=2, max_length=64)
    monkeypatch.setattr("specformer.target.choose_attention", lambda *asked: "flash")
    found, engine = run(nano, requests, batch_size=2, max_length=64, compile=True)
    assert flash_calls and engine.stats.compile > 0
    assert {r: found[r].ids for r in found} == {r: eager[r].ids for r in eager}


@pytest.mark.skipif(
    not packed_matmul_available(torch.empty(1, 1, dtype=torch.bfloat16)), reason="a CPU without bfloat16"
)
def test_packed_weights_can_be_compiled(once):
    torch.manual_seed(0)
    weight, bias, x = (
        torch.randn(96, 64).bfloat16(),
        torch.randn(96).bfloat16(),
        torch.randn(3, 64).bfloat16(),
    )
    run = torch.compile(linear(weight, bias), fullgraph=True)
    torch.testing.assert_close(run(x).float(), F.linear(x, weight, bias).float(), rtol=2**-7, atol=0.04)


@pytest.fixture
def compiles(monkeypatch):
    """A compiler that takes no time and leaves every step eager; the (rows, tokens) it was asked for."""
    asked = []

    class Fake:
        def __init__(self, target, store, rows, n, hooks):
            asked.append((rows, n))

        def window(self, start, n, longest):
            return None

    monkeypatch.setattr("specformer.engine.CompiledVerify", Fake)
    monkeypatch.setattr(compiled, "WORTH_STEPS", 20)
    monkeypatch.setattr(compiled, "BUCKET", 16)
    return asked


def test_short_work_declines_in_one_line(nano, compiles, capsys):
    requests = [Request(str(i), [5 + i], 9) for i in range(4)]
    engine = Engine(nano, BigramDraft(nano), k=2, batch_size=2, max_length=64, compile="auto")
    list(engine.run(requests))
    assert not compiles and engine.stats.compile == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "stays eager: 36 tokens are asked for so far, compiling pays from 40" in said[0]
    list(engine.run([Request("more", [5], 9), Request("and more", [6], 9)]))
    assert compiles == [(2, 3)]


@pytest.mark.parametrize("as_list", [True, False])
def test_long_work_compiles_once_for_the_full_batch(nano, compiles, as_list):
    requests = [Request(str(i), [5 + i], 10) for i in range(6)]
    engine = Engine(nano, batch_size=2, max_length=64, compile="auto")
    list(engine.run(requests if as_list else iter(requests)))
    assert compiles == [(2, 1)]
    few = Engine(nano, batch_size=2, max_length=64, compile=True)
    list(few.run([Request("alone", [5], 40)]))
    assert compiles == [(2, 1)], "a batch that never filled was compiled"
    list(few.run(requests[:2]))
    assert compiles == [(2, 1), (2, 1)]


def test_told_beforehand_an_iterator_compiles_from_its_first_step(nano, compiles):
    engine = Engine(nano, batch_size=2, max_length=64, compile="auto")
    engine.expect(40)
    list(engine.run(iter([Request("a", [5], 3), Request("b", [6], 3)])))
    assert compiles == [(2, 1)]


def test_without_a_compiler(nano, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and no-such-compiler is not installed"):
        Engine(nano, max_length=64, compile=True)
    assert Engine(nano, max_length=64, compile="auto").compile is False
    with pytest.raises(UserError, match="engine.compile: 'always' is not true, false or auto"):
        Engine(nano, max_length=64, compile="always")
