"""Figures show the numbers they were given, and the same numbers give the same bytes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from specformer import figures, metrics, tables
from specformer.errors import UserError

CAPTION = "Test CPU, 2 of 2 cores, float32; 3 rounds of 8 requests"


def figure1_records() -> pd.DataFrame:
    rows = []
    for batch_size in (1, 4):
        for tokens in (1, 2, 8, 16):
            for spread in (0.9, 1.0, 1.2):
                work = batch_size * tokens
                seconds = max(0.1, work / 80) * spread
                rows.append((batch_size, tokens, work, seconds))
    names = ["batch_size", "tokens_per_request", "tokens", "seconds"]
    return pd.DataFrame(rows, columns=pd.Index(names))


def table1() -> pd.DataFrame:
    rows = [
        (b, k, method, s, s - 0.1, s + 0.2)
        for b in (1, 16)
        for k in (4, 8)
        for method, s in (("none", 1.0), ("specformer", 1.5 - 0.02 * k))
    ]
    names = ["batch_size", "k", "method", "speedup", "speedup_min", "speedup_max"]
    return pd.DataFrame(rows, columns=pd.Index(names))


def positions() -> pd.DataFrame:
    accepted = [0] * 50 + [1] * 30 + [2] * 20
    steps = {"drafted": [2] * 100, "accepted": accepted, "committed": [a + 1 for a in accepted]}
    return metrics.acceptance_by_position(pd.DataFrame(steps | {"truncated": [0] * 100}), 2)


def log() -> list[dict]:
    rows: list[dict] = [{"step": s, "loss": 10.0 - s} for s in range(1, 7)]
    rows[2] |= {"accuracy": [0.3, 0.1], "tokens_per_step": 1.1}
    rows[5] |= {"accuracy": [0.5, 0.2], "tokens_per_step": 1.4}
    return rows


def study() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = [(name, seed, top + 0.1 * seed) for name, top in (("a", 1.2), ("b", 1.4)) for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=pd.Index(["variant", "seed", "tokens_per_step"]))
    curves = [(n, s, step, 60.0 * step * (1 + s), t * step / 2) for n, s, t in rows for step in (1, 2)]
    names = ["variant", "seed", "step", "seconds", "tokens_per_step"]
    return table, pd.DataFrame(curves, columns=pd.Index(names))


def ideal() -> pd.DataFrame:
    rows = [(b, k, "a", 1.2 / b, 1.5 / b) for b in (1, 4) for k in (2, 4)]
    return pd.DataFrame(rows, columns=pd.Index(["batch_size", "k", "method", "speedup", "roofline"]))


DRAW = {
    "roofline": lambda out: figures.roofline(
        figure1_records(), pd.Series({1: 12.0, 8: 90.0}), 8.0, ideal(), out, caption=CAPTION
    ),
    "study": lambda out: figures.draft_quality(*study(), out, caption=CAPTION),
    "figure1": lambda out: figures.throughput_by_tokens(figure1_records(), out, caption=CAPTION),
    "kappa": lambda out: figures.acceptance_by_position({"a": positions()}, out, caption=CAPTION),
    "speedup": lambda out: figures.speedup_by_batch(
        table1(), out, caption=CAPTION, paper=tables.paper_table(1)
    ),
    "training": lambda out: figures.training_curves({"a": log()}, out, caption=CAPTION),
    "masks": lambda out: figures.attention_masks(
        np.tril(np.ones((4, 4), bool)), np.ones((3, 3), bool), out, caption=CAPTION
    ),
}


def points(line) -> list[list[float]]:
    return np.asarray(line.get_xydata()).tolist()


def curve(fig: Figure, axis: int, label: str) -> np.ndarray:
    (line,) = [x for x in fig.axes[axis].get_lines() if x.get_label() == label]
    return np.asarray(line.get_xydata())


@pytest.mark.parametrize("name", DRAW)
def test_same_data_same_bytes_and_the_caption_is_there(name, tmp_path):
    stem = f"{name}-qwen2.5"  # a stem with a dot keeps it
    figs = [DRAW[name](tmp_path / folder / stem) for folder in ("one", "two")]
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        one, two = (tmp_path / folder / (stem + suffix) for folder in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes().startswith(start)
    assert figs[0].get_supxlabel().replace("\n", " ") == CAPTION
    formatter = DisplayFormatter()
    assert "image/png" in formatter.format(figs[0])[0]  # what a notebook asks for
    assert all(ax.get_xlabel() for ax in figs[0].axes)


def test_figure1_draws_the_median_rate_and_stars_the_knee(tmp_path):
    fig = DRAW["figure1"](tmp_path / "f")
    assert curve(fig, 0, "4").tolist() == [[1, 40], [2, 80], [8, 80], [16, 80]]
    assert curve(fig, 0, "1")[:, 1] == pytest.approx([10, 20, 80, 80])
    stars = [x for x in fig.axes[0].get_lines() if x.get_marker() == "*"]
    assert [float(np.asarray(x.get_xdata())[0]) for x in stars] == [8, 2]  # batch 1, batch 4


def test_acceptance_is_drawn_where_enough_steps_got(tmp_path):
    fig = DRAW["kappa"](tmp_path / "f")
    assert curve(fig, 0, "a (κ ≈ 1.70)").tolist() == [[1, 0.5], [2, 0.2]]
    (right,) = fig.axes[1].get_lines()
    assert np.asarray(right.get_ydata()).tolist() == [0.5, 0.4]
    few = {"a": positions().assign(reached=[100, 29])}
    (right,) = figures.acceptance_by_position(few, tmp_path / "g", caption="c").axes[1].get_lines()
    assert np.asarray(right.get_ydata()).tolist() == [0.5]


def test_speedup_shows_ours_and_the_papers_hollow(tmp_path):
    fig = DRAW["speedup"](tmp_path / "f")
    assert curve(fig, 0, "k = 4")[:, 1] == pytest.approx([1.42, 1.42])
    assert curve(fig, 0, "k = 8")[:, 1] == pytest.approx([1.34, 1.34])
    lines = fig.axes[0].get_lines()
    hollow = [x for x in lines if x.get_markerfacecolor() == "white" and points(x)]
    drawn = [np.asarray(x.get_ydata()).tolist() for x in hollow]
    assert drawn == [[1.78, 1.78, 1.78, 1.78, 1.78], [1.80, 1.80, 1.79, 1.78, 1.79]]
    bars = fig.axes[0].containers[0].lines[2][0].get_segments()  # type: ignore[attr-defined]
    assert [segment[:, 1].tolist() for segment in bars][0] == pytest.approx([1.32, 1.62])


def test_training_curves_show_loss_validation_and_the_last_accuracy(tmp_path):
    fig = DRAW["training"](tmp_path / "f")
    assert curve(fig, 0, "a").tolist() == [[s, 10 - s] for s in range(1, 7)]
    assert points(fig.axes[1].get_lines()[0]) == [[3, 1.1], [6, 1.4]]
    assert points(fig.axes[2].get_lines()[0]) == [[1, 0.5], [2, 0.2]]
    plain = [{"step": 1, "loss": 2.0}]  # nothing validated yet
    fig = figures.training_curves({"a": plain}, tmp_path / "g", caption="c")
    assert not fig.axes[1].get_lines() and not fig.axes[2].get_lines()


def test_the_roofline_gathers_passes_by_all_their_tokens(tmp_path):
    fig = DRAW["roofline"](tmp_path / "f")
    assert curve(fig, 0, "4").tolist() == [[4, 40], [8, 80], [32, 80], [64, 80]]
    achieved, hollow, *_ = fig.axes[1].get_lines()
    assert points(achieved) == [[1, 1.2], [4, 0.3]] and points(hollow) == [[1, 1.5], [4, 0.375]]


def test_the_study_shows_every_seed_and_the_mean_on_the_way(tmp_path):
    fig = DRAW["study"](tmp_path / "f")
    left, right = fig.axes
    drawn = [points(line) for line in left.get_lines()]
    assert drawn[0] == [[1.2, 1], [pytest.approx(1.3), 1]] and drawn[1] == [[1.25, 1]], "the first on top"
    assert [label.get_text() for label in left.get_yticklabels()] == ["b", "a"]
    assert points(right.get_lines()[1]) == [[1.5, pytest.approx(0.725)], [3.0, pytest.approx(1.45)]]


def test_masks_are_the_arrays_given(tmp_path):
    fig = DRAW["masks"](tmp_path / "f")
    context, draft = (np.asarray(ax.get_images()[0].get_array()) for ax in fig.axes)
    assert (context == np.tril(np.ones((4, 4)))).all() and draft.all()
    with pytest.raises(ValueError, match=r"draft .*float64 \(3, 3\)"):
        figures.attention_masks(np.ones((2, 2), bool), np.ones((3, 3)), tmp_path / "g", caption="")


def test_engine_ratios_are_over_transformers_at_the_same_batch(tmp_path):
    table = pd.DataFrame(
        [
            *(("transformers", b, 0, 10.0 * b, 9.0 * b, 11.0 * b) for b in (1, 4)),
            *(("specformer", b, 0, 15.0 * b, 14.0 * b, 18.0 * b) for b in (1, 4)),
            ("lookup", 1, 4, 5.0, 5.0, 5.0),
        ],
        columns=["system", "batch_size", "k", "tps_median", "tps_min", "tps_max"],
    )
    (ax,) = figures.engine_ratios(table, tmp_path / "f", caption="c").axes
    heights = {
        c.get_label(): [bar.get_height() for bar in c] for c in ax.containers if str(c.get_label())[0] != "_"
    }
    assert heights == {"specformer, k = 0": [1.5, 1.5], "lookup, k = 4": [0.5]}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "4"]


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(UserError, match="seconds"):
        records = figure1_records().drop(columns="seconds")
        figures.throughput_by_tokens(records, tmp_path / "f", caption="c")
    with pytest.raises(UserError, match="of a lack.* loss"):
        figures.training_curves({"a": [{"step": 1}]}, tmp_path / "f", caption="c")
    assert not list(tmp_path.iterdir())
