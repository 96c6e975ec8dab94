from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from specformer.base import load_base
from specformer.chat import encode_answer, encode_prompt
from specformer.corpora import DIALOGUES
from specformer.distill import distill, read_rows, reference_rows
from specformer.engine import Result
from specformer.errors import UserError
from specformer.shards import read_shards, write_table

LIMITS = {"max_new_tokens": 12, "batch_size": 3, "max_length": 128, "prefill_chunk": 32}


def make_dialogues(count: int) -> list[dict]:
    return [
        {
            "id": f"d{n:03d}",
            "messages": [{"role": "user", "content": "Tell me of the river" + " again" * (n % 5)}],
            "answer": f"The river {n} is long." + " Very long." * (n % 3),
            "source": "test",
            "prompt_tokens": 0,
        }
        for n in range(count)
    ]


class FakeEngine:
    """Answers a prompt by its length, finishes in shuffled order, and may be stopped midway."""

    def __init__(
        self, tokenizer, stop_after: int | None = None, error: type[BaseException] = KeyboardInterrupt
    ):
        self.tokenizer = tokenizer
        self.stop_after = stop_after
        self.error = error
        self.asked: list[str] = []

    def run(self, requests):
        waiting = list(requests)
        self.asked = [request.id for request in waiting]
        random.Random(1).shuffle(waiting)
        for number, request in enumerate(waiting):
            if number == self.stop_after:
                raise self.error
            ids = [65, *request.prompt_ids[-2:], self.tokenizer.eos_token_id]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            yield Result(request.id, request.prompt_ids, ids, text, "stop", [])


def run(base, folder, dialogues, engine=None, **changes):
    make_engine = (lambda: engine) if engine else None
    options = {**LIMITS, "shard_rows": 4, **changes}
    return distill(base, dialogues, folder, make_engine=make_engine, **options)


def test_answers_are_the_base_models_own_greedy_ones(tiny_llama, tmp_path):
    dialogues = make_dialogues(7)
    counts = run(tiny_llama, tmp_path, dialogues)
    rows = read_rows(tmp_path, dialogues)
    assert [row["id"] for row in rows] == [row["id"] for row in dialogues]
    for row, dialogue in zip(rows, dialogues, strict=True):
        prompt = encode_prompt(tiny_llama.tokenizer, dialogue["messages"])
        assert row["prompt_ids"] == prompt
        greedy = tiny_llama.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        ids = greedy[0, len(prompt) :].tolist()
        assert row["answer_ids"] == ids
        stopped = ids[-1] in tiny_llama.stop_token_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert row["answer"] == tiny_llama.tokenizer.decode(ids, skip_special_tokens=True)
    assert counts["rows"] == counts["new_rows"] == 7
    assert counts["tokens"] == sum(len(row["answer_ids"]) for row in rows)
    assert sum(counts["finish_reasons"].values()) == 7
    assert counts["tokens_per_second"] > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_run_goes_on_and_ends_with_the_same_rows(tiny_llama, tmp_path, error):
    dialogues = make_dialogues(20)
    tokenizer = tiny_llama.tokenizer
    run(tiny_llama, tmp_path / "whole", dialogues, FakeEngine(tokenizer))
    with pytest.raises(error):
        run(tiny_llama, tmp_path / "parts", dialogues, FakeEngine(tokenizer, 7, error))
    stored = {row["id"] for row in read_shards(tmp_path / "parts")}
    assert len(stored) == 7
    with pytest.raises(UserError, match="no rows for 13 of 20 dialogues"):
        read_rows(tmp_path / "parts", dialogues)
    second = FakeEngine(tokenizer)
    counts = run(tiny_llama, tmp_path / "parts", dialogues, second)
    assert set(second.asked) == {row["id"] for row in dialogues} - stored
    assert (counts["rows"], counts["new_rows"]) == (20, 13)
    whole, parts = (read_rows(tmp_path / name, dialogues) for name in ("whole", "parts"))
    assert whole == parts
    third = FakeEngine(tokenizer)
    counts = run(tiny_llama, tmp_path / "parts", dialogues, third)
    assert not third.asked
    assert (counts["new_rows"], counts["tokens_per_second"]) == (0, None)


SCRIPT = """
    import sys, time
    from specformer.base import load_base
    from specformer.corpora import read_dialogues
    from specformer.distill import distill
    from specformer.engine import Engine

    folder, rows, out = sys.argv[1:]
    base = load_base(folder, dtype="float32", device="cpu")

    class Slow:
        def run(self, requests):
            engine = Engine(base, batch_size=3, max_length=128, prefill_chunk=32)
            for number, result in enumerate(engine.run(requests)):
                if number == 10:
                    print("far enough", flush=True)
                    time.sleep(60)
                yield result

    distill(base, read_dialogues(rows), out, max_new_tokens=12, batch_size=3, max_length=128,
            prefill_chunk=32, shard_rows=4, make_engine=Slow)
"""


