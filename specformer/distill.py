"""Self-distillation: the base LLM's own greedy answers, which a draft model is trained on.

The contrast, the same prompts with the reference answers, has rows of the same shape.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from specformer.base import Base, base_fingerprint
from specformer.chat import encode_answer, encode_prompt
from specformer.engine import Engine, Request, Result
from specformer.progress import Progress
from specformer.shards import ShardWriter, read_rows

ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
    ]
)

Dialogues = Sequence[Mapping[str, Any]]


class Decoder(Protocol):
    """What is needed of an engine."""

    def run(self, requests: Iterable[Request]) -> Iterator[Result]: ...


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
    make_engine: Callable[[], Decoder] | None = None,
) -> dict[str, Any]:
    """Answer every dialogue's prompt greedily with the base LLM and store the rows in shards.

    dialogues: rows of `corpora.read_dialogues`. out_dir: shards of ROWS: prompt_ids, answer_ids
    (at most `max_new_tokens`, the end-of-turn token last if the model stopped by itself), the
    answer's text, finish_reason "stop" or "length". Rows that are stored already are kept, so a
    killed run goes on where it was; other dialogues, base or settings start afresh.
    batch_size, max_length (tokens a row), prefill_chunk, attention, compile: of the decoding engine, without
    a draft.
    make_engine: builds another engine instead.

    Returns counts: rows, tokens, prompt_tokens and finish_reasons of all rows; new_rows,
    seconds and tokens_per_second of this run. Raises UserError for an empty prompt, one that
    leaves no room for `max_new_tokens`, and a full disk.
    """
    tokenizer = base.tokenizer
    room = max_length - max_new_tokens
    prompts = {
        row["id"]: encode_prompt(tokenizer, row["messages"], thinking, max_tokens=room) for row in dialogues
    }
    settings = {
        "rows": "answers of the base LLM",
        "base": base.name,
        "base_fingerprint": base_fingerprint(base.model),
        "dtype": str(base.dtype),
        "max_new_tokens": max_new_tokens,
        "prompts": _digest(prompts),
    }
    writer = ShardWriter(out_dir, ROWS, rows_per_shard=shard_rows, settings=settings)
    requests = [
        Request(id=name, prompt_ids=ids, max_new_tokens=max_new_tokens)
        for name, ids in prompts.items()
        if name not in writer.done
    ]
    print(
        f"distill: {len(requests)} prompts to answer ({len(writer.done)} are stored already), at "
        f"most {len(requests) * max_new_tokens:,} tokens with {max_new_tokens} a prompt"
    )
    tokens, started = 0, time.perf_counter()
    if requests:
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
        with writer, Progress("distill", len(requests), "answers") as progress:
            for result in engine.run(requests):
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
    return _summary(read_rows(out_dir, dialogues)) | {
        "new_rows": len(requests),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds, 1) if requests else None,
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
        "prompts": _digest({name: row["prompt_ids"] for name, row in rows.items()}),
        "answers": _digest({name: row["answer_ids"] for name, row in rows.items()}),
    }
    with ShardWriter(out_dir, ROWS, rows_per_shard=shard_rows, settings=settings) as writer:
        for name, row in rows.items():
            if name not in writer.done:
                writer.add(row)
    return _summary(read_rows(out_dir, dialogues))


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "tokens": sum(len(row["answer_ids"]) for row in rows),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
    }


def _digest(ids: Mapping[str, list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
