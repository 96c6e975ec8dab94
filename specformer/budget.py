"""Which k pays: the paper's budget k <= rho / batch size, by measured costs instead of the roofline's.

A step of B rows that verifies k drafts a row takes verify(B, k + 1) + draft(B, k) seconds and yields
1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens a row, a_j being how often draft j is accepted where those
before it were. The k with the most tokens per second is chosen anew for every step; 0 is plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from specformer import hardware, native
from specformer.cache import Window
from specformer.drafts.interface import Draft
from specformer.target import Target

ROUNDS = 5
CONTEXT = 128
"""Tokens in each row's cache while its step is timed: an answer of the middle."""
PRIOR, PRIOR_WEIGHT = 0.5, 16.0
"""Acceptance that is believed of a draft before it was seen, and how many drafts' worth."""
MEMORY = 0.98
"""What a step leaves of the weight of those before it: acceptance changes with the text."""
MARGIN = 1.02
"""Gain over plain decoding from which drafting is chosen: below it noise would decide."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts on one machine, for one base and draft.

    rows: batch sizes that were measured, ascending; verify[i][n - 1]: a pass of n tokens for each of rows[i]
    rows; draft[i][k - 1]: proposing k tokens after a pass of k + 1.
    """

    rows: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]

    def seconds(self, rows: int, k: int) -> float:
        """A step of `rows` rows with k drafts each; on the line between measured batch sizes."""
        after = next((i for i, measured in enumerate(self.rows) if measured >= rows), len(self.rows) - 1)
        before = max(after - 1, 0)
        low, high = self.rows[before], self.rows[after]
        share = 1.0 if low == high else (rows - low) / (high - low)
        ends = [self.verify[i][k] + (self.draft[i][k - 1] if k else 0.0) for i in (before, after)]
        return ends[0] + share * (ends[1] - ends[0])


class Budget:
    """Chooses k, 0 to `most`, from the costs and from what became of the drafts so far."""

    def __init__(self, costs: StepCosts, most: int):
        self.costs, self.most = costs, most
        self._reached = [0.0] * most
        self._accepted = [0.0] * most

    def record(self, steps: Iterable[tuple[int, int]]) -> None:
        """(drafted, accepted) of each row of a step; one without drafts teaches nothing."""
        steps = [step for step in steps if step[0]]
        if not steps:
            return
        self._reached = [MEMORY * n for n in self._reached]
        self._accepted = [MEMORY * n for n in self._accepted]
        for drafted, accepted in steps:
            for j in range(min(accepted + 1, drafted)):
                self._reached[j] += 1
                self._accepted[j] += j < accepted

    def tokens(self, k: int) -> float:
        """Tokens that a row is expected to gain by a step with k drafts."""
        total, reach = 1.0, 1.0
        for accepted, reached in zip(self._accepted[:k], self._reached[:k], strict=True):
            reach *= (accepted + PRIOR * PRIOR_WEIGHT) / (reached + PRIOR_WEIGHT)
            total += reach
        return total

    def choose(self, rows: int) -> int:
        """The k with the most tokens per second for `rows` rows; 0 unless that gains MARGIN."""
        rates = [self.tokens(k) / self.costs.seconds(rows, k) for k in range(self.most + 1)]
        best = max(range(self.most + 1), key=rates.__getitem__)
        return best if rates[best] >= MARGIN * rates[0] else 0


def cache_file() -> Path:
    """Where measured costs are kept: a JSON file in the user's cache folder."""
    return native.cache_folder() / "step_costs.json"


def step_costs(target: Target, draft: Draft, batch_size: int, attention: str = "auto") -> StepCosts:
    """The costs on this machine, measured once (some seconds, said beforehand) and kept in `cache_file()`; a
    file that is damaged or cannot be written, and others at work meanwhile, mean measuring again."""
    config, machine = target.config, hardware.describe(target.dtype, target.device)
    parts = [machine[name] for name in ("cpu", "threads", "kernels", "accelerator", "torch", "dtype")]
    parts += [config.num_hidden_layers, config.hidden_size, config.vocab_size, batch_size, attention]
    counts = draft.parameter_counts()
    parts += [draft.config.kind, draft.config.vocabulary, draft.draft_length]
    parts += [counts.shared, counts.per_position]
    key = ", ".join(str(part) for part in parts)
    file = cache_file()
    known = hardware.read_cache(file)
    try:
        found = known[key]
        return StepCosts(
            tuple(found["rows"]), *(tuple(map(tuple, found[part])) for part in ("verify", "draft"))
        )
    except (KeyError, TypeError):
        pass
    print(f"measuring once what a step of up to {batch_size} rows costs here ...", flush=True)
    idle = not hardware.busy()
    costs = measure_costs(target, draft, batch_size, attention)
    if idle:
        hardware.write_cache(file, key, asdict(costs))
    return costs


@torch.no_grad()
def measure_costs(target: Target, draft: Draft, batch_size: int, attention: str = "auto") -> StepCosts:
    """Time steps of 1, 2, 4, ... and `batch_size` rows with every k; the median of ROUNDS each."""
    sizes = sorted({2**i for i in range(batch_size.bit_length()) if 2**i < batch_size} | {batch_size})
    length = draft.draft_length
    verify, proposals, head = [], [], draft.head(target)

    def choose(logits: Tensor, j: int) -> Tensor:
        return head.to_tokens(logits.argmax(-1))

    for rows in sizes:
        limit = CONTEXT + 2 * length + 1
        store = target.new_store(rows, limit, attention=attention)
        own = draft.new_store(target, rows, limit, attention)
        for each in (store, own):
            if each is not None:
                each.ensure(limit)
        ids = torch.zeros(rows, length + 1, dtype=torch.long, device=target.device)
        start = torch.full((rows,), CONTEXT, device=target.device)
        last = torch.zeros(rows, dtype=torch.long, device=target.device)
        times: dict[tuple[str, int], list[float]] = {}
        for _ in range(ROUNDS + 1):  # every n in turn, so that a slow moment does not fall on one
            for n in range(1, length + 2):
                clock = time.perf_counter()
                window = Window.at(slice(0, rows), start, n, CONTEXT + n, target.dtype, fresh=False)
                hidden, taps = target.forward(ids[:, :n], window, store, draft.hooks)
                choice = target.logits(hidden).argmax(-1)
                choice.cpu()
                done = time.perf_counter()
                times.setdefault(("verify", n), []).append(done - clock)
                if n == 1:
                    continue
                taps = target.taps_of(choice, taps)
                draft.propose(taps, last, choice, window, own, target, n - 1, choose).cpu()
                times.setdefault(("draft", n - 1), []).append(time.perf_counter() - done)
        middle = {part: median(seconds[1:]) for part, seconds in times.items()}
        verify.append(tuple(middle["verify", n] for n in range(1, length + 2)))
        proposals.append(tuple(middle["draft", k] for k in range(1, length + 1)))
    return StepCosts(tuple(sizes), tuple(verify), tuple(proposals))
