"""The packaged draft is whole, small, and as good as its record says."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import answered, nano_base, settings

from specformer import hardware, pretrained
from specformer.drafts import load_draft, new_draft
from specformer.errors import UserError
from specformer.training import train


def test_the_packaged_draft_does_what_its_record_says(smollm2):
    folder = pretrained.packaged_folder(smollm2)
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size <= pretrained.MOST_BYTES
    record = json.loads((folder / "record.json").read_text())
    draft = load_draft(folder, smollm2)
    found = pretrained.measure(smollm2, draft, record["k"], record["max_new_tokens"])
    assert found["prompts"] == record["prompts"]
    assert found["tokens_per_step"] == pytest.approx(record["tokens_per_step"], abs=0.02)
    assert found["tokens_per_step"] > 1.2
    card = (folder / "README.md").read_text()
    assert f"{record['tokens_per_step']:.3f}" in card and smollm2.name in card


def test_another_base_has_none(tiny_llama):
    assert pretrained.packaged_folder(tiny_llama) is None


def test_a_finished_run_is_packaged_with_record_and_card(tiny_tokenizer, tmp_path):
    base = nano_base(tiny_tokenizer, 320, stop_token_ids=(0, 2))
    rows = answered(base, 8, 10)
    draft = new_draft(
        base, "specformer", rows, hooks=(0, 1, 2), init="base", seed=0, draft_length=2, vocabulary=64
    )
    source = tmp_path / "run"
    words = {"command": "make reproduce", "data": "dialogues", "machine": hardware.describe(torch.float32)}
    with pytest.raises(UserError, match="no finished training run"):
        pretrained.package(source, base, draft, **words, home=tmp_path / "home")
    train(base, draft, rows, rows[:4], source, **settings())
    folder = pretrained.package(source, base, load_draft(source, base), **words, home=tmp_path / "home")
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "record.json",
    ]  # fmt: skip
    assert pretrained.packaged_folder(base, tmp_path / "home") == folder
    record = json.loads((folder / "record.json").read_text())
    assert record == pretrained.measure(base, load_draft(folder, base), record["k"], record["max_new_tokens"])
    card = (folder / "README.md").read_text()
    assert "`make reproduce`" in card and "draft vocabulary: 64" in card


def test_weights_too_large_to_package_are_refused(tiny_tokenizer, tmp_path, monkeypatch):
    base = nano_base(tiny_tokenizer, 320)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    monkeypatch.setattr(pretrained, "MOST_BYTES", 99)
    with pytest.raises(UserError, match="at most 0 fit"):
        pretrained.package(tmp_path, base, None, command="", data="", machine={})  # type: ignore[arg-type]
