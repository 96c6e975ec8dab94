"""The SpecFormer draft: shapes, who learns, who sees whom, parameters as the paper counts, files."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import assert_it_decodes_as_trained, nano_base, perturbed_specformer, prompts

from specformer.drafts import DraftConfig, SpecFormer, load_draft, new_draft
from specformer.drafts import specformer as module
from specformer.drafts.interface import Draft
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.target import Target
from specformer.training import following_tokens

HOOKS = (0, 2, 3, 4)
SWITCHES = [
    {},
    {"draft_attention": "causal"},
    {"positional": "embedding"},
    {"layers": 2, "draft_attention": "causal", "positional": "embedding"},
    {"anchor_token": "positional"},
    {"anchor_token": "context", "vocabulary": 90},
]


@pytest.fixture(params=["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def base(request):
    return request.getfixturevalue(request.param)


def anchored(base, draft, seed=0, target=None):
    """training_hidden at a few anchors of two random rows; also what went in."""
    target = target or Target(base, 64)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(seed))
    _, taps = target.encode(ids, draft.hooks)
    assert taps is not None
    rows, columns = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([3, 0, 11, 7, 5])
    return draft.training_hidden(taps, following_tokens(ids), rows, columns, target), taps, target


@pytest.mark.parametrize("options", SWITCHES)
def test_shapes(base, options):
    draft = perturbed_specformer(base, 5, **options)
    hidden, taps, target = anchored(base, draft)
    assert hidden.shape == (5, 5, 64) and hidden.isfinite().all()
    assert draft.downsample(taps).shape == (2, 12, 64)
    assert draft.draft(hidden[:, 0], target).shape == (5, 5, 64)
    assert not torch.allclose(hidden[:, 0], hidden[:, 4], atol=1e-3), "positions must differ"


@pytest.mark.parametrize("options", SWITCHES)
def test_every_draft_parameter_learns_and_no_base_parameter_does(base, options):
    draft = perturbed_specformer(base, **options).train()
    hidden, _, _ = anchored(base, draft)
    hidden.pow(2).sum().backward()
    for name, p in draft.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
    assert all(p.grad is None for p in base.model.parameters())
    if base.model.config.model_type == "qwen2":
        assert draft.context.attention.qkv.bias is not None
    if base.model.config.model_type == "qwen3":
        assert draft.context.attention.q_k_norm is not None
        assert draft.context.attention.qkv.weight.shape == (8 * 32, 64)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_the_start_predicts_what_the_base_predicts(name, request):
    """Before training every position says what the base's head says after t, whatever the order of hooks."""
    base = request.getfixturevalue(name)
    for hooks in ((0, 1, base.num_layers), (base.num_layers, 1)):
        draft = SpecFormer(DraftConfig.for_base(base, "specformer", hooks, draft_length=3))
        draft.start_from(base)
        hidden, _, target = anchored(base, draft)
        ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
        expected = base.model(ids).logits[[0, 1, 1, 0, 1], [3, 0, 11, 7, 5]].argmax(-1)
        assert (target.logits(hidden).argmax(-1) == expected[:, None]).all()


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_which_draft_position_sees_which(tiny_llama, attention):
    """Figure 2b: change what goes into position j of a draft block, and look which outputs move."""
    draft, target = perturbed_specformer(tiny_llama, 4, draft_attention=attention), Target(tiny_llama, 16)
    block = draft.blocks[0]
    x = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    before, sees = block(x, target), torch.zeros(4, 4, dtype=torch.bool)
    for j in range(4):
        changed = x.clone()
        changed[0, j] += 1
        sees[:, j] = (block(changed, target) - before)[0].abs().amax(-1) > 1e-6
    everything = torch.ones(4, 4, dtype=torch.bool)
    assert torch.equal(sees, everything if attention == "bidirectional" else everything.tril())


def test_the_context_is_causal(tiny_llama):
    """A later token moves nothing drafted before it; the anchor itself and earlier ones do."""
    draft, target = perturbed_specformer(tiny_llama), Target(tiny_llama, 16)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    rows, columns = torch.zeros(6, dtype=torch.long), torch.arange(6)

    def drafted(ids):
        _, taps = target.encode(ids, draft.hooks)
        assert taps is not None
        return draft.training_hidden(taps, following_tokens(ids), rows, columns, target)

    before = drafted(ids)
    for j in range(6):
        changed = ids.clone()
        changed[0, j] += 50
        moved = (drafted(changed) - before).abs().amax((1, 2)) > 1e-6
        assert moved.tolist() == [t >= j for t in range(6)]


