"""Dialogues to token ids, with the model's own chat template deciding where an answer begins.

An answer is a separate list of ids, so there is no mask to derive from token values: padding may
be the end-of-turn token, and the true end of turn is still part of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from specformer.errors import UserError

Messages = Sequence[Mapping[str, str]]

# Stands in for an answer to see what the template puts around one. Plain letters only, since
# templates strip blanks and newlines and cut thinking blocks.
MARK = "ANSWERMARK"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    thinking: bool = False,
    *,
    max_tokens: int | None = None,
) -> list[int]:
    """The ids of a prompt, up to and with the template's opening of the assistant's turn.

    messages: {"role", "content"} each, the last one from the user. thinking is handed to the
    template as `enable_thinking`. Raises UserError for an empty prompt, one whose last message
    isn't the user's, a tokenizer without chat template, and more than `max_tokens` tokens.
    """
    if not messages or not messages[-1]["content"].strip():
        raise UserError("empty prompt: the last message has no text")
    if messages[-1]["role"] != "user":
        raise UserError(f"the last message is from {messages[-1]['role']!r}, not from the user")
    ids = _tokenize(tokenizer, _render(tokenizer, messages, thinking, opening=True))
    if max_tokens is not None and len(ids) > max_tokens:
        raise UserError(
            f"a prompt of {len(ids)} tokens is longer than the {max_tokens} that are left for it "
            f"in the context; it begins {messages[-1]['content'][:60]!r}"
        )
    return ids


def encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    answer: str,
    thinking: bool = False,
) -> list[int]:
    """The ids of `answer` as they follow `encode_prompt(...)`, with the end-of-turn token last.

    What the template adds to the assistant's turn (an empty thinking block, say) is part of the
    answer only where the prompt does not hold it already; what it strips is left out; the newline
    after the end of turn is not part of it. Raises UserError as `encode_prompt` does, and when the
    template does not show an answer as it is.
    """
    prompt = _render(tokenizer, messages, thinking, opening=True)
    marked = _render(tokenizer, _answered(messages, MARK), thinking)
    before, mark, after = marked.rpartition(MARK)
    full = _render(tokenizer, _answered(messages, answer), thinking)
    start = len(prompt) if full.startswith(prompt) else len(before)
    if not mark or not full.endswith(after) or len(full) - len(after) < start:
        raise UserError("the chat template hides the assistant's answer; training needs to see it")
    body = full[start : len(full) - len(after)]

    prompt_ids = _tokenize(tokenizer, prompt)
    joined = _tokenize(tokenizer, prompt + body)
    # Decoding continues from exactly the prompt's ids, so a merge across the border won't do.
    unmerged = joined[: len(prompt_ids)] == prompt_ids
    ids = joined[len(prompt_ids) :] if unmerged else _tokenize(tokenizer, body)
    return [*ids, _end_of_turn(tokenizer, after)]


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the tokens that steer a dialogue instead of being text."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _answered(messages: Messages, answer: str) -> list[Mapping[str, str]]:
    return [*messages, {"role": "assistant", "content": answer}]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, after: str) -> int:
    special = special_token_ids(tokenizer)
    for token in _tokenize(tokenizer, after):
        if token in special:
            return token
    # Some templates leave the end to the model, which then says end of sequence.
    if isinstance(tokenizer.eos_token_id, int):
        return tokenizer.eos_token_id
    raise UserError("neither the chat template nor the tokenizer says how an answer ends")


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, thinking: bool, opening: bool = False
) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: "
            "use an instruction-tuned model"
        )
    rendered = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=opening,
        enable_thinking=thinking,
    )
    return str(rendered)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template has written the special tokens already.
    return list(tokenizer(text, add_special_tokens=False).input_ids)
