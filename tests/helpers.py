"""What several test files need: prompts, answers to train on, drafts of known quality."""

from __future__ import annotations

import random
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specformer.base import Base
from specformer.cache import KVStore, Window
from specformer.drafts import DraftConfig, SpecFormer, new_draft
from specformer.drafts.interface import Draft
from specformer.engine import Engine, Request
from specformer.layers import ragged_attention
from specformer.training import Schedule

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES = [
    "system user assistant think",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Write a short story about a river. What is the capital of France?",
    "def add(a, b):\n    return a + b\n",
]


def make_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 320 tokens; padding is the end-of-turn token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = chat_template
    return fast


def prompts(base, count, seed=0, longest=40):
    """Random prompts of 1 to `longest` tokens, without stop tokens."""
    rng = random.Random(seed)
    vocab = [t for t in range(base.model.config.vocab_size) if t not in base.stop_token_ids]
    lengths = [1, 2, longest] + [rng.randint(1, longest) for _ in range(count)]
    return [rng.choices(vocab, k=n) for n in lengths[:count]]


def run(base, requests, draft=None, **options):
    """Decode and return the results by id, and the engine."""
    engine = Engine(base, draft, max_length=options.pop("max_length", 256), **options)
    return {r.id: r for r in engine.run(requests)}, engine


def attended(q, k, v, rows, start):
    """What each attention backend reads for q, k, v (B, n, heads, D) written at `start` (B,) into `rows` of a
    store of 4 random rows: results by backend, and flash's store."""
    n, (_, _, heads, size) = q.shape[1], k.shape
    ends = (start + n).tolist()
    window = Window.at(rows, start, n, max(ends), q.dtype, fresh=False, ends=ends)
    found = {}
    for backend in ("sdpa", "flash"):
        store = KVStore(1, 4, heads, size, 64, q.dtype, q.device, attention=backend)
        store.ensure(64)
        generator = torch.Generator().manual_seed(1)
        store.kv[0].copy_(torch.randn(store.kv[0].shape, generator=generator))
        store.write(0, window, k, v)
        found[backend] = ragged_attention(q, store, 0, window)
    return found, store


def answered(base, count, new_tokens, seed=3):
    """Dialogues with the base's own greedy answers, as self-distillation stores them."""
    engine = Engine(base, batch_size=8, max_length=128)
    requests = [Request(f"d{i:02}", p, new_tokens) for i, p in enumerate(prompts(base, count, seed=seed))]
    results = {r.id: r for r in engine.run(requests)}
    return [{"id": r.id, "prompt_ids": r.prompt_ids, "answer_ids": results[r.id].ids} for r in requests]


def settings(**changes):
    """Arguments of `train` for a run of a few steps."""
    options = {
        "epochs": 1.0,
        "sequences_per_step": 6,
        "micro_batch": 2,
        "max_length": 64,
        "anchor_fraction": 0.5,
        "anchor_decay": 0.8,
        "soft_labels": 0,
        "position_weights": 1.0,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "warmup": 0.25,
        "eps": 1e-8,
        "betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "clip": 1.0,
        "validate_every": 2,
        "checkpoint_every": 2,
        "dtype": "float32",
        "seed": 5,
    }
    return options | changes


class Killed(BaseException):
    """Like SIGKILL: nothing handles it."""


def killed_at(monkeypatch, step):
    """Make the run die while it computes this step (from 0)."""
    original = Schedule.step

    def dying(self, s):
        if s == step:
            raise Killed
        return original(self, s)

    monkeypatch.setattr(Schedule, "step", dying)


