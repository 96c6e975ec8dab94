"""The baselines: each as its source has it, trained and decoded by the loops that SpecFormer uses."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Killed,
    answered,
    assert_it_decodes_as_trained,
    killed_at,
    nano_base,
    prompts,
    proposing_bigrams,
    run,
    run_comparing,
    settings,
)
from torch import nn
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specformer.base import load_base
from specformer.drafts import DFlash, Draft, Eagle3, eagle, load_draft, new_draft
from specformer.drafts.ngram import NGRAM, look_up
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.hidden import HiddenStates
from specformer.layers import causal_attention
from specformer.losses import head_loss
from specformer.target import Target, fresh_window
from specformer.training import Sequence_, backward, following_tokens, make_batch, train, validate

CHAINS = ["mtp", "eagle", "hass", "eagle3"]
MASKED = ["p_eagle", "dflash"]
TRAINED = ["medusa", *CHAINS, *MASKED]
OWN_HEAD = ["eagle3", "p_eagle"]
LENGTH, WORDS = 4, 90


@pytest.fixture(params=["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def base(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def nano(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320, stop_token_ids=(0,))


@pytest.fixture(scope="module")
def rows(nano):
    return answered(nano, 24, 14)


def fresh(base, kind, rows=({"answer_ids": range(40, 120)},), length=LENGTH, **more) -> Any:
    options = {"draft_length": length, "vocabulary": WORDS if kind in OWN_HEAD else 0}
    return new_draft(base, kind, rows, init="base", seed=3, **options, **more)


def perturbed(base, kind, noise=0.05, **more) -> Any:
    """A draft off its start, so that it differs between positions and accepts little."""
    draft = fresh(base, kind, **more)
    torch.manual_seed(4)
    for p in draft.parameters():
        p.data += noise * torch.randn_like(p)
    return draft.eval()


def anchored(base, draft):
    """training_hidden at a few anchors of two random rows; also what went in."""
    target = Target(base, 64)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    _, taps = target.encode(ids, draft.hooks)
    assert taps is not None
    rows, columns = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([3, 0, 11, 7, 5])
    hidden = draft.training_hidden(taps, following_tokens(ids), rows, columns, target)
    return hidden, (taps, ids, rows, columns, target)


# ---------------------------------------------------------------- the models


@pytest.mark.parametrize("kind", TRAINED)
def test_shapes(base, kind):
    draft = perturbed(base, kind)
    hidden, (*_, target) = anchored(base, draft)
    assert hidden.shape == (5, LENGTH, 64) and hidden.isfinite().all()
    assert draft.head(target)(hidden).shape == (5, LENGTH, WORDS if kind in OWN_HEAD else 320)
    assert not torch.allclose(hidden[:, 0], hidden[:, 3], atol=1e-3), "positions must differ"
    trained = {"eagle": 1, "hass": 3}.get(kind, LENGTH)
    assert draft.trained_length == trained
    assert anchored(base, draft.train())[0].shape == (5, trained, 64)


def learn(base, draft, top, world=1):
    """Score and backpropagate a padded batch as `train` does; also what went in. top: so many soft labels."""
    target, lengths = Target(base, 64), (12, 10)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    sequences = [
        Sequence_(str(n), row[:n], torch.arange(2, n - 2)) for n, row in zip(lengths, ids, strict=True)
    ]
    batch = make_batch(sequences, draft.trained_length, 1.0, torch.device("cpu"))
    batch.labels = draft.head(target).to_index(batch.labels)
    teaching = HiddenStates(target, draft.hooks, None, top)(sequences)
    given = (teaching.taps, following_tokens(batch.ids), batch.rows, batch.columns, target)
    hidden, weights = draft.training_hidden(*given), torch.linspace(1, 0.5, draft.trained_length)
    scored = backward(draft, hidden, teaching, batch, weights, draft.head(target), target, world)
    return scored, batch, weights, given


@pytest.mark.parametrize("kind", TRAINED)
def test_every_draft_parameter_learns_and_no_base_parameter_does(base, kind):
    draft = perturbed(base, kind).train()
    learn(base, draft, top=200)
    before = [p.clone() for p in base.model.parameters()]
    for name, p in draft.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name
    torch.optim.SGD(draft.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old) for p, old in zip(base.model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "share", "features", "top"),
    [
        ("medusa", 1.0, False, 0),
        ("mtp", 1.0, False, 0),
        ("eagle", 0.1, True, 320),
        ("hass", 1.1, True, 10),
        ("eagle3", 1.0, False, 320),
        ("p_eagle", 1.0, False, 320),
        ("dflash", 1.0, False, 0),
    ],
)
def test_the_loss_and_its_gradient_by_hand(tiny_llama, kind, share, features, top, monkeypatch):
    """share * cross-entropy with the text's token, or with the base's `top` best within the draft's words,
    + SmoothL1 to the base's feature; all of the base by transformers, the gradient by autograd."""
    monkeypatch.setattr(eagle, "NOISE", 0.0)
    draft, twin = perturbed(tiny_llama, kind).train(), perturbed(tiny_llama, kind).train()
    scored, batch, weights, given = learn(tiny_llama, draft, top)
    said, hidden = tiny_llama.model(batch.ids, output_hidden_states=True), twin.training_hidden(*given)
    head = twin.lm_head if kind in OWN_HEAD else tiny_llama.model.lm_head
    words = torch.arange(320) if twin.vocabulary is None else twin.vocabulary
    loss = torch.zeros(())
    for n, j in (batch.labels >= 0).nonzero().tolist():
        row, t = batch.rows[n], batch.columns[n] + 1 + j  # where the base predicts the label, t + 1
        wanted, p = batch.labels[n, j, None], torch.ones(1)
        if top:
            best = said.logits[row, t, words].topk(min(top, len(words)))
            wanted, p = best.indices, best.values.softmax(-1)
        each = -share * (p * head(hidden[n, j]).log_softmax(-1)[wanted]).sum()
        if features:
            each = each + F.smooth_l1_loss(hidden[n, j], said.hidden_states[-1][row, t])
        loss = loss + weights[j] * each
    loss.backward()
    assert scored.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    for (name, p), other in zip(draft.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", ["medusa", "mtp", "eagle", "hass"])
def test_the_start_predicts_what_the_base_predicts(base, kind):
    draft = fresh(base, kind).eval()
    hidden, (_, ids, rows, columns, target) = anchored(base, draft)
    expected = base.model(ids).logits[rows, columns].argmax(-1)
    assert (draft.head(target)(hidden).argmax(-1) == expected[:, None]).all()


@pytest.mark.parametrize("kind", ["hass", "eagle3", "p_eagle"])
def test_processes_each_scale_the_whole_gradient(tiny_llama, kind, monkeypatch):
    """What DDP averages over two processes was doubled in each: features' loss and own head as well."""
    monkeypatch.setattr(eagle, "NOISE", 0.0)
    alone, shared = perturbed(tiny_llama, kind).train(), perturbed(tiny_llama, kind).train()
    losses = [learn(tiny_llama, d, 10, world)[0].loss for d, world in ((alone, 1), (shared, 2))]
    assert losses[0] == losses[1]
    for p, twice in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(twice.grad, 2 * p.grad)


def test_medusas_heads_by_hand(base):
    draft = perturbed(base, "medusa")
    hidden, (_, ids, rows, columns, _) = anchored(base, draft)
    h = base.model(ids, output_hidden_states=True).hidden_states[-1][rows, columns]  # after the final norm
    blocks = zip(draft.blocks.weight.split(64), draft.blocks.bias.split(64), strict=True)
    expected = [h + F.silu(h @ weight.T + bias) for weight, bias in blocks]
    torch.testing.assert_close(hidden, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)


def rms_norm(base, x, scales):
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + base.model.config.rms_norm_eps) * scales.weight