def test_attention_in_segments_is_the_same(tiny_llama, monkeypatch):
    """Outputs and the gradient of every parameter."""
    draft = perturbed_specformer(tiny_llama)

    def gradients(hidden):
        loss = (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum()
        return torch.autograd.grad(loss, list(draft.parameters()))

    whole, _, _ = anchored(tiny_llama, draft)
    monkeypatch.setattr(module, "ATTENTION_SEGMENT", 2)
    seen = []
    original = module.causal_attention

    def counted(q, k, v, causal):
        seen.append(q.shape[0])
        return original(q, k, v, causal)

    monkeypatch.setattr(module, "causal_attention", counted)
    parts, _, _ = anchored(tiny_llama, draft)
    assert seen == [2, 2, 1], "five anchors in segments of at most two"
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradients(parts), gradients(whole))


def test_no_batch_of_draft_attention_exceeds_what_flash_attention_takes(tiny_llama, monkeypatch):
    seen = []
    original = module.causal_attention

    def counted(q, k, v, causal):
        seen.append(q.shape[0])
        return original(q, k, v, causal)

    monkeypatch.setattr(module, "causal_attention", counted)
    draft = perturbed_specformer(tiny_llama, 2)
    with torch.no_grad():
        draft.draft(torch.randn(7000, 64), Target(tiny_llama, 16))
    assert sum(seen) == 7000 and max(seen) <= 4095


def test_parameters_as_the_paper_counts_them(tiny_qwen3):
    """By hand for H 64, heads 4 + 2 of 32, intermediate 128, four hooks, l_d 5."""
    H, width, inner, l_d = 64, 8 * 32, 128, 5
    attention = H * width + 4 * 32 * H + 6 * 32  # qkv, out, q/k norm scales
    shared = 4 * H + 4 * H * H + H + attention  # grouped norm, downsampler, context norm and attention
    shared += H + H + attention + H + 3 * H * inner  # positional norm; block: norm, attention, norm, SwiGLU
    M = sum(p.numel() for p in tiny_qwen3.model.parameters())
    draft = perturbed_specformer(tiny_qwen3, l_d)
    counts = draft.parameter_counts()
    assert (counts.shared, counts.per_position) == (shared, H * H + H)
    assert counts.total == sum(p.numel() for p in draft.parameters()) == shared + l_d * (H * H + H)
    assert counts.base == M and counts.p == 1 + counts.total / M
    longer = perturbed_specformer(tiny_qwen3, 8).parameter_counts()
    assert (longer.shared, longer.per_position) == (counts.shared, counts.per_position)
    embedding = perturbed_specformer(tiny_qwen3, l_d, positional="embedding").parameter_counts()
    assert (embedding.shared, embedding.per_position) == (shared, H)
    block = attention + 2 * H + 3 * H * inner
    assert perturbed_specformer(tiny_qwen3, l_d, layers=3).parameter_counts().shared == shared + 2 * block


@pytest.mark.parametrize("chunk", [2048, 13])
@pytest.mark.parametrize("options", [*SWITCHES[:3], *SWITCHES[4:]])
def test_cached_drafting_equals_training_from_scratch(tiny_tokenizer, options, chunk, monkeypatch):
    base = nano_base(tiny_tokenizer, 320, stop_token_ids=(0,))
    assert_it_decodes_as_trained(base, perturbed_specformer(base, **options), chunk, monkeypatch)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("options", SWITCHES)
