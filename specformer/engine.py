"""The decoding engine: requests in, results out. Prefill -> draft -> verify -> commit, ragged over rows.

Plain decoding is the engine without a draft model (k = 0): the same loop, cache and matmuls. The engine
knows nothing of any particular draft model (`specformer.drafts.interface`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specformer import sampling
from specformer.base import Base
from specformer.budget import Budget, StepCosts, step_costs
from specformer.cache import KVStore, Window
from specformer.compiled import CompiledVerify, bucket, choose_compile, worth_compiling
from specformer.drafts.interface import Draft
from specformer.errors import UserError
from specformer.target import Target, pack_linears

FinishReason = Literal["stop", "stop_string", "length"]

CPU_PASS_COST, GPU_PASS_COST = 32, 512
"""What one more pass of prefill costs, in tokens of padding. On a CPU SmolLM2-135M streams its weights in the
time of some 30 tokens; the GPU's is a guess."""
MISSED_BYTES = 2**29
"""Hidden states kept for a draft model that k = "auto" lets rest; beyond, it reads them and rests again."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    max_new_tokens caps the answer exactly; temperature 0 is greedy; top_k 0 and top_p 1 are off; seed fixes
    the draw whatever else is in the batch; stop: strings that end the text (cut before it); stop_token_ids
    come on top of the base LLM's own end tokens.
    """

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def check(self, max_length: int) -> None:
        """Raise UserError naming what cannot be decoded."""
        name = f"request {self.id!r}"
        if not self.prompt_ids:
            raise UserError(f"{name}: the prompt is empty: give at least one token")
        if self.max_new_tokens < 1:
            raise UserError(f"{name}: max_new_tokens is {self.max_new_tokens}: give at least 1")
        need = len(self.prompt_ids) + self.max_new_tokens
        if need > max_length:
            raise UserError(
                f"{name}: {len(self.prompt_ids)} prompt tokens + {self.max_new_tokens} new tokens = {need}, "
                f"a row of the cache holds {max_length}: shorten the request or raise max_length"
            )
        if not self.temperature >= 0:
            raise UserError(f"{name}: temperature is {self.temperature}: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{name}: top_p is {self.top_p}: give a value in (0, 1]")
        if self.top_k < 0:
            raise UserError(f"{name}: top_k is {self.top_k}: give 0 (off) or more")
        if any(not s for s in self.stop):
            raise UserError(f"{name}: a stop string is empty: it would stop at once")


@dataclass(frozen=True)
class Step:
    """One verification of one row: `committed = accepted + 1 - truncated` tokens entered the output.

    accepted counts draft tokens in the output (never beyond a stop or the cap); truncated is 1 when the
    base's own token after them fell away because the row had ended.
    """

    drafted: int
    accepted: int
    committed: int
    truncated: int


@dataclass
class Result:
    """A finished request. ids are the new tokens, the stop token included; text is without special tokens
    and without the stop string. The first token comes from the prefill: len(ids) = 1 + sum(committed)."""

    id: str
    prompt_ids: list[int]
    ids: list[int]
    text: str
    finish_reason: FinishReason
    steps: list[Step]