def transformers_layer(base, own, read, x, sees_all=0):
    """A draft's layer by transformers' own: the attention reads `read`, the residual stream is x; causal, but
    for so many places at the end, which see all."""
    layer, a = copy.deepcopy(base.model.model.layers[-1]), own.attention
    widths = [a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.head_dim]
    for name, rows in zip("qkv", torch.arange(sum(widths)).split(widths), strict=True):
        linear = getattr(layer.self_attn, f"{name}_proj")
        linear.weight = nn.Parameter(a.qkv.weight[rows])
        linear.bias = None if a.qkv.bias is None else nn.Parameter(a.qkv.bias[rows])
    if a.q_k_norm is not None:
        layer.self_attn.q_norm.weight = nn.Parameter(a.q_k_norm[: a.heads])
        layer.self_attn.k_norm.weight = nn.Parameter(a.q_k_norm[a.heads :])
    layer.self_attn.o_proj.weight = a.out.weight
    layer.post_attention_layernorm.weight = own.mlp_norm.weight
    for name in ("gate", "up", "down"):
        getattr(layer.mlp, f"{name}_proj").weight = getattr(own.mlp, name).weight
    n = x.shape[1]
    mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
    mask[:, :, n - sees_all :] = 0.0
    rope = base.model.model.rotary_emb(x, torch.arange(n)[None])
    x = x + layer.self_attn(read, position_embeddings=rope, attention_mask=mask)[0]
    return x + layer.mlp(layer.post_attention_layernorm(x))