def test_saved_and_loaded_it_is_the_same(tiny_qwen3, tmp_path, options):
    draft = perturbed_specformer(tiny_qwen3, **options)
    draft.save_pretrained(tmp_path, torch.float32)
    back = load_draft(tmp_path, tiny_qwen3)
    assert back.config == draft.config and isinstance(back, SpecFormer) and not back.training
    assert torch.equal(anchored(tiny_qwen3, back)[0], anchored(tiny_qwen3, draft)[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    draft.save_pretrained(tmp_path)  # bfloat16 on disk, the base's dtype when loaded
    half = load_draft(tmp_path, tiny_qwen3)
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    for a, b in zip(half.parameters(), draft.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16().float())


def test_another_base_is_refused_and_both_are_named(tiny_llama, tiny_qwen3, tmp_path):
    perturbed_specformer(tiny_llama).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        load_draft(tmp_path, tiny_qwen3)
    assert tiny_llama.name in str(caught.value) and tiny_qwen3.name in str(caught.value)


def test_damaged_folders_are_refused(tiny_llama, tmp_path):
    with pytest.raises(UserError, match="no readable draft model"):
        load_draft(tmp_path / "nothing", tiny_llama)
    perturbed_specformer(tiny_llama).save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for broken in (whole[: len(whole) // 2], whole[:4], b"\xff" * len(whole)):
        weights.write_bytes(broken)
        with pytest.raises(UserError, match="model.safetensors is missing, corrupt or half-written"):
            load_draft(tmp_path, tiny_llama)
    weights.unlink()
    with pytest.raises(UserError, match="missing, corrupt"):
        load_draft(tmp_path, tiny_llama)
    weights.write_bytes(whole)
    load_draft(tmp_path, tiny_llama)
    for change, message in (
        ({"kind": "medusa9"}, "unknown draft kind 'medusa9'.*specformer"),
        ({"colour": 1}, "unknown settings.*colour"),
        ({"draft_length": 7}, "missing, corrupt"),
    ):
        config.write_text(json.dumps(json.loads(text) | change))
        with pytest.raises(UserError, match=message):
            load_draft(tmp_path, tiny_llama)
    config.write_text(text[:50])
    with pytest.raises(UserError, match="no readable draft model"):
        load_draft(tmp_path, tiny_llama)


def test_drafts_are_found_by_their_registered_name():
    assert Draft.kinds["specformer"] is SpecFormer


# ---------------------------------------------------------------- beyond the paper


def test_the_vocabulary_is_the_most_frequent_tokens_then_the_lowest(tiny_llama):
    draft = perturbed_specformer(tiny_llama, vocabulary=6)
    rows = [{"answer_ids": [9, 9, 9, 200, 200, 4]}, {"answer_ids": [200, 9, 31]}]
    draft.choose_vocabulary(rows, 320)
    assert draft.vocabulary is not None and draft.vocabulary.tolist() == [0, 1, 4, 9, 31, 200]
    assert draft.coverage(rows) == 1.0
    assert draft.coverage([{"answer_ids": [9, 300, 301, 200]}]) == 0.5
    assert perturbed_specformer(tiny_llama).coverage(rows) == 1.0


def test_more_tokens_than_the_base_has_are_refused(tiny_llama):
    with pytest.raises(UserError, match="draft.vocabulary = 321: the base has 320 tokens"):
        new_draft(
            tiny_llama, "specformer", [], init="base", seed=0, draft_length=2, hooks=(0,), vocabulary=321
        )


def test_the_vocabulary_is_saved_and_drafts_stay_inside(tiny_llama, tmp_path):
    draft = perturbed_specformer(tiny_llama, vocabulary=50)
    draft.choose_vocabulary([{"answer_ids": list(range(100, 300, 2))}], 320)
    draft.save_pretrained(tmp_path)
    loaded = load_draft(tmp_path, tiny_llama)
    assert loaded.vocabulary is not None and draft.vocabulary is not None
    assert loaded.vocabulary.tolist() == draft.vocabulary.tolist() == list(range(100, 200, 2))
    engine = Engine(tiny_llama, loaded, k=4, batch_size=3, max_length=64)
    proposed = []
    original = loaded.propose
    loaded.propose = lambda *args: proposed.append(original(*args)) or proposed[-1]  # type: ignore[method-assign]
    list(engine.run([Request(str(i), p, 6) for i, p in enumerate(prompts(tiny_llama, 4))]))
    tokens = torch.cat([p.flatten() for p in proposed])
    assert set(tokens.tolist()) <= set(range(100, 200, 2))


@pytest.mark.parametrize("place", ["positional", "context"])
def test_the_newest_token_reaches_the_draft(tiny_llama, place):
    """Another following token at position j moves what is drafted at j; later ones only through `context`."""
    draft, target = perturbed_specformer(tiny_llama, anchor_token=place), Target(tiny_llama, 16)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    rows, columns = torch.zeros(6, dtype=torch.long), torch.arange(6)
    _, taps = target.encode(ids, draft.hooks)
    assert taps is not None
    before = draft.training_hidden(taps, following_tokens(ids), rows, columns, target)
    for j in range(6):
        changed = following_tokens(ids)
        changed[0, j] += 50
        moved = (draft.training_hidden(taps, changed, rows, columns, target) - before).abs().amax(
            (1, 2)
        ) > 1e-6
        assert moved.tolist() == [t == j or (place == "context" and t > j) for t in range(6)]
