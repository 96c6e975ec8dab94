"""A small LLM with the base's tokenizer drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

Nothing is trained and nothing of the small LLM is saved: config.json names it. It runs as the base does
(`specformer.target`), one pass for each drafted token. It reads tokens alone, no hidden states, and is always
one token ahead of the base: the token that the base has just produced is in its cache already. What it
reads is what was committed, from the engine's `following`, so that a last draft that was accepted, which it
never ran, is read then.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from specformer.base import Base, load_base
from specformer.cache import KVStore, Window
from specformer.drafts.interface import Choose, Draft, DraftConfig, ParameterCounts, register
from specformer.errors import UserError
from specformer.target import Head, Target


class Ahead(KVStore):
    """Keeps, of each row, one token more than the engine counts."""

    def ensure(self, tokens: int) -> None:
        super().ensure(min(tokens + 1, self.limit))

    def move(self, source: int, target: int, length: int) -> None:
        super().move(source, target, length + 1)


@register("small_llm")
class SmallLLM(Draft):
    """Drafts of the LLM `config.small_llm`, in the base's dtype on its device.

    Raises UserError without a name, for a model that `load_base` refuses, and for another tokenizer."""

    label = "small LLM"
    tapped = 0
    switches = ("small_llm",)

    def __init__(self, config: DraftConfig):
        super().__init__(config)
        if not config.small_llm:
            raise UserError(
                "draft.small_llm is empty: name a hub model or a folder, with the base's tokenizer"
            )
        self._small: Base | None = None

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        return ()

    def passes(self, k: int) -> int:
        return k

    def attach(self, base: Base) -> None:
        threads = torch.get_num_threads()
        small = load_base(
            self.config.small_llm,
            dtype=str(base.dtype).removeprefix("torch."),
            device=str(base.device),
        )
        torch.set_num_threads(threads)  # those that the base runs best with
        check_tokenizers(base, small)
        self._small = small

    @property
    def small(self) -> Base:
        """The small LLM. RuntimeError before `attach`."""
        if self._small is None:
            raise RuntimeError("the small LLM is not loaded: make drafts by new_draft or load_draft")
        return self._small

    @cached_property
    def runner(self) -> Target:
        """The small LLM, ready to run."""
        return Target(self.small, self.small.max_positions + self.draft_length + 2)

    def parameter_counts(self) -> ParameterCounts:
        """M' runs anew for each drafted token: p = 1 + l_d M' / M. None of it is trained."""
        own = sum(p.numel() for p in self.small.model.parameters())
        k = self.draft_length
        return ParameterCounts(own, 0, k, self.config.base_parameters, self.passes(k))

    def make_head(self, target: Target) -> Head:
        """The small LLM's own head, over the tokens that both know: LLMs of one tokenizer pad their
        embeddings to different sizes."""
        own, total = self.runner.head, target.head.tokens
        if self.vocabulary is not None:
            both = self.vocabulary[self.vocabulary < own.tokens]
            return Head(own.norm_weight, own.eps, own.weight[both], both, total)
        if own.tokens == total:
            return own
        both = torch.arange(min(own.tokens, total), device=target.device)
        matmul = own.matmul if own.tokens < total else None
        return Head(own.norm_weight, own.eps, own.weight[: len(both)], both, total, matmul)

    def new_store(self, target: Target, rows: int, limit: int, attention: str) -> KVStore:
        reach = self.small.max_positions
        if limit > reach + self.draft_length + 1:  # the engine's limit counts a last step of k + 1
            raise UserError(
                f"the small LLM {self.small.name} reaches {reach} positions, rows of {limit} are asked for: "
                "lower max_length or take another one"
            )
        return self.runner.new_store(rows, limit + 1, attention=attention, kind=Ahead)

    @torch.no_grad()
    def begin(self, rows: Tensor, first: Tensor, store: KVStore | None) -> None:
        start = torch.zeros_like(first)
        window = Window.at(rows, start, 1, 1, self.small.dtype, fresh=True)
        self.runner.forward(first[:, None], window, store)

    @torch.no_grad()
    def propose(
        self,
        taps: Tensor,
        last: Tensor,
        following: Tensor,
        window: Window,
        store: KVStore | None,
        target: Target,
        k: int,
        choose: Choose,
    ) -> Tensor:
        if store is None:
            raise ValueError("a small LLM needs a cache")
        head, dtype = self.head(target), self.small.dtype
        start, n = window.positions[:, 0] + 1, following.shape[1]
        ahead = Window.at(window.rows, start, n, window.upto + 1, dtype, fresh=False)
        ahead.runs = [(a, b, longest + 1) for a, b, longest in window.runs]
        # a base padded further could say what the small LLM has no embedding for
        read = following.clamp(max=len(self.runner.embedding) - 1)
        hidden, _ = self.runner.forward(read, ahead, store)
        hidden = hidden[torch.arange(len(last), device=last.device), last].unsqueeze(1)
        tokens = [choose(head(hidden), 0)]
        for j in range(1, k):
            own = ahead.behind(last, j, store.limit, dtype)
            hidden, _ = self.runner.forward(tokens[-1], own, store)
            tokens.append(choose(head(hidden), j))
        return torch.cat(tokens, 1)


def check_tokenizers(base: Base, small: Base) -> None:
    """Raise UserError unless both LLMs number the same tokens alike; a base that came without a tokenizer
    cannot be asked."""
    if base.tokenizer is None:
        return
    ours, theirs = base.tokenizer.get_vocab(), small.tokenizer.get_vocab()
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    if differing:
        raise UserError(
            f"draft.small_llm: the tokenizers of {small.name} and {base.name} differ in {len(differing)} "
            f"tokens, for example {differing[0]!r}: name a model with the tokenizer of {base.name}"
        )