def nano_base(tokenizer, vocab_size, stop_token_ids=(), seed=0, sharpness=4.0) -> Base:
    """A two-layer Llama, small enough for thousands of requests. Its embeddings outweigh what attention adds,
    so that a bigram draft is often right and often wrong."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.embed_tokens.weight.data.normal_(std=2.0)
    model.lm_head.weight.data.mul_(sharpness)
    return Base(model, tokenizer, "nano", torch.float32, torch.device("cpu"), tuple(stop_token_ids))


def perturbed_specformer(base, length=4, noise=0.02, hooks=None, **options) -> SpecFormer:
    """A SpecFormer off its identity start, so that its drafts differ between positions."""
    hooks = hooks or (0, base.num_layers // 2, base.num_layers - 1, base.num_layers)
    rows, options = [{"answer_ids": list(range(40, 120))}], options | {"draft_length": length}
    draft = new_draft(base, "specformer", rows, hooks=hooks, init="base", seed=3, **options)
    for p in draft.parameters():
        p.data += noise * torch.randn_like(p)
    return cast(SpecFormer, draft.to(base.dtype).eval())


def bigram_logits(base) -> Tensor:
    """(V, V): what the base says after each token standing alone."""
    return base.model(torch.arange(base.model.config.vocab_size)[:, None]).logits[:, 0]


def newest(following, last):
    """(B,): the base's own next token after each row's last position."""
    return following.gather(1, last[:, None])[:, 0]


def bigram_guesses(table, following, last, k):
    """(B, k): what `table` (V,) says after the newest token, and after that, and so on."""
    tokens = [newest(following, last)]
    for _ in range(k):
        tokens.append(table[tokens[-1]])
    return torch.stack(tokens[1:], 1)


class BigramDraft(Draft):
    """Drafts one token from the last one; sometimes right, because the base mostly does so too."""

    def __init__(self, base, draft_length=4):
        super().__init__(DraftConfig.for_base(base, "bigram", (0,), draft_length=draft_length))
        self.table = bigram_logits(base)

    def propose(self, taps, last, following, window, store, target, k, choose):
        tokens = [newest(following, last)]
        for j in range(k):
            tokens.append(choose(self.table[tokens[-1]][:, None], j)[:, 0])
        return torch.stack(tokens[1:], 1)


def proposing_bigrams(draft, base):
    """Let `draft` run (its cache, its logits) but propose bigram guesses, so that acceptance varies. Returns
    where its last call is kept: logits (B, k, V'), or None, and tokens (B, k)."""
    table, propose, last_call = bigram_logits(base).argmax(-1), draft.propose, {}

    def propose_guesses(taps, last, following, window, store, target, k, choose):
        logits, head = [], draft.head(target)

        def keep(given, j):
            logits.append(given)
            return head.to_tokens(given.argmax(-1))

        last_call["tokens"] = propose(taps, last, following, window, store, target, k, keep)
        last_call["logits"] = torch.cat(logits, 1) if logits else None
        return bigram_guesses(table, following, last, k)

    draft.propose = propose_guesses
    return last_call


def run_comparing(engine, requests, compare, monkeypatch):
    """Run the requests, calling compare(b, row, text) for each unfinished row after each step, text being its
    committed tokens (the pending one included); -> results by id."""
    step, compared = engine._step, set()

    def step_and_compare(slots):
        step(slots)
        for b, row in enumerate(slots):
            if row.decoding and not row.finished:
                compare(b, row, (row.request.prompt_ids + row.result.ids)[: row.length + 1])
                compared.add(row.request.id)

    monkeypatch.setattr(engine, "_step", step_and_compare)
    results = {r.id: r for r in engine.run(requests)}
    assert compared == {r.id for r in requests}
    return results


def assert_it_decodes_as_trained(base, draft, chunk, monkeypatch):
    """Whatever was accepted before, `propose` says what `training_hidden` says over the whole text with the
    draft's own tokens behind it; and the text is the base's own."""
    requests = [Request(str(i), p, 6 + i) for i, p in enumerate(prompts(base, 7, seed=4))]
    plain, _ = run(base, requests, batch_size=3)
    last_call, zero = proposing_bigrams(draft, base), torch.tensor([0])
    engine = Engine(base, draft, k=4, batch_size=3, max_length=80, prefill_chunk=chunk)

    def compare(b, row, text):
        ids = torch.tensor([text + last_call["tokens"][b].tolist()])
        _, taps = engine.target.encode(ids[:, :-1], draft.hooks)
        at = torch.tensor([row.length - 1])
        hidden = draft.training_hidden(taps, ids[:, 1:], zero, at, engine.target)
        expected = draft.head(engine.target)(hidden)[0]
        torch.testing.assert_close(last_call["logits"][b], expected, rtol=1e-3, atol=1e-3)

    results = run_comparing(engine, requests, compare, monkeypatch)
    assert {s.accepted for r in results.values() for s in r.steps} >= {0, 1, 2}
    assert {i: r.ids for i, r in results.items()} == {i: r.ids for i, r in plain.items()}


class OracleDraft(Draft):
    """Knows the answers, and proposes them rightly always, never, or at random."""

    def __init__(self, base, answers, pattern, draft_length=4):
        config = DraftConfig.for_base(base, "oracle", (0,), draft_length=draft_length)
        super().__init__(config)
        self.sequences = [list(p) + a for p, a in answers.items()]
        self.prompt_lengths = [len(p) for p in answers]
        self.pattern = pattern
        self.rng = random.Random(1)
        self.vocab = base.model.config.vocab_size

    def propose(self, taps, last, following, window, store, target, k, choose):
        rows = []
        for b in range(last.shape[0]):
            end = int(window.positions[b, last[b]]) + 1
            # rows are told apart by what the embedding taps say: match it against the known sequences
            hit = self.taps_match(taps[b, int(last[b]), 0], end, int(following[b, last[b]]), target)
            nxt = [] if hit is None else self.sequences[hit][end + 1 : end + 1 + k]
            nxt = (nxt + [0] * k)[:k]
            if self.pattern == "none" or (self.pattern == "mixed" and self.rng.random() < 0.5):
                wrong = 0 if self.pattern == "none" else self.rng.randrange(k)
                nxt[wrong] = (nxt[wrong] + 1) % self.vocab
            rows.append(nxt)
        return torch.tensor(rows)

    def taps_match(self, embedding, end, pending, target):
        for i, s in enumerate(self.sequences):
            known = end < len(s) and s[end] == pending
            if known and torch.equal(target.embedding[s[end - 1]], embedding):
                return i
        return None


def chi_square_p(counts, expected):
    """p-value of observed against expected counts (1-d), cells expected less than 5 times pooled."""
    counts, expected = counts.double(), expected.double()
    expected = expected * (counts.sum() / expected.sum())
    rare = expected < 5
    if rare.any():
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-12)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))