@pytest.mark.parametrize("kind", [*CHAINS, "p_eagle"])
def test_the_first_place_of_a_chain_by_hand(base, kind):
    """The network as its source has it, on transformers' hidden states."""
    draft, norm = perturbed(base, kind), partial(rms_norm, base)
    hidden, (taps, ids, rows, columns, _) = anchored(base, draft)
    states = base.model(ids, output_hidden_states=True).hidden_states
    next_word = base.model.model.embed_tokens(following_tokens(ids))
    if kind == "mtp":
        x = torch.cat((norm(next_word, draft.token_norm), norm(taps[:, :, 0], draft.feature_norm)), -1)
        x = x @ draft.join.weight.T
        y = norm(transformers_layer(base, draft.layer, norm(x, draft.layer.norm), x), draft.out_norm)
    elif kind in OWN_HEAD:
        g = torch.cat([states[i] for i in draft.hooks], -1) @ draft.fc.weight.T
        read = torch.cat((norm(next_word, draft.token_norm), norm(g, draft.feature_norm)), -1)
        y = norm(transformers_layer(base, draft.layer, read, g), draft.out_norm)
    else:
        x = torch.cat((next_word, states[-1]), -1) @ draft.fc.weight.T + draft.fc.bias
        y = transformers_layer(base, draft.layer, x, x)
    torch.testing.assert_close(hidden[:, 0], y[rows, columns], rtol=1e-4, atol=1e-4)


