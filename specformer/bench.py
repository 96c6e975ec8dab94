"""The one timing protocol: full batches of different prompts, k = 0 and k > 0 alternating in one run.

The k = 0 rounds use the same engine, cache and matmuls. Records are written round by round, so that a killed
run goes on where it stopped; `tables` and `figures` read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from specformer import hardware
from specformer.base import Base
from specformer.budget import step_costs
from specformer.cache import Window
from specformer.drafts.interface import Draft
from specformer.engine import Engine, EngineStats, Request, Result
from specformer.errors import UserError
from specformer.progress import Progress
from specformer.sampling import greedy
from specformer.tables import AUTO, BASELINE
from specformer.target import Target

WARM_UP_PROMPT = 64
"""Prompt tokens that all contenders but the first warm up on."""


@dataclass(frozen=True)
class Contender:
    """What is timed: a method's name, its draft model (None: plain decoding) and its k, with `auto` the most
    that the engine may choose."""

    method: str
    draft: Draft | None
    k: int
    auto: bool = False


def contenders(
    drafts: Mapping[str, Draft], ks: Mapping[str, Sequence[int]], auto: Sequence[str] = ()
) -> list[Contender]:
    """The k = 0 baseline first, then every draft model with each of its ks, then those of `auto` with
    k = "auto"."""
    pairs = [Contender(name, draft, k) for name, draft in drafts.items() for k in ks[name]]
    chosen = [Contender(name + AUTO, drafts[name], drafts[name].draft_length, True) for name in auto]
    return [Contender(BASELINE, None, 0), *pairs, *chosen]


def take(requests: Sequence[Request], start: int, count: int) -> list[Request]:
    """`count` requests from position `start` on, beginning again at the end; ids stay unique."""
    if not requests:
        raise UserError("no prompts to measure with: give evaluation prompts")
    picked = [requests[(start + i) % len(requests)] for i in range(count)]
    return [Request(**{**asdict(r), "id": f"{r.id}#{start + i}"}) for i, r in enumerate(picked)]


@dataclass
class Round:
    """One timed round: the finished requests, wall seconds, and what the engine counted meanwhile."""

    results: list[Result]
    seconds: float
    stats: EngineStats


def timed_round(engine: Engine, requests: Sequence[Request], fillers: Sequence[Request]) -> Round:
    """Decode `requests`; `fillers`, further prompts, keep every slot busy until the last of them is done.

    Tokens and seconds cover everything decoded up to that moment, so no draining batch is timed.
    """
    engine.stats = EngineStats()
    wanted = {r.id for r in requests}
    results: list[Result] = []
    start = time.perf_counter()
    for result in engine.run(chain(requests, fillers)):
        if result.id in wanted:
            results.append(result)
            if len(results) == len(wanted):
                break
    return Round(results, time.perf_counter() - start, engine.stats)


def measure(
    base: Base,
    drafts: Mapping[str, Draft],
    requests: Sequence[Request],
    out_dir: str | Path,
    *,
    batch_sizes: Sequence[int],
    ks: Mapping[str, Sequence[int]],
    rounds: int,
    round_requests: int,
    auto: Sequence[str] = (),
    max_length: int,
    prefill_chunk: int,
    attention: str = "auto",
    compile: bool | str = False,
    target: Target | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Time every contender at every batch size; returns the throughput and the step records.

    ks: of each draft; requests: the prompts, cycled through; a round decodes `round_requests` of them, or as
    many as the batch size where that is more, the same for every contender. Before each batch size all
    contenders warm up; within a round they alternate, and every second round runs in the opposite order.
    auto: names of `drafts` that decode with k = "auto" too. Rounds already recorded in `out_dir` are kept.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    machine = hardware.describe(base.dtype, base.device)
    field = contenders(drafts, ks, auto)
    room = max_length + max(c.k for c in field) + 1
    target = target or Target(base, room)
    most = max(batch_sizes)
    costs = {c.method: step_costs(target, c.draft, most, attention) for c in field if c.draft and c.auto}
    todo = [(b, r) for b in batch_sizes for r in range(rounds)]
    total = sum(max(b, round_requests) for b, _ in todo) * len(field)
    print(
        f"benchmark: {len(field)} contenders, batch sizes {list(batch_sizes)}, {rounds} rounds, "
        f"{total} answers to decode on {hardware.caption(machine)}",
        flush=True,
    )
    with Progress("benchmark", total, "answers") as bar:
        for batch_size in batch_sizes:
            engines: list[Engine] = []
            for r in range(rounds):
                count = max(batch_size, round_requests)
                stem = out_dir / f"batch{batch_size}-round{r}"
                if _recorded(stem):
                    bar.advance(count * len(field))
                    continue
                if not engines:
                    # they take turns, so one store serves all: at a large batch it is most of the memory
                    store = target.new_store(batch_size, room, attention=attention)
                    engines = [
                        Engine(
                            base,
                            c.draft,
                            k="auto" if c.auto else c.k,
                            costs=costs.get(c.method),
                            batch_size=batch_size,
                            max_length=max_length,
                            prefill_chunk=prefill_chunk,
                            attention=attention,
                            compile=compile and not c.auto,
                            target=target,
                            store=store,
                        )
                        for c in field
                    ]
                    for engine in engines:
                        # all that follows is known, so what is worth compiling is compiled here, untimed
                        longest = max(request.max_new_tokens for request in requests)
                        engine.expect(rounds * (count + batch_size) * longest)
                        # the first one's long prompts make the store grow, for all of them
                        _warm_up(engine, requests, max_length if engine is engines[0] else WARM_UP_PROMPT)
                chosen = take(requests, r * count, count)
                fillers = take(requests, (r + 1) * count, batch_size)
                order = range(len(field)) if r % 2 == 0 else reversed(range(len(field)))
                throughput, steps = [], []
                for i in order:
                    measured = timed_round(engines[i], chosen, fillers)
                    key = {"method": field[i].method, "batch_size": batch_size, "k": field[i].k, "round": r}
                    throughput.append(key | _throughput(measured) | machine)
                    steps.extend(key | s for s in step_records(measured.results))
                    bar.advance(count, f"batch {batch_size} round {r + 1}/{rounds}")
                _record(stem, throughput, steps)
    stems = [out_dir / f"batch{b}-round{r}" for b, r in todo]
    return _read(stems, "throughput"), _read(stems, "steps")


def _warm_up(engine: Engine, requests: Sequence[Request], longest: int) -> None:
    short = [
        Request(**{**asdict(r), "prompt_ids": r.prompt_ids[:longest], "max_new_tokens": 8})
        for r in take(requests, 0, engine.batch_size)
    ]
    for _ in engine.run(short):
        pass


def _throughput(measured: Round) -> dict[str, Any]:
    stats = measured.stats
    return {
        "requests": stats.requests,
        "tokens": stats.tokens,
        "seconds": measured.seconds,
        "prefill_seconds": stats.prefill,
        "draft_seconds": stats.draft,
        "verify_seconds": stats.verify,
        "rest_seconds": measured.seconds - stats.prefill - stats.draft - stats.verify,
        "prompt_tokens_mean": stats.prompt_tokens / max(stats.requests, 1),
    }


def step_records(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Flat records of every verify step: set, request, step, drafted, accepted, committed, truncated."""
    for result in results:
        name = result.id.split("#")[0]
        for i, step in enumerate(result.steps):
            yield {"set": name.split("/")[0], "request": name, "step": i, **asdict(step)}


