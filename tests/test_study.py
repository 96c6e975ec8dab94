"""The study of variants: what is compared with what, and that a killed study goes on."""

from __future__ import annotations

from typing import get_args

import pandas as pd
import pytest
from helpers import answered, nano_base

from specformer.drafts import load_draft
from specformer.errors import UserError
from specformer.settings import Settings, Variant, load_settings
from specformer.study import PAPER, Course, compare, training_log, variants
from specformer.tables import summarise
from specformer.target import Target

MACHINE = {"cpu": "here"}


def line(variant, seed, step, seconds, tokens_per_step):
    where = {"variant": variant, "seed": seed, "step": step, "tokens": 10 * step, "seconds": seconds}
    return where | {"tokens_per_step": tokens_per_step, "accuracy_1": 0.5, "accuracy_2": 0.25}


def smoke(**changes) -> Settings:
    """The smoke profile with other values: section -> its changes, or a whole value."""
    settings = load_settings("smoke")
    new = {
        key: value if not isinstance(value, dict) else getattr(settings, key).model_copy(update=value)
        for key, value in changes.items()
    }
    return settings.model_copy(update=new)


def test_variants_change_one_thing_each():
    settings = load_settings("smoke")
    found = variants(settings)
    assert set(found) == {*get_args(Variant), *settings.baselines}
    for name in set(found) - {"specformer", "specformer_plus", *settings.baselines}:
        variant = found[name]
        own, learns = settings.draft.model_dump() | {"anchor_token": "none"}, PAPER
        changed = [key for key, value in variant.draft.items() if value != own[key]]
        changed += [key for key, value in variant.learns.items() if value != learns[key]]
        assert len(changed) + (variant.answers == "reference") == 1, name
    assert (found["specformer_plus"].draft, found["specformer_plus"].learns) == (
        {"anchor_token": "context"},
        {"soft_labels": 8, "position_weights": "acceptance"},
    )
    assert found["eagle3"].kind == "eagle3"
    assert found["eagle3"].learns == {"soft_labels": 64, "position_weights": 0.8}
    assert "specformer_plus" not in variants(smoke(plus=None))


def test_equal_time_is_read_off_at_the_fastest_variants_end():
    """Two steps take the fast one 12 s, the slow one 20 s; 12 s are 1.2 of its steps."""
    log = pd.DataFrame(
        [
            *(line("fast", 0, 1, 5, 1.1), line("fast", 0, 2, 15, 1.3)),
            *(line("slow", 0, 1, 10, 1.2), line("slow", 0, 2, 20, 1.4)),
            *(line("fast", 1, 1, 5, 1.1), line("fast", 1, 2, 12, 1.05)),
            # a seed that another job disturbed
            *(line("slow", 1, 1, 10, 1.2), line("slow", 1, 2, 90, 1.6)),
        ]
    )
    rows = compare(log, MACHINE).set_index(["variant", "seed"])
    assert list(rows.index) == [("fast", 0), ("fast", 1), ("slow", 0), ("slow", 1)]
    assert rows.loc[("slow", 0), "equal_time"] == pytest.approx(1.24)
    assert rows.loc[("slow", 1), "equal_time"] == pytest.approx(1.28)
    assert rows.loc[("fast", 0), "equal_time"] == rows.loc[("fast", 0), "tokens_per_step"] == 1.3
    assert rows.loc[("fast", 1), "tokens_per_step"] == 1.1, "the best checkpoint is what is kept"
    assert rows.loc[("slow", 0), ["accuracy_1", "accuracy_2"]].tolist() == [0.5, 0.25]
    assert set(rows["cpu"]) == {"here"} and set(rows["steps"]) == {2}


def test_a_difference_within_the_spread_is_not_certain():
    rows = pd.DataFrame(
        {
            "variant": ["specformer"] * 2 + ["near"] * 2 + ["far"] * 2,
            "seed": [0, 1] * 3,
            "tokens_per_step": [1.2, 1.3, 1.25, 1.4, 1.5, 1.6],
            "equal_time": 1.0,
            "accuracy_1": 0.3,
            "seconds": 60.0,
        }
    )
    found = summarise(rows).set_index("variant")
    assert found["certain"].to_dict() == {"specformer": False, "near": False, "far": True}
    assert found.loc["far", "difference"] == pytest.approx(0.3)
    alone = summarise(rows.loc[rows["variant"] != "specformer"]).set_index("variant")
    assert alone["difference"].tolist() == pytest.approx([0, 0.225]), "the first stands in for it"


def test_every_draft_of_a_profile_is_trained_once(tiny_tokenizer, tmp_path, capsys):
    """SpecFormer with both kinds of answers and seeds, a baseline with other hooks, one without weights."""
    base = nano_base(tiny_tokenizer, 320, stop_token_ids=(0, 2))
    rows = answered(base, 8, 10)
    other = [row | {"answer_ids": row["answer_ids"][::-1]} for row in rows]
    names = ("specformer_plus", "specformer", "specformer_no_self_distill", "eagle3", "ngram")
    settings = smoke(
        draft={"draft_length": 2, "hooks": (0, 1, 2), "vocabulary": 50},
        train={"max_length": 64, "sequences_per_step": 4, "hidden_gib": 1.0},
        baselines=names[3:],
    )
    course = Course(
        base,
        Target(base, 64),
        settings,
        {"distilled": rows, "reference": other},
        rows[:4],
        names,
        tmp_path / "hidden",
    )
    runs = [(name, 0) for name in names] + [("specformer", 1)]
    folders = {(name, seed): tmp_path / str(seed) / name for name, seed in runs}
    for (name, seed), folder in folders.items():
        summary = course.train(name, seed, folder)
        assert (summary is None) == (name == "ngram")
        assert load_draft(folder, base).config.vocabulary == 50
    assert {path.name for path in (tmp_path / "hidden").iterdir()} == {"distilled", "reference"}
    shown = capsys.readouterr().out
    assert shown.count("hidden states: ") == 5 and "computed every epoch" not in shown
    encode, course.target.encode = course.target.encode, None  # type: ignore[assignment]
    course.train("eagle3", 3, tmp_path / "3")  # all that it reads is there
    course.target.encode = encode

    for (name, seed), folder in folders.items():
        course.train(name, seed, folder)
    assert capsys.readouterr().out.count("finished earlier") == 5
    learned = {key: folder for key, folder in folders.items() if key[0] != "ngram"}
    found = compare(training_log(learned), MACHINE)
    assert list(zip(found["variant"], found["seed"], strict=True)) == [
        ("specformer_plus", 0), ("specformer", 0), ("specformer", 1), ("specformer_no_self_distill", 0),
        ("eagle3", 0),
    ]  # fmt: skip
    assert found["tokens_per_step"].between(1, 3).all()
    assert set(found["steps"]) == {2} and {"accuracy_1", "accuracy_2", "equal_time"} <= set(found)
    with pytest.raises(UserError, match="'medusa' is no draft of this profile: specformer, "):
        course.train("medusa", 0, tmp_path / "4")