def test_p_eagles_depths_by_hand(base):
    """One causal pass over the text up to the anchor and masks behind it, on transformers' hidden states."""
    draft, norm = perturbed(base, "p_eagle"), partial(rms_norm, base)
    hidden, (_, ids, rows, columns, _) = anchored(base, draft)
    states = base.model(ids, output_hidden_states=True).hidden_states
    states = torch.cat([states[i] for i in draft.hooks], -1)
    words = base.model.model.embed_tokens(following_tokens(ids))
    for found, b, t in zip(hidden, rows, columns, strict=True):
        masked = draft.mask_hidden.expand(LENGTH - 1, -1), draft.mask_token.expand(LENGTH - 1, -1)
        g = torch.cat((states[b, : t + 1], masked[0]))[None] @ draft.fc.weight.T
        word = torch.cat((words[b, : t + 1], masked[1]))[None]
        read = torch.cat((norm(word, draft.token_norm), norm(g, draft.feature_norm)), -1)
        y = norm(transformers_layer(base, draft.layer, read, g), draft.out_norm)
        torch.testing.assert_close(found, y[0, t:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_dflashs_block_by_hand(base, layers):
    """The newest token and masks, seeing all of the fused features up to the anchor and of themselves."""
    draft, norm = perturbed(base, "dflash", layers=layers, hooks=(1, 2)), partial(rms_norm, base)
    hidden, (_, ids, rows, columns, _) = anchored(base, draft)
    states = base.model(ids, output_hidden_states=True).hidden_states
    features = norm(torch.cat((states[1], states[2]), -1) @ draft.fc.weight.T, draft.feature_norm)
    words = base.model.model.embed_tokens(following_tokens(ids))
    for found, b, t in zip(hidden, rows, columns, strict=True):
        x = torch.cat((words[b, t, None], draft.mask_token.expand(LENGTH, -1)))[None]
        text = features[b, None, : t + 1]
        for layer in draft.layers:
            read = torch.cat((text, norm(x, layer.norm)), 1)
            stream = torch.cat((torch.zeros_like(text), x), 1)
            x = transformers_layer(base, layer, read, stream, sees_all=LENGTH + 1)[:, t + 1 :]
        torch.testing.assert_close(found, norm(x, draft.out_norm)[0, 1:], rtol=1e-4, atol=1e-4)


def from_scratch(draft, taps, ids, t, target):
    """What the head reads for each place of the chain from t on, the whole text run anew for every one."""
    features, attention = draft.features(taps[:, : t + 1], target), draft.layer.attention
    for end in range(t + 2, t + 2 + draft.draft_length):
        read, x = draft.enter(features, F.embedding(ids[:, 1:end], target.embedding))
        q, k, v = attention.project(read, *target.rotary.at(torch.arange(end - 1)[None]))
        x = draft.layer.finish(x, attention.out(causal_attention(q, k, v, causal=True)))[:, -1:]
        features = torch.cat((features, x), 1)
        yield draft.leave(x)[0, 0]


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_reads_its_own_features_behind_the_anchor(base, kind):
    draft = perturbed(base, kind)
    hidden, (taps, ids, rows, columns, target) = anchored(base, draft)
    for found, b, t in zip(hidden, rows, columns, strict=True):
        if t + LENGTH < ids.shape[1]:  # behind the text's end are no labels
            expected = from_scratch(draft, taps[b, None], ids[b, None], int(t), target)
            torch.testing.assert_close(found, torch.stack(list(expected)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "flows"), [("mtp", True), ("hass", False), ("eagle3", True)])
def test_which_chains_learn_through_their_own_features(tiny_llama, kind, flows):
    """`layer.mlp` left out of the second place, its gradient can only come by the first one's feature."""
    draft = perturbed(tiny_llama, kind).train()
    calls, finish = [], draft.layer.finish

    def cut(x, mixed):
        calls.append(x)
        return finish(x, mixed) if len(calls) == 1 else x + mixed

    draft.layer.finish = cut
    anchored(tiny_llama, draft)[0][:, 1].sum().backward()
    grad = draft.layer.mlp.down.weight.grad
    assert (grad is not None and bool(grad.any())) == flows


def test_parameters_by_hand(tiny_qwen3):
    """H 64, heads 4 + 2 of 32, intermediate 128, two of EAGLE-3's hooks in a base of four layers."""
    H, inner, M = 64, 128, sum(p.numel() for p in tiny_qwen3.model.parameters())

    def layer(inputs):
        attention = inputs * 8 * 32 + 4 * 32 * H + 6 * 32  # qkv, out, q/k norm scales
        return attention + H + 3 * H * inner  # norm, SwiGLU

    expected = {
        "ngram": (0, 0, 0),
        "medusa": (0, H * H + H, 1),
        "mtp": (layer(H) + H + 2 * H * H + 3 * H, 0, LENGTH),
        "eagle": (layer(H) + 2 * H * H + H, 0, LENGTH),
        "hass": (layer(H) + 2 * H * H + H, 0, LENGTH),
        "eagle3": (layer(2 * H) + 2 * H * H + 3 * H + WORDS * H, 0, LENGTH),
        "p_eagle": (layer(2 * H) + 2 * H * H + 3 * H + WORDS * H + 3 * H, 0, 1),
        "dflash": (layer(H) + H + H * H + 3 * H, 0, 1),
    }
    for kind, (shared, own, passes) in expected.items():
        draft = fresh(tiny_qwen3, kind)
        counts = draft.parameter_counts()
        assert (counts.shared, counts.per_position, draft.passes(LENGTH)) == (shared, own, passes), kind
        assert counts.total == sum(p.numel() for p in draft.parameters())
        assert counts.p == 1 + (passes * shared + LENGTH * own) / M
        trees = kind in ("medusa", "eagle", "hass", "eagle3", *MASKED)  # are what its source can draft
        assert draft.label.endswith("(chain)") == trees, kind


def test_eagle3_reads_the_layers_of_its_source():
    """Llama-3.1-8B has 32 layers; what a layer reads is the hidden state of the layers before it."""
    assert Eagle3.default_hooks(32) == (2, 16, 29)
    assert Eagle3.default_hooks(2) == (0, 1, 2)


def test_dflash_reads_the_layers_of_its_source():
    """What layers 1, 9, 17, 25 and 33 of Qwen3-8B's 36 yield; one hidden state where a base is shallow."""
    assert DFlash.default_hooks(36) == (2, 10, 18, 26, 34)
    assert DFlash.default_hooks(30) == (2, 9, 15, 21, 28)
    assert DFlash.default_hooks(4) == (2,) and DFlash.default_hooks(1) == (1,)


def test_more_layers_of_dflash_share_no_weight(tiny_qwen3):
    one, three = (fresh(tiny_qwen3, "dflash", layers=n).parameter_counts() for n in (1, 3))
    layer = sum(p.numel() for p in fresh(tiny_qwen3, "dflash").layers[0].parameters())
    assert three.shared == one.shared + 2 * layer and three.passes == 1


def test_an_own_head_learns_as_by_autograd(tiny_llama):
    draft, generator = perturbed(tiny_llama, "eagle3"), torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 3, 64, generator=generator)
    labels = torch.randint(-1, WORDS, (23, 3), generator=generator)
    labels[::4, 1] = -100
    weights = torch.tensor([1.0, 0.5, 0.25])
    found = head_loss(hidden, labels, weights, draft.head(Target(tiny_llama, 8)), chunk=7)
    logits = draft.lm_head(hidden.requires_grad_())
    each = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    loss = (each.view(23, 3) * (labels >= 0) * weights).sum()
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert found.weight_grad is not None
    torch.testing.assert_close(found.grad, hidden.grad)
    torch.testing.assert_close(found.weight_grad, draft.lm_head.weight.grad)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("chunk", [2048, 13])
@pytest.mark.parametrize("kind", TRAINED)
def test_cached_drafting_equals_drafting_from_scratch(nano, kind, chunk, monkeypatch):
    assert_it_decodes_as_trained(nano, perturbed(nano, kind), chunk, monkeypatch)


def test_every_layer_of_dflash_has_a_cache(nano, monkeypatch):
    assert_it_decodes_as_trained(nano, perturbed(nano, "dflash", layers=2), 13, monkeypatch)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", MASKED)
def test_fewer_masks_are_drafted_as_by_a_shorter_draft(tiny_qwen3, kind, k):
    """Rows of 12 tokens, of which the last does not count; no parameter knows the draft length."""
    draft, shorter = perturbed(tiny_qwen3, kind), perturbed(tiny_qwen3, kind, length=k)
    hidden, (taps, ids, *_, target) = anchored(tiny_qwen3, draft)
    store, window, last = draft.new_store(target, 2, 40, "sdpa"), fresh_window(ids), torch.tensor([10, 4])
    store.ensure(40)
    found = []

    def choose(logits, j):
        found.append(logits)
        return logits.argmax(-1)

    following = following_tokens(ids)
    assert draft.propose(taps, last, following, window, store, target, k, choose).shape == (2, k)
    expected = shorter.training_hidden(taps, following, torch.tensor([0, 1]), last, target)
    torch.testing.assert_close(found[0], shorter.head(target)(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [2048, 13])
def test_ngrams_are_looked_up_as_transformers_does(nano, chunk, monkeypatch):
    """But for the text's very first token, which is not looked at."""
    draft = fresh(nano, "ngram")
    last_call = proposing_bigrams(draft, nano)
    engine = Engine(nano, draft, k=LENGTH, batch_size=3, max_length=80, prefill_chunk=chunk)
    theirs: Any = PromptLookupCandidateGenerator(
        num_output_tokens=LENGTH, max_matching_ngram_size=NGRAM, max_length=1000
    )
    found = []

    def compare(b, row, text):
        known = torch.tensor([text[1:]])
        candidates = theirs.get_candidates(known)[0][0, known.shape[1] :].tolist()
        assert last_call["tokens"][b, : len(candidates)].tolist() == candidates
        found.append(len(candidates))

    requests = [Request(str(i), p, 20 + i) for i, p in enumerate(prompts(nano, 7, seed=4))]
    run_comparing(engine, requests, compare, monkeypatch)
    assert 0 in found and LENGTH in found


def test_the_first_of_the_longest_matches_is_taken():
    """Up to places 12 and 7: 5 6 7 stood there twice before, of 8 3 only the 3 did, twice as well."""
    text = torch.tensor(
        [[1, 5, 6, 7, 2, 9, 5, 6, 7, 4, 5, 6, 7, 0], [3, 4, 4, 3, 9, 1, 8, 3, 8, 3, 8, 3, 8, 3]]
    )
    assert look_up(text, torch.tensor([12, 7]), 4).tolist() == [[2, 9, 5, 6], [4, 4, 3, 9]]
    # behind the newest token stands nothing yet: it is given again
    assert look_up(text, torch.tensor([8, 2]), 6).tolist() == [[2, 9, 5, 6, 7, 7], [4, 4, 4, 4, 4, 4]]


def test_there_is_room_for_a_draft_behind_the_verified_tokens(nano):
    engine = Engine(nano, fresh(nano, "dflash"), k=LENGTH, max_length=400)
    assert engine.draft_store is not None
    engine._ensure(256 - LENGTH)
    assert engine.store.capacity == 256 and engine.draft_store.capacity > 256
    engine._ensure(400 + LENGTH + 1)
    assert engine.draft_store.capacity == engine.store.capacity == 400 + LENGTH + 1


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["ngram", *TRAINED])
def test_greedy_text_is_the_bases_own(tiny_llama, kind, batch_size):
    """Seven requests through few slots; the longest fills its row of the cache to the last token."""
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(tiny_llama, 7))]
    plain, _ = run(tiny_llama, requests, batch_size=batch_size, max_length=52)
    rows = [{"answer_ids": r.ids} for r in plain.values()]
    # behind the last hidden state EAGLE-3 starts by saying what the base says, as the others do
    draft = fresh(tiny_llama, kind, rows, hooks=(0, 4) if kind in OWN_HEAD else None).eval()
    found, _ = run(tiny_llama, requests, draft, k=LENGTH, batch_size=batch_size, max_length=52)
    assert {i: r.ids for i, r in found.items()} == {i: r.ids for i, r in plain.items()}
    accepted = {s.accepted for r in found.values() for s in r.steps}
    assert accepted >= {"p_eagle": {0, 1}, "dflash": {0}}.get(kind, {0, 1, LENGTH})  # masks start out dumb