def _recorded(stem: Path) -> bool:
    return all(stem.with_name(f"{stem.name}.{kind}.parquet").exists() for kind in ("throughput", "steps"))


def _record(stem: Path, throughput: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    for kind, rows in (("throughput", throughput), ("steps", steps)):
        path = stem.with_name(f"{stem.name}.{kind}.parquet")
        pd.DataFrame(rows).to_parquet(path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)


def _read(stems: Sequence[Path], kind: str) -> pd.DataFrame:
    parts = [pd.read_parquet(stem.with_name(f"{stem.name}.{kind}.parquet")) for stem in stems]
    return pd.concat(parts, ignore_index=True)


@torch.no_grad()
def forward_costs(
    target: Target,
    token_ids: Sequence[int],
    *,
    batch_sizes: Sequence[int],
    tokens_per_request: Sequence[int],
    context: int,
    rounds: int,
    quiet: bool = False,
) -> pd.DataFrame:
    """Time one bare verification of n tokens per request at each batch size (the paper's Figure 1).

    token_ids: real text, cycled to fill the rows; context: tokens already cached in each row. A round visits
    every n once, so that slow moments of a shared machine do not fall on one n. Returns a row per batch size,
    n and round: batch_size, tokens_per_request, round, tokens (verified, whole batch), seconds.
    """
    records = []
    longest = max(tokens_per_request)
    total = len(batch_sizes) * len(tokens_per_request) * (rounds + 1)
    with nullcontext() if quiet else Progress("forward costs", total, "timings") as bar:
        for batch_size in batch_sizes:
            store = target.new_store(batch_size, context + longest)
            store.ensure(context + longest)
            count = batch_size * longest
            stream = (list(token_ids) * (count // len(token_ids) + 1))[:count]
            ids = torch.tensor(stream, device=target.device).view(batch_size, longest)
            start = torch.full((batch_size,), context, device=target.device)
            for r in range(-1, rounds):  # round -1 warms up
                for n in tokens_per_request:
                    clock = time.perf_counter()
                    window = Window.at(slice(0, batch_size), start, n, context + n, target.dtype, fresh=False)
                    hidden, _ = target.forward(ids[:, :n], window, store)
                    greedy(target.logits(hidden)).cpu()
                    seconds = time.perf_counter() - clock
                    if bar is not None:
                        bar.advance(1, f"batch {batch_size}")
                    if r >= 0:
                        records.append(
                            {
                                "batch_size": batch_size,
                                "tokens_per_request": n,
                                "round": r,
                                "tokens": batch_size * n,
                                "seconds": seconds,
                            }
                        )
    return pd.DataFrame(records)


def evaluation_requests(
    rows: Sequence[Mapping[str, Any]], encode: Any, max_new_tokens: int, per_set: int | None = None
) -> list[Request]:
    """Requests from evaluation prompts, the sets interleaved so that every batch mixes them.

    rows: id, set, messages; encode(messages) -> prompt ids; ids become "set/id".
    """
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_set.setdefault(row["set"], []).append(row)
    columns = [list(islice(part, per_set)) for part in by_set.values()]
    longest = max((len(c) for c in columns), default=0)
    mixed = [c[i] for i in range(longest) for c in columns if i < len(c)]
    return [
        Request(f"{row['set']}/{row['id']}", encode(list(row["messages"])), max_new_tokens) for row in mixed
    ]
