"""What a person does with the engine: prompts in as text or JSONL, answers out, drafted tokens in colour."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specformer.base import Base
from specformer.chat import encode_prompt
from specformer.engine import Request, Result
from specformer.errors import UserError
from specformer.metrics import tokens_per_step

# Settings a JSONL line may carry for itself.
OPTIONS = {f.name for f in fields(Request)} - {"id", "prompt_ids"}


def make_request(base: Base, entry: Mapping[str, Any], defaults: Request, *, chat: bool = True) -> Request:
    """A request from {"prompt": text} or {"messages": [...]}, with the chat template unless `chat` is off.

    Keys named like `Request`'s fields (temperature, stop, ...) override `defaults`. Raises UserError for an
    empty prompt, a missing or unknown key, or a value of the wrong type.
    """
    unknown = sorted(set(entry) - OPTIONS - {"id", "prompt", "messages"})
    if unknown:
        raise UserError(
            f"unknown key {unknown[0]!r}; known: prompt, messages, id, {', '.join(sorted(OPTIONS))}"
        )
    if ("prompt" in entry) == ("messages" in entry):
        raise UserError('give either "prompt" (a text) or "messages" (a list of role and content)')
    messages = entry.get("messages") or [{"role": "user", "content": entry.get("prompt", "")}]
    text = messages[-1].get("content") if isinstance(messages, list) else None
    if not isinstance(text, str) or not text.strip():
        raise UserError("the prompt is empty: give some text")
    ids = encode_prompt(base.tokenizer, messages) if chat else base.tokenizer.encode(text)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k in OPTIONS}
    for key, value in given.items():
        wanted = type(getattr(defaults, key))
        if not isinstance(value, (int, float) if wanted is float else wanted) or isinstance(value, bool):
            raise UserError(f"{key} is {value!r}: give a {wanted.__name__}")
    return replace(defaults, id=str(entry.get("id", defaults.id)), prompt_ids=list(ids), **given)


def read_jsonl(
    base: Base, lines: Iterable[str], defaults: Request, max_length: int, *, chat: bool = True
) -> Iterator[Request | str]:
    """A request for each line, or the text of what is wrong with it, its line number in front."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise UserError(f"expected an object, got {type(entry).__name__}")
            request = make_request(base, entry, replace(defaults, id=str(number)), chat=chat)
            request.check(max_length)
        except json.JSONDecodeError as error:
            yield f"line {number} is not JSON: {error}"
        except UserError as error:
            yield f"line {number}: {error}"
        else:
            yield request


def as_record(result: Result) -> dict[str, Any]:
    """A result as a JSON line: id, text, ids, finish_reason, and how drafting went."""
    record = {"id": result.id, "text": result.text, "ids": result.ids, "finish_reason": result.finish_reason}
    if result.steps:
        record |= {
            "steps": len(result.steps),
            "drafted": sum(s.drafted for s in result.steps),
            "accepted": sum(s.accepted for s in result.steps),
            "tokens_per_step": round(tokens_per_step(result.steps), 4),
        }
    return record


def spans(result: Result) -> list[tuple[list[int], bool]]:
    """The answer's ids in order, cut where the source changes: (ids, drafted?)."""
    out, at = [(result.ids[:1], False)], 1
    for step in result.steps:
        out.append((result.ids[at : at + step.accepted], True))
        out.append((result.ids[at + step.accepted : at + step.committed], False))
        at += step.committed
    return [(ids, drafted) for ids, drafted in out if ids]


def _pieces(result: Result, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Text of each span; decoded as growing prefixes, so that characters of several tokens stay whole."""
    ids, text = [], ""
    for part, drafted in spans(result):
        ids = ids + part
        longer = str(tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")
        yield longer[len(text) :], drafted
        text = max(text, longer, key=len)


def coloured(result: Result, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The answer for a terminal: accepted draft tokens green and underlined, the base's own plain."""
    text = Text()
    for piece, drafted in _pieces(result, tokenizer):
        text.append(piece, style="green underline" if drafted else "")
    return text


def as_html(result: Result, tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for a notebook."""
    pieces = (
        f'<span style="background:#c8e6c9;border-bottom:2px solid #2e7d32">{html.escape(piece)}</span>'
        if drafted
        else html.escape(piece)
        for piece, drafted in _pieces(result, tokenizer)
    )
    return f'<div style="white-space:pre-wrap;font-family:monospace">{"".join(pieces)}</div>'
