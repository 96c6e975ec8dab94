"""Self-distillation: the base LLM's own greedy answers, which a draft model is trained on.

The contrast, the same prompts with the reference answers, has rows of the same shape.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from specformer.base import Base, base_fingerprint
from specformer.chat import encode_answer, encode_prompt
from specformer.engine import Engine, Request, Result
from specformer.errors import UserError
from specformer.progress import Progress
from specformer.serving import Served, Servers
from specformer.shards import ShardWriter, is_dropped, iter_shards, read_rows

ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
    ]
)

Dialogues = Collection[Mapping[str, Any]]
"""Gone through more than once, one at a time: a list, or a `datasets.Dataset`, which reads as it goes."""


class Decoder(Protocol):
    """What is needed of an engine."""

    def run(self, requests: list[Request]) -> Iterator[Result]: ...


def distill(
    base: Base,
    dialogues: Dialogues,
    out_dir: str | Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    max_length: int,
    prefill_chunk: int,
    attention: str = "auto",
    compile: bool | str = False,
    shard_rows: int,
    thinking: bool = False,
    servers: Sequence[str] = (),
    model: str | None = None,
    concurrency: int = 64,
    timeout_s: float = 600.0,
    make_engine: Callable[[], Decoder] | None = None,
) -> dict[str, Any]:
    """Answer every dialogue's prompt greedily with the base LLM and store the rows in shards.

    dialogues: rows of `corpora.read_dialogues`. out_dir: shards of ROWS: prompt_ids, answer_ids
    (at most `max_new_tokens`, the end-of-turn token last if the model stopped by itself), the
    answer's text, finish_reason "stop" or "length". Rows that are stored already are kept, so a
    killed run goes on where it was; other dialogues, base or settings start afresh.
    batch_size, max_length (tokens a row), prefill_chunk, attention, compile: of the decoding engine, without
    a draft.
    servers: base URLs of completions servers that answer instead; model, concurrency, timeout_s: see
    `serving.Servers`. Prompts are then read as the servers take them, and one that no server can answer is
    stored without an answer, with the reason as its finish_reason.
    make_engine: builds another engine instead.

    Returns counts: rows, tokens, prompt_tokens and finish_reasons of all answered rows; dropped, by reason;
    new_rows, seconds and tokens_per_second of this run. Raises UserError for an empty prompt, one that
    leaves no room for `max_new_tokens`, an id that comes twice, a full disk, and what `Servers` raises for.
    """

    def prompts() -> Iterator[tuple[str, list[int]]]:
        room = max_length - max_new_tokens
        for row in dialogues:
            yield row["id"], encode_prompt(base.tokenizer, row["messages"], thinking, max_tokens=room)

    def requests() -> Iterator[Request]:
        for name, ids in prompts():
            if name not in writer.done:
                yield Request(id=name, prompt_ids=ids, max_new_tokens=max_new_tokens)

    def answers() -> Generator[Result | Served, None, None]:
        if servers:
            client = Servers(base, servers, model=model, concurrency=concurrency, timeout=timeout_s)
            yield from client.run(requests())
            return
        engine = (
            make_engine()
            if make_engine
            else Engine(
                base,
                batch_size=batch_size,
                max_length=max_length,
                prefill_chunk=prefill_chunk,
                attention=attention,
                compile=compile,
            )
        )
        yield from engine.run(list(requests()))

    digest, total = _digest(prompts())
    settings = {
        "rows": "answers of the base LLM",
        "base": base.name,
        "base_fingerprint": base_fingerprint(base.model),
        "dtype": f"as {model or base.name} is served" if servers else str(base.dtype),
        "max_new_tokens": max_new_tokens,
        "prompts": digest,
    }
    writer = ShardWriter(out_dir, ROWS, rows_per_shard=shard_rows, settings=settings)
    count = total - len(writer.done)
    print(
        f"distill: {count} prompts to answer ({len(writer.done)} are stored already), at "
        f"most {count * max_new_tokens:,} tokens with {max_new_tokens} a prompt"
    )
    tokens, started = 0, time.perf_counter()
    if count:
        with writer, Progress("distill", count, "answers") as progress, closing(answers()) as results:
            for result in results:
                writer.add(
                    {
                        "id": result.id,
                        "prompt_ids": result.prompt_ids,
                        "answer_ids": result.ids,
                        "answer": result.text,
                        "finish_reason": result.finish_reason,
                    }
                )
                tokens += len(result.ids)
                rate = tokens / (time.perf_counter() - started)
                progress.advance(1, f"({tokens:,} tokens, {rate:.0f} tokens/s)")
    seconds = time.perf_counter() - started
    summary = _summary(iter_shards(out_dir))
    dropped = summary["dropped"]
    if (stored := summary["rows"] + sum(dropped.values())) != total:
        raise UserError(f"{out_dir} holds {stored} rows for {total} prompts: delete it and run it again")
    if dropped:
        print(f"distill: prompts dropped, by reason: {dropped} (see serving.Served)")
    if not summary["rows"]:
        raise UserError(
            f"all prompts were dropped ({dropped}): serve a longer context or token ids, and delete {out_dir}"
        )
    return summary | {
        "new_rows": count,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds, 1) if count else None,
    }


def reference_rows(
    tokenizer: PreTrainedTokenizerBase,
    dialogues: Dialogues,
    out_dir: str | Path,
    *,
    max_new_tokens: int,
    shard_rows: int,
    thinking: bool = False,
) -> dict[str, Any]:
    """Store the no-self-distill rows: the same prompts with the reference answers.

    The answers go through the same chat template and are cut to the same `max_new_tokens`
    (finish_reason "length"). Returns the counts rows, tokens, prompt_tokens, finish_reasons.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in dialogues:
        messages = row["messages"]
        whole = encode_answer(tokenizer, messages, row["answer"], thinking)
        ids = whole[:max_new_tokens]
        rows[row["id"]] = {
            "id": row["id"],
            "prompt_ids": encode_prompt(tokenizer, messages, thinking),
            "answer_ids": ids,
            "answer": tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": "stop" if len(ids) == len(whole) else "length",
        }
    settings = {
        "rows": "reference answers",
        "max_new_tokens": max_new_tokens,
        "prompts": _digest((name, row["prompt_ids"]) for name, row in rows.items())[0],
        "answers": _digest((name, row["answer_ids"]) for name, row in rows.items())[0],
    }
    with ShardWriter(out_dir, ROWS, rows_per_shard=shard_rows, settings=settings) as writer:
        for name, row in rows.items():
            if name not in writer.done:
                writer.add(row)
    return _summary(read_rows(out_dir, list(dialogues)))


def _summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": 0, "tokens": 0, "prompt_tokens": 0}
    reasons, dropped = Counter(), Counter()
    for row in rows:
        (dropped if is_dropped(row) else reasons)[row["finish_reason"]] += 1
        if not is_dropped(row):
            found["rows"] += 1
            found["tokens"] += len(row["answer_ids"])
            found["prompt_tokens"] += len(row["prompt_ids"])
    return found | {"finish_reasons": dict(sorted(reasons.items())), "dropped": dict(sorted(dropped.items()))}


def _digest(rows: Iterable[tuple[str, list[int]]]) -> tuple[str, int]:
    """16 hex digits of the names and token ids (of the JSON object that they make), and the count of rows.

    Raises UserError for a name that comes twice.
    """
    digest, seen = hashlib.sha256(b"{"), set()
    for name, ids in rows:
        if name in seen:
            raise UserError(f"the id {name!r} comes twice among the dialogues: give each an id of its own")
        digest.update(f"{', ' if seen else ''}{json.dumps(name)}: {json.dumps(ids)}".encode())
        seen.add(name)
    digest.update(b"}")
    return digest.hexdigest()[:16], len(seen)