def test_ngrams_speed_up_what_repeats_itself(nano):
    requests = [Request(str(i), p * 3, 30) for i, p in enumerate(prompts(nano, 4, longest=8))]
    plain, _ = run(nano, requests, batch_size=2)
    found, _ = run(nano, requests, fresh(nano, "ngram"), k=LENGTH, batch_size=2)
    assert {i: r.ids for i, r in found.items()} == {i: r.ids for i, r in plain.items()}
    assert any(s.accepted == LENGTH for r in found.values() for s in r.steps)


def test_sampled_text_with_ngrams_is_the_bases_own(nano):
    """What is looked up has no distribution: it is accepted where the base draws it, and the text stays."""
    texts = [p * 3 for p in prompts(nano, 4, longest=8)]
    requests = [Request(str(i), p, 30, temperature=0.1, seed=i) for i, p in enumerate(texts)]
    plain, _ = run(nano, requests, batch_size=2)
    found, _ = run(nano, requests, fresh(nano, "ngram"), k=LENGTH, batch_size=2, sample_drafts=True)
    assert {i: r.ids for i, r in found.items()} == {i: r.ids for i, r in plain.items()}
    assert any(s.accepted for r in found.values() for s in r.steps)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", *MASKED])
def test_sampled_chains_do_not_depend_on_the_batch(tiny_llama, kind):
    requests = [Request(str(i), p, 8, temperature=0.8, seed=i) for i, p in enumerate(prompts(tiny_llama, 5))]
    runs = [
        run(tiny_llama, requests, perturbed(tiny_llama, kind), k=3, batch_size=size, sample_drafts=True)[0]
        for size in (1, 3)
    ]
    assert {i: r.ids for i, r in runs[0].items()} == {i: r.ids for i, r in runs[1].items()}


