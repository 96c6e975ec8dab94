"""What several test files need: prompts, plain generation by transformers, drafts of known quality."""

from __future__ import annotations

import random

import torch

from specformer.drafts.interface import Draft, DraftConfig


def prompts(base, count, seed=0, longest=40):
    """Random prompts of 1 to `longest` tokens, without stop tokens."""
    rng = random.Random(seed)
    vocab = [t for t in range(base.model.config.vocab_size) if t not in base.stop_token_ids]
    lengths = [1, 2, longest] + [rng.randint(1, longest) for _ in range(count)]
    return [rng.choices(vocab, k=n) for n in lengths[:count]]


def generate_alone(base, request):
    """The new tokens of transformers' own greedy generate for one request."""
    ids = torch.tensor([request.prompt_ids])
    out = base.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=[*base.stop_token_ids, *request.stop_token_ids],
        pad_token_id=base.stop_token_ids[0],
    )
    return out[0, ids.shape[1] :].tolist()


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

    def propose(self, taps, last, pending, window, store, target, k, choose):
        rows = []
        for b in range(last.shape[0]):
            end = int(window.positions[b, last[b]]) + 1
            # rows are told apart by what the embedding taps say: match it against the known sequences
            hit = self.taps_match(taps[b, int(last[b]), 0], end, int(pending[b]), target)
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
