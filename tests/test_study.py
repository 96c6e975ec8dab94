"""The study of variants: what is compared with what, and that a killed study goes on."""

from __future__ import annotations

import pandas as pd
import pytest
from helpers import answered, nano_base, settings

from specformer.study import PAPER, compare, study, variants
from specformer.tables import summarise
from specformer.target import Target


def line(seconds, tokens_per_step, step=1):
    validation = {"accuracy": [0.5, 0.25], "tokens_per_step": tokens_per_step}
    return {
        "step": step,
        "tokens": 10 * step,
        "seconds": seconds,
        "validation": validation,
        "tokens_per_step": tokens_per_step,
    }


def test_variants_change_one_thing_each():
    found = variants(100, {"anchor_token": "context", "soft_labels": 4, "position_weights": "acceptance"})
    assert found["specformer, whole vocabulary"] == {} and found["specformer"] == {"vocabulary": 100}
    for name, change in found.items():
        assert set(change) <= set(PAPER), name
        if name not in ("specformer, whole vocabulary", "specformer", "specformer_plus"):
            changed = [key for key, value in change.items() if value != PAPER[key]]
            assert len(changed) == 2 and "vocabulary" in changed, name
    assert found["specformer_plus"] == {
        "vocabulary": 100, "anchor_token": "context", "soft_labels": 4, "position_weights": "acceptance",
    }  # fmt: skip


def test_equal_time_is_read_off_at_the_fastest_variants_end():
    """Two steps take the fast one 12 s, the slow one 20 s; 12 s are 1.2 of its steps."""
    logs = {
        ("slow", 0): [line(10, 1.2), line(20, 1.4, 2)],
        ("fast", 0): [line(5, 1.1), line(15, 1.3, 2)],
        ("fast", 1): [line(5, 1.1), line(12, 1.05, 2)],
        ("slow", 1): [line(10, 1.2), line(90, 1.6, 2)],  # a seed that another job disturbed
    }
    rows = compare(logs, ["fast", "slow"]).set_index(["variant", "seed"])
    assert list(rows.index) == [("fast", 0), ("fast", 1), ("slow", 0), ("slow", 1)]
    assert rows.loc[("slow", 0), "equal_time"] == pytest.approx(1.24)
    assert rows.loc[("slow", 1), "equal_time"] == pytest.approx(1.28)
    assert rows.loc[("fast", 0), "equal_time"] == rows.loc[("fast", 0), "tokens_per_step"] == 1.3
    assert rows.loc[("fast", 1), "tokens_per_step"] == 1.1, "the best checkpoint is what is kept"
    assert rows.loc[("slow", 0), ["accuracy_1", "accuracy_2"]].tolist() == [0.5, 0.25]


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


def test_a_study_trains_every_variant_and_seed_once(tiny_tokenizer, tmp_path, capsys):
    base = nano_base(tiny_tokenizer, 320, stop_token_ids=(0, 2))
    rows = answered(base, 8, 10)
    options = settings(epochs=1.0, sequences_per_step=4, hidden_gib=1.0)
    for key in ("seed", "soft_labels", "position_weights"):
        del options[key]
    changes = {"specformer": {"vocabulary": 50}, "more": {"anchor_token": "context", "soft_labels": 3}}
    draft = {"hooks": (0, 1, 2), "init": "base", "draft_length": 2}

    def run():
        return study(
            base,
            Target(base, 64),
            rows,
            rows[:4],
            tmp_path,
            changes=changes,
            seeds=[0, 1],
            draft=draft,
            options=options,
        )

    found, curves = run()
    assert list(zip(found["variant"], found["seed"], strict=True)) == [
        ("specformer", 0), ("specformer", 1), ("more", 0), ("more", 1),
    ]  # fmt: skip
    assert found["tokens_per_step"].between(1, 3).all()
    assert set(found["steps"]) == {2}
    assert {"accuracy_1", "accuracy_2", "cpu", "dtype", "threads"} <= set(found)
    capsys.readouterr()
    last = curves.groupby(["variant", "seed"]).last()["step"]
    assert list(curves) == ["variant", "seed", "step", "tokens", "seconds", "tokens_per_step"]
    assert set(last) == {2} and len(last) == 4
    again, _ = run()
    assert capsys.readouterr().out.count("finished earlier") == 4
    pd.testing.assert_frame_equal(again, found)
