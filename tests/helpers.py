"""What several test files need: prompts, plain generation by transformers, drafts of known quality."""

from __future__ import annotations

import random
from typing import cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specformer.base import Base
from specformer.drafts import DraftConfig, SpecFormer, new_draft
from specformer.drafts.interface import Draft
from specformer.engine import Engine


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


class MixedSpecFormer(SpecFormer):
    """Runs the real draft (its cache, its logits) but proposes bigram guesses, so that acceptance varies.
    `seen` holds the logits (B, k, V) of the last call."""

    table: Tensor
    seen: Tensor

    @classmethod
    def like(cls, draft, base):
        mixed = cls(draft.config)
        mixed.load_state_dict(draft.state_dict())
        mixed.table = bigram_logits(base).argmax(-1)
        return mixed.eval()

    def propose(self, taps, last, following, window, store, target, k, choose):
        def keep(logits, j):
            self.seen = logits
            return logits.argmax(-1)

        super().propose(taps, last, following, window, store, target, k, keep)
        tokens = [newest(following, last)]
        for _ in range(k):
            tokens.append(self.table[tokens[-1]])
        return torch.stack(tokens[1:], 1)


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
