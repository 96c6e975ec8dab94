"""A small LLM as the draft: its cache, its tokens and what it is refused for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    answered,
    chi_square_p,
    nano_base,
    prompts,
    proposing_bigrams,
    run,
    run_comparing,
    settings,
)
from safetensors import safe_open

from specformer.base import load_base
from specformer.drafts import SmallLLM, load_draft, new_draft
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.training import train

LENGTH = 4


def save(base, folder) -> str:
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return str(folder)


def fresh(base, name, length=LENGTH) -> Any:
    return new_draft(base, "small_llm", [], init="base", seed=0, draft_length=length, small_llm=name)


@pytest.fixture(scope="module")
def nano(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320)


@pytest.fixture(scope="module")
def smalls(nano, tiny_tokenizer, tmp_path_factory):
    """Folders of small LLMs: the base itself, a noisy twin, and twins of other embedding sizes, whose padding
    would win every time."""
    folder, found = tmp_path_factory.mktemp("small"), {"itself": nano}
    for name, vocab in (("twin", 320), ("padded", 352), ("short", 300)):
        found[name] = twin = nano_base(tiny_tokenizer, vocab)
        both = min(vocab, 320)
        for (key, p), q in zip(twin.model.named_parameters(), nano.model.parameters(), strict=True):
            p[:both] = q[:both] if p.shape != q.shape else q
            if "layers" in key:
                p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        twin.model.lm_head.weight[320:] *= 100
    return {name: save(small, folder / name) for name, small in found.items()}


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("chunk", [2048, 13])
@pytest.mark.parametrize("small", ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "padded", "short"])
def test_cached_drafting_equals_drafting_from_scratch(nano, smalls, small, chunk, monkeypatch, request):
    """Other sizes and shapes than the base's; after any number of accepted drafts, all of them too."""
    folder = smalls[small] if small in smalls else str(request.getfixturevalue(f"{small}_folder"))
    model = load_base(folder, dtype="float32", device="cpu").model
    requests = [Request(str(i), p, 12 + i) for i, p in enumerate(prompts(nano, 7, seed=4))]
    if small == "short":  # the base says token 310 all the same, which the small LLM cannot read
        requests = [Request(r.id, [t % 300 for t in r.prompt_ids], r.max_new_tokens) for r in requests]
    draft = fresh(nano, folder)
    last_call = proposing_bigrams(draft, nano)
    engine = Engine(nano, draft, k=LENGTH, batch_size=3, max_length=80, prefill_chunk=chunk)
    words = min(320, model.config.vocab_size)

    def compare(b, row, text):
        tokens = last_call["tokens"][b].tolist()
        ids = torch.tensor([text + tokens[:-1]]).clamp(max=model.config.vocab_size - 1)
        expected = model(ids).logits[0, len(text) - 1 :, :words]
        torch.testing.assert_close(last_call["logits"][b], expected, rtol=1e-3, atol=1e-3)
        assert max(tokens) < 320

    results = run_comparing(engine, requests, compare, monkeypatch)
    assert {s.accepted for r in results.values() for s in r.steps} >= {0, 1, LENGTH}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("small", ["twin", "padded", "short"])
def test_greedy_text_is_the_bases_own(nano, smalls, small, batch_size):
    """Nine requests through few slots; the longest fills its row of the cache to the last token."""
    requests = [Request(str(i), p, 12 + i % 4) for i, p in enumerate(prompts(nano, 9))]
    plain, _ = run(nano, requests, batch_size=batch_size, max_length=54)
    found, _ = run(nano, requests, fresh(nano, smalls[small]), k=LENGTH, batch_size=batch_size, max_length=54)
    assert {i: r.ids for i, r in found.items()} == {i: r.ids for i, r in plain.items()}
    assert {s.accepted for r in found.values() for s in r.steps} >= {0, 1, LENGTH}