# ---------------------------------------------------------------- training and files


@pytest.mark.parametrize("kind", TRAINED)
def test_six_dialogues_are_learnt_by_heart(nano, rows, kind, tmp_path):
    """The saved draft decodes as validation says, and the text is the base's own whatever is accepted."""
    rows, draft = rows[:6], fresh(nano, kind, rows[:6], length=3)
    learning = {"lr": 1e-2, "epochs": 60.0, "validate_every": 30, "anchor_fraction": 1.0, "anchor_decay": 1.0}
    train(nano, draft, rows, rows, tmp_path, **settings(**{**draft.recipe, **learning}))
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] / 2
    assert len(log[-1]["accuracy"]) == draft.trained_length
    loaded = load_draft(tmp_path, nano)
    found, _ = run(nano, [Request(r["id"], r["prompt_ids"], 14) for r in rows], loaded, k=3, batch_size=2)
    assert {i: r.ids for i, r in found.items()} == {r["id"]: r["answer_ids"] for r in rows}
    steps = [s for r in found.values() for s in r.steps]
    assert {s.accepted for s in steps} >= {1, 3}
    expected = validate(loaded, Target(nano, 64), rows, 64)
    assert len(expected["accuracy"]) == 3 and expected["tokens_per_step"] > 1.5
    assert sum(s.committed for s in steps) / len(steps) == pytest.approx(expected["tokens_per_step"])


