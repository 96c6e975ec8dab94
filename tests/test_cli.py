"""The command line as a person meets it: answers, faults that spare the rest, exit statuses."""

from __future__ import annotations

import json
import sys

import pytest

from specformer import cli


def call(monkeypatch, *arguments) -> int:
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["specformer", *map(str, arguments)])
    monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
        raise SystemExit(0)
    return int(stop.value.code or 0)


def test_generate_answers_one_prompt_and_says_how_drafting_went(
    monkeypatch, capsys, tiny_llama_folder, tiny_draft_folder
):
    arguments = ("--base", tiny_llama_folder, "--draft", tiny_draft_folder, "--max-new-tokens", 8)
    assert call(monkeypatch, "generate", "--prompt", "Hello", *arguments) == 0
    assert "tokens per step" in capsys.readouterr().err


def test_generate_answers_the_lines_that_it_can(
    monkeypatch, capsys, tmp_path, tiny_llama_folder, tiny_draft_folder
):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Hello", "id": "a"}\n{broken\n{"prompt": "What is a river?", "id": "c"}\n')
    status = call(
        monkeypatch,
        *("generate", "--input", source, "--output", sink, "--base", tiny_llama_folder),
        *("--draft", tiny_draft_folder, "--max-new-tokens", 6, "--k", 2),
    )
    assert status == 1 and "line 2 is not JSON" in capsys.readouterr().err
    records = [json.loads(line) for line in sink.read_text().splitlines()]
    assert {r["id"] for r in records} == {"a", "c"}
    assert all(len(r["ids"]) <= 6 and r["finish_reason"] in ("stop", "length") for r in records)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--prompt", "Hello", "--k", 9), "0..4"),
        (("--prompt", "Hello", "--k", "all"), "--k is all"),
        (("--prompt", "  "), "empty"),
        (("--prompt", "Hello", "--temperature", -1), "temperature"),
        (("--prompt", "Hello", "--stop", ""), "stop string is empty"),
        (("--prompt", "Hello", "--draft", "nowhere"), "nowhere"),
        (("--input", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--prompt", "Hello", "--profile", "cqu"), "unknown profile 'cqu'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    monkeypatch, capsys, tiny_llama_folder, tiny_draft_folder, arguments, part
):
    given = ("--base", tiny_llama_folder, "--draft", tiny_draft_folder, *arguments)
    assert call(monkeypatch, "generate", *given) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and part in lines[0]


def test_a_draft_for_another_base_is_refused(monkeypatch, capsys, tiny_qwen3_folder, tiny_draft_folder):
    given = ("--prompt", "Hello", "--base", tiny_qwen3_folder, "--draft", tiny_draft_folder)
    assert call(monkeypatch, "generate", *given) == 2
    assert "made for" in capsys.readouterr().err