def test_killed_process_loses_less_than_a_shard(tiny_llama, tiny_llama_folder, tmp_path):
    dialogues = make_dialogues(14)
    rows = tmp_path / "rows.parquet"
    write_table(pa.Table.from_pylist(dialogues, DIALOGUES), rows)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), tiny_llama_folder, rows, out],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert process.stdout is not None
    assert any("far enough" in line for line in process.stdout)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert len(read_shards(out)) == 8
    counts = run(tiny_llama, out, dialogues)
    assert counts["new_rows"] == 6
    run(tiny_llama, tmp_path / "whole", dialogues)
    assert read_rows(out, dialogues) == read_rows(tmp_path / "whole", dialogues)


def test_damaged_shard_is_answered_again(tiny_llama, tmp_path):
    dialogues = make_dialogues(10)
    tokenizer = tiny_llama.tokenizer
    run(tiny_llama, tmp_path, dialogues, FakeEngine(tokenizer))
    before = read_rows(tmp_path, dialogues)
    (tmp_path / "shard-00001.parquet").write_bytes(b"half")
    with pytest.raises(UserError, match="shard-00001"):
        read_rows(tmp_path, dialogues)
    counts = run(tiny_llama, tmp_path, dialogues, FakeEngine(tokenizer))
    assert counts["new_rows"] == 4
    assert read_rows(tmp_path, dialogues) == before


def test_other_base_settings_or_prompts_start_afresh(tiny_llama, tiny_llama_folder, tmp_path, capsys):
    dialogues = make_dialogues(5)

    def new_rows(base, some, **changes):
        engine = FakeEngine(base.tokenizer)
        return run(base, tmp_path, some, engine, **changes)["new_rows"]

    assert new_rows(tiny_llama, dialogues) == 5
    assert new_rows(tiny_llama, dialogues, batch_size=1, shard_rows=2) == 0
    assert new_rows(tiny_llama, dialogues, max_new_tokens=6) == 5
    assert "max_new_tokens changed" in capsys.readouterr().out
    assert new_rows(tiny_llama, dialogues[:4], max_new_tokens=6) == 4
    changed = load_base(tiny_llama_folder, dtype="float32", device="cpu")
    with torch.no_grad():
        changed.model.model.norm.weight *= 2
    assert new_rows(changed, dialogues[:4], max_new_tokens=6) == 4
    assert len(read_rows(tmp_path)) == 4


def test_cost_and_progress_are_printed(tiny_llama, tmp_path, capsys):
    run(tiny_llama, tmp_path, make_dialogues(3), FakeEngine(tiny_llama.tokenizer))
    lines = capsys.readouterr().out.splitlines()
    assert "3 prompts to answer (0 are stored already), at most 36 tokens" in lines[0]
    assert lines[-1].startswith("distill: 3/3 answers")
    assert "(12 tokens, " in lines[-1] and "tokens/s" in lines[-1]


def test_prompts_that_do_not_fit_are_refused_before_any_work(tiny_llama, tmp_path):
    dialogues = make_dialogues(2)
    engine = FakeEngine(tiny_llama.tokenizer)
    with pytest.raises(UserError, match="longer than the 4 that are left"):
        run(tiny_llama, tmp_path / "out", dialogues, engine, max_length=16)
    dialogues[1]["messages"] = [{"role": "user", "content": ""}]
    with pytest.raises(UserError, match="empty prompt"):
        run(tiny_llama, tmp_path / "out", dialogues, engine)
    with pytest.raises(UserError, match="'d001' comes twice"):
        run(tiny_llama, tmp_path / "out", [*make_dialogues(2), *make_dialogues(2)[1:]], engine)
    assert not engine.asked and not (tmp_path / "out").exists()


def test_reference_rows_hold_the_reference_answers(tiny_qwen3, tmp_path):
    tokenizer = tiny_qwen3.tokenizer
    dialogues = make_dialogues(9)
    counts = reference_rows(tokenizer, dialogues, tmp_path, max_new_tokens=20, shard_rows=4)
    rows = read_rows(tmp_path, dialogues)
    for row, dialogue in zip(rows, dialogues, strict=True):
        whole = encode_answer(tokenizer, dialogue["messages"], dialogue["answer"])
        assert row["prompt_ids"] == encode_prompt(tokenizer, dialogue["messages"])
        assert row["answer_ids"] == whole[:20]
        cut = len(whole) > 20
        assert row["finish_reason"] == ("length" if cut else "stop")
        assert dialogue["answer"].startswith(row["answer"])
        assert cut or row["answer"] == dialogue["answer"]
    assert counts["rows"] == 9
    assert set(counts["finish_reasons"]) == {"stop", "length"}
    again = reference_rows(tokenizer, dialogues, tmp_path, max_new_tokens=20, shard_rows=4)
    assert again == counts and len(read_shards(tmp_path)) == 9