@dataclass
class EngineStats:
    """Since the engine was made: seconds by phase, verify steps, requests whose prompt has run, tokens.

    compile: seconds of compiling the verify step, 0 where it stayed eager."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rest: float = 0.0
    compile: float = 0.0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.prefill + self.draft + self.verify + self.rest + self.compile


@dataclass
class Row:
    """A request in a slot of the batch; prefilled counts the prompt tokens that are in the cache."""

    request: Request
    result: Result
    stops: frozenset[int]
    uniform: Tensor | None = None
    prefilled: int = 0
    decoding: bool = False
    finished: bool = False
    read: int = 0
    """Tokens that the draft model has read, where it may lag behind (k = "auto")."""
    missed: list[Tensor] = field(default_factory=list)
    """Hidden states (n, hooks, H) of those that it has yet to read."""

    @property
    def length(self) -> int:
        """Tokens in the cache that count: all but the pending one (the device's `length`, known here too)."""
        return self.prefilled + max(0, len(self.result.ids) - 1)


class Engine:
    """Decodes requests in a batch of `batch_size` slots; finished slots are refilled at once.

    base: the LLM; draft: a draft model made for it, or None; k: draft tokens per step, 0..draft_length, or
    "auto": what pays at each step (`specformer.budget`), whose costs are measured once per machine;
    max_length: most tokens (prompt + new) of one row; prefill_chunk: most prompt tokens per prefill pass;
    sample_drafts: draw drafts from the draft's own distribution (ratio rule) instead of its argmax, for
    requests with a temperature; target: a prepared `Target` of the same base, to share its packed weights;
    attention: how the cache is read (`layers.choose_attention`); compile: compile
    the verify step of a full batch (`specformer.compiled`): False, True, or "auto", once enough tokens have
    been asked for to win back the time (`expect`); store: keys and values to use instead of its own, which
    engines that take turns may share; costs: for k = "auto", instead of measured ones.
    Raises UserError for a k the draft cannot give, a max_length the base cannot reach, a store too small, or
    a backend or compiler that is not there.
    """

    def __init__(
        self,
        base: Base,
        draft: Draft | None = None,
        *,
        k: int | str = 0,
        batch_size: int = 1,
        max_length: int = 2048,
        prefill_chunk: int = 2048,
        sample_drafts: bool = False,
        target: Target | None = None,
        attention: str = "auto",
        compile: bool | str = False,
        store: KVStore | None = None,
        costs: StepCosts | None = None,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: give at least 1")
        most = 0 if draft is None else draft.draft_length
        auto = k == "auto" and draft is not None
        if auto:
            k = most
            if compile is True:
                raise UserError("engine.compile is for one k: set it to false, or name a k instead of auto")
            compile = False
        if not isinstance(k, int) or not 0 <= k <= most:
            reason = "without a draft model only 0 is possible" if draft is None else f"0..{most} or auto"
            raise UserError(f"k is {k}: {reason}")
        if max_length > base.max_positions:
            raise UserError(f"max_length is {max_length}: {base.name} reaches {base.max_positions} positions")
        self.base, self.k, self.batch_size = base, k, batch_size
        self.draft = draft if k else None
        self.max_length, self.prefill_chunk = max_length, prefill_chunk
        self.sample_drafts = sample_drafts
        limit = max_length + k + 1  # a step writes k + 1 tokens before it learns where the row ends
        self.target = target or Target(base, limit)
        if self.target.max_length < limit:
            raise UserError(f"the shared target tabulates {self.target.max_length} positions, not {limit}")
        if store is not None and (store.rows < batch_size or store.limit < limit):
            raise UserError(
                f"the shared store holds {store.rows} rows of {store.limit} tokens, "
                f"not {batch_size} of {limit}: make it larger"
            )
        self.store = store or self.target.new_store(batch_size, limit, attention=attention)
        self.draft_store, self.hooks = None, ()
        if self.draft is not None:
            self.hooks = self.draft.hooks
            pack_linears(self.draft)
            self.draft_store = self.draft.new_store(self.target, batch_size, limit, attention)
        self.stats = EngineStats()
        self.compile, self._declined = choose_compile(compile), False
        self._compiled: CompiledVerify | None = None
        self._expected = self._admitted = 0  # new tokens: announced, and of the requests taken so far

        # what the next step starts from, one entry a slot, on the device
        integers = {"dtype": torch.long, "device": base.device}
        self._length = torch.zeros(batch_size, **integers)
        self._pending = torch.zeros(batch_size, **integers)
        self._drafts = torch.zeros(batch_size, k, **integers)
        self._q: Tensor | None = None  # (slots, k, V) draft distributions, for the ratio rule
        self._held = k  # drafts that each row holds now: all k, or what the budget chose
        self.budget: Budget | None = None
        if auto:
            assert draft is not None
            self.budget = Budget(costs or step_costs(self.target, draft, batch_size, attention), k)

    # ---------------------------------------------------------------- the loop

    @torch.no_grad()
    def run(self, requests: Iterable[Request]) -> Iterator[Result]:
        """Yield results in the order they finish.

        Requests are taken as slots become free. A list is checked whole before any work starts, an iterator
        request by request; both raise UserError naming the request.
        """
        if isinstance(requests, list):
            for request in requests:
                request.check(self.max_length)
            self.expect(sum(request.max_new_tokens for request in requests))
        waiting = iter(requests)
        slots: list[Row] = []
        while True:
            with self._timed("rest"):
                while len(slots) < self.batch_size and (request := next(waiting, None)) is not None:
                    slots.append(self._admit(request, len(slots)))
            if not slots:
                return
            self._prefill(slots)
            yield from self._retire(slots)
            if any(row.decoding for row in slots):
                self._step(slots)
                yield from self._retire(slots)

    def expect(self, tokens: int) -> None:
        """So many new tokens are going to be asked for: what `compile="auto"` decides by. A list of requests
        says so itself, an iterator only as it is read."""
        self._expected += tokens

    @contextmanager
    def _timed(self, phase: str):
        """Add the seconds of the block to a phase; on a GPU the device is waited for, so phases are true."""
        start = time.perf_counter()
        yield
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        setattr(self.stats, phase, getattr(self.stats, phase) + time.perf_counter() - start)

    def _admit(self, request: Request, slot: int) -> Row:
        request.check(self.max_length)
        if request.stop and self.base.tokenizer is None:
            raise UserError(f"request {request.id!r}: stop strings need a tokenizer: give one")
        result = Result(request.id, request.prompt_ids, [], "", "length", [])
        stops = frozenset(self.base.stop_token_ids) | frozenset(request.stop_token_ids)
        uniform = None
        if request.temperature > 0:
            # a request's draws depend on its seed and the token's position alone, never on the batch
            generator = torch.Generator().manual_seed(request.seed)
            count = request.max_new_tokens + 2 * self.k + 1  # a step may run over the end, its drafts too
            uniform = torch.rand(count, 3, generator=generator, dtype=torch.float64)
            uniform = uniform.to(self.base.device)
        self._length[slot] = 0
        self._admitted += request.max_new_tokens
        self.stats.prompt_tokens += len(request.prompt_ids)
        return Row(request, result, stops, uniform)

    def _retire(self, slots: list[Row]) -> Iterator[Result]:
        """Yield finished rows; the last row moves into each gap, so that the active rows stay the first
        ones and the cache is read as a view."""
        for slot in range(len(slots) - 1, -1, -1):
            row = slots[slot]
            if not row.finished:
                continue
            last = slots.pop()
            if last is not row:
                with self._timed("rest"):
                    slots[slot] = last
                    self._move(len(slots), slot, last.length)
            yield row.result

    def _move(self, source: int, target: int, length: int) -> None:
        for store in (self.store, self.draft_store):
            if store is not None:
                store.move(source, target, length)
        for tensor in (self._length, self._pending, self._drafts, self._q):
            if tensor is not None:
                tensor[target] = tensor[source]

    def _ensure(self, tokens: int) -> None:
        self.store.ensure(tokens)
        if self.draft_store is not None:
            # a draft writes its own tokens behind the verified ones
            self.draft_store.ensure(min(tokens + self.k + 1, self.draft_store.limit))

    # ---------------------------------------------------------------- prefill

    def _prefill(self, slots: list[Row]) -> None:
        """Run newcomers' prompts, right-padded together, in passes of at most `prefill_chunk` tokens. While
        other rows decode, one iteration spends at most that much, so they are never stalled for long."""
        spent, others = 0, any(row.decoding for row in slots)
        if self.budget is not None and not others:
            self._held = self.budget.choose(len(slots))
        while True:
            left = {
                s: len(row.request.prompt_ids) - row.prefilled
                for s, row in enumerate(slots)
                if not row.decoding
            }
            if not left or (others and spent >= self.prefill_chunk):
                return
            n, chosen = self._together(left, {s: slots[s].prefilled for s in left})
            spent += n * len(chosen)
            with self._timed("prefill"):
                self._prefill_pass(slots, chosen, n)

    def _together(self, left: dict[int, int], start: dict[int, int]) -> tuple[int, list[int]]:
        """Tokens n and slots of one pass over known text, shorter rows padded to n.

        left: slot -> tokens still to be read; start: slot -> tokens before them."""
        order = sorted(left, key=lambda s: -left[s])
        n = min(left[order[0]], self.prefill_chunk)
        # padded to n, a row near its limit would run over the cache's end: it comes in a later pass
        fitting = [s for s in order if start[s] + n <= self.store.limit]
        # and so does one that would cost more as padding than a pass more does
        cost = CPU_PASS_COST if self.base.device.type == "cpu" else GPU_PASS_COST
        close = [s for s in fitting if n - left[s] <= cost]
        return n, close[: max(1, self.prefill_chunk // n)]

    def _prefill_pass(self, slots: list[Row], chosen: list[int], n: int) -> None:
        device, rows = self.base.device, [slots[s] for s in chosen]
        parts = [row.request.prompt_ids[row.prefilled : row.prefilled + n] for row in rows]
        upto = n + max(row.prefilled for row in rows)
        fresh = all(row.prefilled == 0 for row in rows)
        ids = torch.tensor([part + [0] * (n - len(part)) for part in parts], device=device)
        start = torch.tensor([row.prefilled for row in rows], device=device)
        last = torch.tensor([len(part) - 1 for part in parts], device=device)
        index = torch.tensor(chosen, device=device)
        self._ensure(upto)

        window = Window.at(index, start, n, upto, self.base.dtype, fresh)
        hidden, taps = self.target.forward(ids, window, self.store, self.hooks)
        b = torch.arange(len(rows), device=device)
        logits = self.target.logits(hidden[b, last].unsqueeze(1))
        token = self._choose(rows, logits)[:, 0]
        new = [i for i, row in enumerate(rows) if row.prefilled == 0]
        if self.draft is not None and new:
            begun = torch.tensor(new, device=device)
            self.draft.begin(index[begun], ids[begun, 0], self.draft_store)
        self._length[index] = start + last + 1
        self._pending[index] = token
        if self.budget is not None and (self._held == 0 or any(row.missed for row in rows)):
            for row, tap, part in zip(rows, self.target.taps_of(ids, taps), parts, strict=True):
                row.missed.append(tap[: len(part)])
        else:
            # behind a prompt's end comes the base's token; one cut by the chunk goes on with its own next
            after = [row.request.prompt_ids[row.prefilled + 1 : row.prefilled + n + 1] for row in rows]
            following = torch.tensor([part + [-1] * (n - len(part)) for part in after], device=device)
            following = torch.where(following < 0, token[:, None], following)
            self._propose(rows, index, taps, last, following, window, torch.ones_like(last))
            for row, part in zip(rows, parts, strict=True):
                row.read += len(part)

        for row, part, first in zip(rows, parts, token.tolist(), strict=True):
            row.prefilled += len(part)
            if row.prefilled == len(row.request.prompt_ids):
                row.decoding = True
                self.stats.requests += 1
                self._commit(row, [first])

    # ---------------------------------------------------------------- draft, verify, commit

    def _step(self, slots: list[Row]) -> None:
        if self.budget is not None and self._behind(slots):
            with self._timed("draft"):
                self._catch_up(slots)
        B, k = len(slots), self._held
        ends = [row.length + k + 1 for row in slots]
        self._ensure(max(ends))
        if B == self.batch_size and self._compiled is None and self.compile:
            self._maybe_compile(ends)
        with self._timed("verify"):
            drafts = self._drafts[:B, :k]
            ids = torch.cat((self._pending[:B, None], drafts), 1)
            logits, taps, window = self._forward(ids, ends)
            accepted, token = self._verify(slots, logits, drafts)
            run = torch.cat((drafts, token[:, None]), 1).scatter_(1, accepted[:, None], token[:, None])
            advance = accepted + 1
            if not all(row.decoding for row in slots):  # rows amid their prompt only keep their place
                active = torch.tensor([row.decoding for row in slots], device=advance.device)
                advance = advance * active
            self._length[:B] += advance
            self._pending[:B] = token
        if self.budget is not None:
            self._held = self.budget.choose(B)
        # a draft that is not wanted, or has not read all before, reads this later
        late = self._held == 0 or any(row.missed for row in slots if row.decoding)
        if not late:
            with self._timed("draft"):
                self._propose(slots, slice(0, B), taps, accepted, run, window, accepted + 1)
        with self._timed("rest"):
            host = torch.cat((accepted[:, None], run), 1).tolist()  # the one synchronisation of a step
            unread = self.target.taps_of(run, taps) if late and self.budget is not None else None
            for b, (row, (a, *tokens)) in enumerate(zip(slots, host, strict=True)):
                if row.decoding:
                    if unread is not None:
                        row.missed.append(unread[b, : a + 1])
                    else:
                        row.read += a + 1
                    committed = self._commit(row, tokens[: a + 1])
                    kept = min(a, committed)
                    row.result.steps.append(Step(k, kept, committed, kept + 1 - committed))
            self.stats.steps += 1
            if self.budget is not None:
                self.budget.record((k, a) for row, (a, *_) in zip(slots, host, strict=True) if row.decoding)

    # ---------------------------------------------------------------- k = "auto": reading later

    def _behind(self, slots: list[Row]) -> bool:
        """Whether the draft model has to read what it missed: it is to draft again, or that grew large."""
        missed = sum(row.length - row.read for row in slots if row.decoding)
        token = len(self.hooks) * self.target.config.hidden_size * self.target.dtype.itemsize
        return missed > 0 and (self._held > 0 or missed * token > MISSED_BYTES)

    def _catch_up(self, slots: list[Row]) -> None:
        """Have the draft model read what it missed while nothing was drafted, and draft from there."""
        while True:
            start = {s: row.read for s, row in enumerate(slots) if row.decoding and row.missed}
            if not start:
                return
            n, chosen = self._together({s: slots[s].length - read for s, read in start.items()}, start)
            rows = [slots[s] for s in chosen]
            whole = [torch.cat(row.missed) for row in rows]
            counts = [min(n, len(taps)) for taps in whole]
            texts = [row.request.prompt_ids + row.result.ids for row in rows]
            after = [text[row.read + 1 :][:n] for row, text in zip(rows, texts, strict=True)]
            index, begin, following, last = (
                torch.tensor(values, device=self.base.device)
                for values in (
                    chosen,
                    [row.read for row in rows],
                    [part + [0] * (n - len(part)) for part in after],
                    [count - 1 for count in counts],
                )
            )
            window = Window.at(
                index, begin, n, n + max(row.read for row in rows), self.base.dtype, fresh=False
            )
            self._ensure(window.upto)
            pad = torch.nn.utils.rnn.pad_sequence
            taps = pad([taps[:n] for taps in whole], batch_first=True)
            self._propose(rows, index, taps, last, following, window, torch.zeros_like(last))
            for row, unread, count in zip(rows, whole, counts, strict=True):
                row.read += count
                row.missed = [unread[count:]] if count < len(unread) else []

    def _forward(self, ids: Tensor, ends: list[int]) -> tuple[Tensor, Tensor | None, Window]:
        """Logits and taps of the tokens ids (B, k + 1) behind the first B rows, and their window; ends: each
        row's length with them. Compiled for a full batch where that was chosen, else eager."""
        B, n = ids.shape
        if self._compiled is not None and B == self.batch_size:
            window = self._compiled.window(self._length, n, max(ends))
            if window is not None:
                self._ensure(window.upto)  # the draft model reads its own store by the same window
                return *self._compiled(ids, window), window
        window = Window.at(slice(0, B), self._length[:B], n, max(ends), self.base.dtype, False, ends)
        hidden, taps = self.target.forward(ids, window, self.store, self.hooks)
        return self.target.logits(hidden), taps, window

    def _maybe_compile(self, ends: list[int]) -> None:
        """Compile the verify step for the full batch, or say once that the work is too short for it."""
        B, k = self.batch_size, self.k
        if bucket(max(ends), self.store.limit) is None:
            return
        worth = worth_compiling(B) if self.compile == "auto" else 0
        asked = max(self._expected, self._admitted)
        if asked < worth:
            if not self._declined:
                print(
                    f"the verify step stays eager: {asked:,} tokens are asked for so far, "
                    f"compiling pays from {worth:,}",
                    file=sys.stderr,
                )
            self._declined = True
            return
        print(f"compiling the verify step for {B} rows x {k + 1} tokens ...", file=sys.stderr, flush=True)
        before = self.stats.compile
        with self._timed("compile"):
            self._compiled = CompiledVerify(self.target, self.store, B, k + 1, self.hooks)
            # what a step writes beyond the rows' lengths the next one overwrites, so the coming step serves
            # to try it; with CUDA graphs the first runs warm up and record
            for _ in range(3 if self.base.device.type == "cuda" else 1):
                self._forward(torch.cat((self._pending[:, None], self._drafts), 1), ends)
        seconds = self.stats.compile - before
        print(f"compiled the verify step for {B} rows x {k + 1} tokens: {seconds:.0f} s", file=sys.stderr)

    def _verify(self, rows: list[Row], logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """logits (B, k + 1, V), drafts (B, k) -> accepted (B,), the base's own next token (B,)."""
        choice = self._choose(rows, logits)
        accepted = sampling.match(choice, drafts)
        token = choice.gather(1, accepted[:, None])[:, 0]
        k = drafts.shape[1]
        drawn = self._drawn(rows) if k and self.sample_drafts else []
        if drawn and self._q is not None:
            p, uniform = self._distribution(rows, drawn, logits)
            accepted[drawn], token[drawn] = sampling.ratio_rule(
                p, self._q[drawn, :k], drafts[drawn], uniform[:, :-1, 1], uniform[..., 0]
            )
        return accepted, token

    def _propose(
        self,
        rows: list[Row],
        index: slice | Tensor,
        taps: Tensor | None,
        last: Tensor,
        following: Tensor,
        window: Window,
        uncommitted: Tensor,
    ) -> None:
        """Have the draft model fill the rows' next drafts. uncommitted (B,): tokens of each row that are
        chosen but not in its result yet, so that the first draft is for the token after them."""
        if self.draft is None:
            return
        taps = self.target.taps_of(following, taps)
        head = self.draft.head(self.target)

        def choose(logits: Tensor, j: int) -> Tensor:
            tokens = sampling.greedy(logits)
            drawn = self._drawn(rows) if self.sample_drafts else []
            if drawn:
                if self._q is None:
                    self._q = logits.new_zeros(self.batch_size, self.k, head.tokens, dtype=torch.float32)
                q, uniform = self._distribution(rows, drawn, logits, uncommitted + j)
                tokens[drawn] = sampling.draw(q, uniform[..., 2])
                slots = torch.arange(self.batch_size, device=logits.device)[index][drawn]
                self._q[slots, j : j + logits.shape[1]] = head.spread(q)
            return head.to_tokens(tokens)

        k = max(1, self._held)  # one that only catches up drafts too
        self._drafts[index, :k] = self.draft.propose(
            taps, last, following, window, self.draft_store, self.target, k, choose
        )

    @staticmethod
    def _drawn(rows: list[Row]) -> list[int]:
        return [b for b, row in enumerate(rows) if row.uniform is not None]

    def _choose(self, rows: list[Row], logits: Tensor) -> Tensor:
        """The base LLM's own tokens (B, n) from logits (B, n, V): argmax, or drawn where a row asks so."""
        choice = sampling.greedy(logits)
        drawn = self._drawn(rows)
        if drawn:
            p, uniform = self._distribution(rows, drawn, logits)
            choice[drawn] = sampling.draw(p, uniform[..., 0])
        return choice

    def _distribution(
        self, rows: list[Row], drawn: list[int], logits: Tensor, ahead: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """float32 probabilities (R, n, V) and the uniforms (R, n, 3) of the rows that sample.

        ahead (B,), at most 2 k: how many tokens behind a row's result its first position lies. Each position
        has its own uniforms: one that served two tokens would make them depend on each other."""
        asked = [rows[b].request for b in drawn]
        device, n = logits.device, logits.shape[1]
        p = sampling.distribution(
            logits[drawn],
            torch.tensor([r.temperature for r in asked], device=device),
            torch.tensor([r.top_k for r in asked], device=device),
            torch.tensor([r.top_p for r in asked], device=device),
        )
        reach = n if ahead is None else n + 2 * self.k
        uniform = []
        for b in drawn:
            numbers, at = rows[b].uniform, len(rows[b].result.ids)
            assert numbers is not None
            uniform.append(numbers[at : at + reach])
        padded = torch.nn.utils.rnn.pad_sequence(uniform, batch_first=True)
        if ahead is not None:  # known to the device alone: no synchronisation
            at = ahead[drawn, None] + torch.arange(n, device=device)
            padded = padded.gather(1, at[..., None].expand(-1, -1, 3))
        return p, padded

    def _commit(self, row: Row, tokens: list[int]) -> int:
        """Append tokens one by one until the row ends; returns how many entered the output."""
        result, request = row.result, row.request
        before = len(result.ids)
        for token in tokens:
            result.ids.append(token)
            reason = self._ended(row)
            if reason is not None:
                result.finish_reason, row.finished = reason, True
                result.text = self._text(result.ids)
                if reason == "stop_string":
                    cuts = [result.text.find(s) for s in request.stop]
                    result.text = result.text[: min(c for c in cuts if c >= 0)]
                break
        count = len(result.ids) - before
        self.stats.tokens += count
        return count

    def _ended(self, row: Row) -> FinishReason | None:
        ids, request = row.result.ids, row.request
        if ids[-1] in row.stops:
            return "stop"
        if request.stop:
            # a token is at least a byte, so a string completed by this token lies in this many last ones;
            # a few more keep characters of several bytes whole
            tail = self._text(ids[-(max(len(s.encode()) for s in request.stop) + 8) :])
            if any(s in tail for s in request.stop) and any(s in self._text(ids) for s in request.stop):
                return "stop_string"
        return "length" if len(ids) == request.max_new_tokens else None

    def _text(self, ids: list[int]) -> str:
        if self.base.tokenizer is None:  # `hf.CustomGenerate` may be called without one
            return ""
        text = self.base.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