@pytest.mark.parametrize("kind", TRAINED)
def test_training_in_bfloat16_is_near_float32(tiny_llama_folder, tiny_llama, kind, tmp_path, monkeypatch):
    """The same steps on the same base, its weights rounded; the saved draft decodes."""
    monkeypatch.setattr(eagle, "NOISE", 0.0)
    half, rows = load_base(tiny_llama_folder, dtype="bfloat16", device="cpu"), answered(tiny_llama, 12, 14)
    losses = {}
    for base in (tiny_llama, half):
        folder = tmp_path / str(base.dtype)
        options = settings(**{**fresh(base, kind).recipe, "dtype": "auto", "lr": 1e-3, "epochs": 2.0})
        train(base, fresh(base, kind, rows, length=3), rows, rows[:4], folder, **options)
        log = (folder / "log.jsonl").read_text().splitlines()
        losses[base.dtype] = [json.loads(line)["loss"] for line in log]
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=0.02)
    requests = [Request(row["id"], row["prompt_ids"], 14) for row in rows[:4]]
    found, _ = run(half, requests, load_draft(folder, half), k=3, batch_size=2)
    assert all(len(r.ids) == 1 + sum(s.committed for s in r.steps) for r in found.values())


def test_a_killed_run_with_feature_noise_goes_on_bit_for_bit(nano, rows, tmp_path, monkeypatch):
    options = settings(soft_labels=4, epochs=1.0)
    train(nano, fresh(nano, "hass", rows), rows, rows[:4], tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(Killed):
            train(nano, fresh(nano, "hass", rows), rows, rows[:4], tmp_path / "parts", **options)
    again = fresh(nano, "hass", rows)
    torch.manual_seed(99)  # the noise goes on from the checkpoint, not from here
    train(nano, again, rows, rows[:4], tmp_path / "parts", **options)
    logs = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_ngrams_have_nothing_to_train(nano, rows, tmp_path):
    with pytest.raises(UserError, match="'ngram' has nothing to train"):
        train(nano, fresh(nano, "ngram"), rows, rows[:4], tmp_path, **settings())


@pytest.mark.parametrize("kind", ["ngram", *TRAINED])
def test_saved_and_loaded_it_is_the_same(tiny_qwen3, tmp_path, kind):
    draft = perturbed(tiny_qwen3, kind)
    draft.save_pretrained(tmp_path, torch.float32)
    back = load_draft(tmp_path, tiny_qwen3)
    assert back.config == draft.config and type(back) is type(draft) and not back.training
    before, after = draft.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    if kind != "ngram":
        (hidden, (*_, target)), (again, _) = anchored(tiny_qwen3, draft), anchored(tiny_qwen3, back)
        assert torch.equal(draft.head(target)(hidden), back.head(target)(again))


def test_unknown_kinds_are_refused(nano):
    with pytest.raises(UserError, match="unknown draft kind 'medusa9'.*'medusa', 'mtp', 'ngram'"):
        fresh(nano, "medusa9")
    assert {"ngram", "specformer", *TRAINED} <= set(Draft.kinds)


@pytest.mark.parametrize("kind", OWN_HEAD)
def test_an_own_head_needs_a_draft_vocabulary(nano, kind):
    with pytest.raises(UserError, match=r"draft.vocabulary is 0: (P-EAGLE|EAGLE-3) \(chain\) has its own"):
        new_draft(nano, kind, [], init="base", seed=0, draft_length=3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("medusa", {"hooks": (0, 4)}, r"hooks: .* 'medusa' reads 1 hidden states, not \(0, 4\)"),
        ("ngram", {"hooks": (4,)}, "'ngram' reads 0 hidden states"),
        ("hass", {"layers": 2}, "layers: 2 means nothing to a draft of kind 'hass'"),
        ("dflash", {"anchor_token": "context"}, "anchor_token: 'context' means nothing"),
        ("mtp", {"positional": "embedding"}, "positional: 'embedding' means nothing"),
    ],
)
def test_what_a_kind_would_ignore_is_refused(tiny_llama, kind, options, message):
    with pytest.raises(UserError, match=message):
        new_draft(tiny_llama, kind, [], init="base", seed=0, draft_length=3, **options)
