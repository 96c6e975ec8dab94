"""What a person sees of the engine: requests from text and JSONL, colours, transformers' generate."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import prompts

from specformer import generation
from specformer.engine import Request, Result, Step
from specformer.errors import UserError
from specformer.hf import CustomGenerate
from specformer.lossless import generate_alone

DEFAULTS = Request("1", [], 16)


def test_jsonl_faults_name_their_line_and_spare_the_others(tiny_llama):
    lines = [
        '{"prompt": "What is the capital of France?", "id": "a", "temperature": 0.5, "stop": ["x"]}',
        "{nonsense",
        '{"prompt": "   "}',
        '{"prompt": "Hello", "temprature": 1}',
        '{"prompt": "Hello", "temperature": "hot"}',
        '{"prompt": "Hello", "top_p": 0}',
        "",
        '{"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 3}',
    ]
    out = list(generation.read_jsonl(tiny_llama, lines, DEFAULTS, 256))
    good = [o for o in out if isinstance(o, Request)]
    assert [r.id for r in good] == ["a", "8"]
    assert good[0].temperature == 0.5 and good[0].stop == ("x",) and good[1].max_new_tokens == 3
    faults = [o for o in out if isinstance(o, str)]
    for number, part in zip(
        (2, 3, 4, 5, 6), ("not JSON", "empty", "temprature", "hot", "top_p"), strict=True
    ):
        (fault,) = [f for f in faults if f.startswith(f"line {number}")]
        assert part in fault


def test_coloured_text_and_html_hold_the_whole_answer(tiny_tokenizer):
    """Characters of several tokens (the emoji) are shown whole, whichever token they began in."""
    text = "The quick <brown> fox \U0001f98a jumps."
    ids = tiny_tokenizer.encode(text)
    full, rest = divmod(len(ids) - 1, 3)
    steps = [Step(4, 2, 3, 0)] * full + [Step(4, rest, rest, 1)] * (rest > 0)
    result = Result("1", [5], ids, text, "length", steps)
    spans = generation.spans(result)
    assert [t for part, _ in spans for t in part] == ids
    assert sum(len(part) for part, drafted in spans if drafted) == 2 * full + rest
    shown = generation.coloured(result, tiny_tokenizer)
    assert shown.plain == text and any("green" in str(span.style) for span in shown.spans)
    page = generation.as_html(result, tiny_tokenizer)
    assert "<span" in page and "<brown>" not in page
    record = json.loads(json.dumps(generation.as_record(result)))
    assert record["accepted"] == 2 * full + rest and record["ids"] == ids


@pytest.mark.parametrize("side", ["left", "right"])
def test_custom_generate_equals_generate(tiny_llama, tiny_draft_folder, side):
    """Batched, padded on either side, with the config's own end tokens and padding."""
    rows = prompts(tiny_llama, 6)
    longest = max(map(len, rows))
    pad = tiny_llama.stop_token_ids[0]
    gap = [[pad] * (longest - len(r)) for r in rows]
    ids = torch.tensor([g + r if side == "left" else r + g for r, g in zip(rows, gap, strict=True)])
    zeros = [[0] * len(g) for g in gap]
    ones = [[1] * len(r) for r in rows]
    mask = torch.tensor([z + o if side == "left" else o + z for o, z in zip(ones, zeros, strict=True)])
    decode = CustomGenerate(tiny_draft_folder, k=4)
    out = tiny_llama.model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, custom_generate=decode
    )
    assert torch.equal(out[:, :longest], ids)
    for row, got in zip(rows, out[:, longest:].tolist(), strict=True):
        wanted = generate_alone(tiny_llama, Request("", row, 20))
        assert got[: len(wanted)] == wanted and set(got[len(wanted) :]) <= {pad, *tiny_llama.stop_token_ids}


def test_custom_generate_samples_by_seed_and_refuses_by_name(tiny_llama, tiny_draft_folder):
    ids = torch.tensor([prompts(tiny_llama, 3)[2]])
    call = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 0}
    one = tiny_llama.model.generate(ids, **call, custom_generate=CustomGenerate(tiny_draft_folder, seed=3))
    two = tiny_llama.model.generate(ids, **call, custom_generate=CustomGenerate(None, seed=3))
    assert torch.equal(one, two)  # the same draws with and without drafting
    with pytest.raises(UserError, match="RepetitionPenalty"):
        tiny_llama.model.generate(
            ids, max_new_tokens=4, repetition_penalty=1.3, custom_generate=CustomGenerate(tiny_draft_folder)
        )
    with pytest.raises(UserError, match="return_dict_in_generate"):
        tiny_llama.model.generate(
            ids,
            max_new_tokens=4,
            return_dict_in_generate=True,
            custom_generate=CustomGenerate(tiny_draft_folder),
        )