@pytest.mark.parametrize("chunk", [2048, 13])
def test_the_base_as_its_own_small_llm_is_right_always(nano, smalls, chunk):
    """Greedily, and under sampling by the ratio rule, where p is q."""
    requests = [
        Request(f"{t}/{i}", p, 17 + 5 * (i % 2), temperature=t, seed=i)
        for t in (0.0, 1.0)
        for i, p in enumerate(prompts(nano, 7))
    ]
    draft, options = fresh(nano, smalls["itself"]), {"batch_size": 3, "prefill_chunk": chunk}
    found, _ = run(nano, requests, draft, k=LENGTH, sample_drafts=True, **options)
    for r in found.values():
        assert all(s.accepted == LENGTH for s in r.steps[:-1])
        assert len(r.steps) == -(-(len(r.ids) - 1) // (LENGTH + 1))


def test_text_drawn_with_its_argmax_is_the_bases_own(nano, smalls):
    requests = [Request(str(i), p, 20, temperature=0.7, seed=i) for i, p in enumerate(prompts(nano, 6))]
    plain, _ = run(nano, requests, batch_size=2)
    found, _ = run(nano, requests, fresh(nano, smalls["twin"]), k=LENGTH, batch_size=2)
    assert {i: r.ids for i, r in found.items()} == {i: r.ids for i, r in plain.items()}
    assert {s.accepted for r in found.values() for s in r.steps} >= {0, 1}


@pytest.mark.parametrize("small", ["padded", "short"])
def test_drawn_drafts_leave_the_bases_distribution(nano, smalls, small):
    """The third token after one prompt, against its exact probabilities: the sum over both tokens before."""
    prompt, t, count = [5, 9, 40], 2.0, 3000
    requests = [Request(str(i), prompt, 3, temperature=t, top_k=6, seed=i) for i in range(count)]
    draft = fresh(nano, smalls[small], length=2)
    found, _ = run(nano, requests, draft, k=2, batch_size=100, max_length=16, sample_drafts=True)

    def after(texts):
        best = (nano.model(torch.tensor(texts)).logits[:, -1] / t).topk(6)
        return best.values.softmax(-1).double(), best.indices.tolist()

    expected, reached = torch.zeros(320, dtype=torch.double), [(1.0, prompt)]
    for _ in range(3):
        weights, words = after([text for _, text in reached])
        reached = [
            (mass * float(w), [*text, word])
            for (mass, text), ws, row in zip(reached, weights, words, strict=True)
            for w, word in zip(ws, row, strict=True)
        ]
    for mass, text in reached:
        expected[text[-1]] += mass
    counts = torch.bincount(torch.tensor([r.ids[2] for r in found.values()]), minlength=320)
    assert {s.accepted for r in found.values() for s in r.steps} >= {0, 1}
    assert chi_square_p(counts, expected) > 1e-3


# ---------------------------------------------------------------- a model that nobody trains


def test_saved_it_is_a_name_and_loaded_it_drafts(nano, smalls, tmp_path):
    draft = fresh(nano, smalls["twin"])
    draft.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not list(file.keys())
    back = load_draft(tmp_path, nano)
    assert isinstance(back, SmallLLM) and back.config == draft.config
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(nano, 3))]
    (before, _), (after, _) = (run(nano, requests, d, k=LENGTH, batch_size=2) for d in (draft, back))
    assert before == after


def test_loading_it_leaves_the_bases_threads(nano, smalls, monkeypatch):
    monkeypatch.setattr("specformer.hardware.fastest", lambda *_: (torch.get_num_threads() + 1, "float32"))
    before = torch.get_num_threads()
    fresh(nano, smalls["twin"])
    assert torch.get_num_threads() == before


def test_parameters_by_hand(nano, tiny_qwen2, tiny_qwen2_folder):
    own, M = (sum(p.numel() for p in b.model.parameters()) for b in (tiny_qwen2, nano))
    draft = fresh(nano, str(tiny_qwen2_folder))
    counts = draft.parameter_counts()
    assert not draft.trainable and not list(draft.parameters())
    assert counts.costs == {"m_s": 0, "m_p": own}
    assert counts.p == 1 + LENGTH * own / M
    assert (counts.total, draft.passes(3)) == (own, 3)
    assert fresh(nano, str(tiny_qwen2_folder), length=1).parameter_counts().p == 1 + own / M


def test_it_has_nothing_to_train(nano, smalls, tmp_path):
    rows = answered(nano, 4, 8)
    with pytest.raises(UserError, match="'small_llm' has nothing to train"):
        train(nano, fresh(nano, smalls["twin"]), rows, rows, tmp_path, **settings())


def test_another_tokenizer_is_refused(nano, smalls, tiny_tokenizer, tmp_path):
    other = load_base(smalls["twin"], dtype="float32", device="cpu")
    other.tokenizer.add_tokens(["<|river|>"])
    name = save(other, tmp_path / "other")
    with pytest.raises(UserError, match=f"tokenizers of {name} and nano differ in 1 tokens.*river"):
        fresh(nano, name)


def test_what_cannot_draft_is_refused(nano, smalls, tmp_path):
    with pytest.raises(UserError, match="draft.small_llm is empty"):
        fresh(nano, "")
    with pytest.raises(UserError, match="no folder"):
        fresh(nano, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="small_llm: .* means nothing to a draft of kind 'medusa'"):
        new_draft(nano, "medusa", [], init="base", seed=0, draft_length=2, small_llm=smalls["twin"])
    short = load_base(smalls["twin"], dtype="float32", device="cpu")
    short.model.config.max_position_embeddings = 100
    draft = fresh(nano, save(short, tmp_path / "short"))
    Engine(nano, draft, k=LENGTH, max_length=100)
    with pytest.raises(UserError, match="reaches 100 positions"):
        Engine(nano, draft, k=LENGTH, max_length=101)
