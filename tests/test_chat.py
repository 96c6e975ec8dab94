from __future__ import annotations

import pytest
from helpers import CHATML, make_tokenizer

from specformer.chat import encode_answer, encode_prompt
from specformer.errors import UserError

ASK = [{"role": "user", "content": "What is the capital of France?"}]
TALK = [
    {"role": "system", "content": "You are short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>\ngreet back\n</think>\n\nHi."},
    {"role": "user", "content": "What is the capital of France?"},
]


def test_prompt_ends_with_the_opening_of_the_answer(tiny_tokenizer):
    text = tiny_tokenizer.decode(encode_prompt(tiny_tokenizer, ASK))
    assert text == ("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("messages", [ASK, TALK])
@pytest.mark.parametrize("answer", ["Paris.", "\n\n  indented\n", "It is <b>Paris</b> \u00e9\u4e2d."])
def test_prompt_and_answer_make_the_dialogue(tiny_tokenizer, messages, answer):
    prompt = encode_prompt(tiny_tokenizer, messages)
    ids = encode_answer(tiny_tokenizer, messages, answer)
    dialogue = [*messages, {"role": "assistant", "content": answer}]
    whole = tiny_tokenizer.apply_chat_template(dialogue, tokenize=False)
    assert tiny_tokenizer.decode(prompt + ids) + "\n" == whole
    # Padding is the end-of-turn token here, and the true one is still there, once, at the end.
    assert tiny_tokenizer.pad_token_id == tiny_tokenizer.eos_token_id
    assert ids.count(tiny_tokenizer.eos_token_id) == 1
    assert ids[-1] == tiny_tokenizer.eos_token_id


def test_empty_thinking_block_belongs_to_the_prompt_when_thinking_is_off(thinking_tokenizer):
    prompt = thinking_tokenizer.decode(encode_prompt(thinking_tokenizer, TALK, thinking=False))
    answer = thinking_tokenizer.decode(encode_answer(thinking_tokenizer, TALK, "Paris.", False))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "greet back" not in prompt
    assert answer == "Paris.<|im_end|>"


def test_thinking_block_belongs_to_the_answer_when_thinking_is_on(thinking_tokenizer):
    prompt = thinking_tokenizer.decode(encode_prompt(thinking_tokenizer, TALK, thinking=True))
    assert prompt.endswith("<|im_start|>assistant\n")
    plain = encode_answer(thinking_tokenizer, TALK, "Paris.", thinking=True)
    assert thinking_tokenizer.decode(plain) == "<think>\n\n</think>\n\nParis.<|im_end|>"
    thought = encode_answer(thinking_tokenizer, TALK, "<think>\nEasy.\n</think>\n\nParis.", True)
    assert thinking_tokenizer.decode(thought) == "<think>\nEasy.\n</think>\n\nParis.<|im_end|>"


def test_template_that_strips_thinking_from_every_turn():
    strips = CHATML.replace(
        "+ message['content'] +",
        "+ (message['content'].split('</think>')[-1] if message['role'] == 'assistant' "
        "else message['content']) +",
    ).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    tokenizer = make_tokenizer(strips)
    prompt = str(tokenizer.decode(encode_prompt(tokenizer, ASK)))
    answer = tokenizer.decode(encode_answer(tokenizer, ASK, "<think>x</think>Paris."))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert answer == "Paris.<|im_end|>"


def test_template_without_end_of_turn_gets_end_of_sequence():
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
    )
    ids = encode_answer(tokenizer, ASK, "Paris.")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "Paris."


def test_packaged_model(smollm2):
    tokenizer = smollm2.tokenizer
    prompt = encode_prompt(tokenizer, ASK)
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    ids = encode_answer(tokenizer, ASK, "Paris.")
    assert tokenizer.decode(ids) == "Paris.<|im_end|>"
    assert ids[-1] in smollm2.stop_token_ids


def test_bad_prompts(tiny_tokenizer):
    for empty in ([], [{"role": "user", "content": " \n"}]):
        with pytest.raises(UserError, match="empty prompt"):
            encode_prompt(tiny_tokenizer, empty)
    with pytest.raises(UserError, match="from 'assistant'"):
        encode_prompt(tiny_tokenizer, [*ASK, {"role": "assistant", "content": "Paris."}])
    length = len(encode_prompt(tiny_tokenizer, ASK))
    assert encode_prompt(tiny_tokenizer, ASK, max_tokens=length)
    with pytest.raises(UserError, match=f"{length} tokens is longer than the {length - 1}"):
        encode_prompt(tiny_tokenizer, ASK, max_tokens=length - 1)


def test_templates_that_cannot_serve():
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(make_tokenizer(""), ASK)
    with pytest.raises(UserError, match="hides the assistant's answer"):
        encode_answer(make_tokenizer("{{ messages[0]['content'] }}"), ASK, "Paris.")
