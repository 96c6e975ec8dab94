"""Records -> figures: every function draws, writes <out>.png and <out>.svg, returns the Figure.

The same data give the same bytes: SVG ids come from a fixed salt and no file holds a date.
`caption` is the line under a figure that says on what, in which dtype and over how many records.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from specformer import metrics
from specformer.tables import AUTO, BASELINE

PALETTE = sns.color_palette("colorblind")
MARKERS = "osD^vPX*<>"
INK = "#333333"
_STYLE: dict[Any, Any] = {
    **sns.axes_style("ticks"),
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "specformer",
}
_WRAP = 120  # characters of a caption line on a figure of 7.2 inches

_LISTS = (list, tuple, np.ndarray)
_ENOUGH = 30  # steps; a share of fewer says nothing


class ShownFigure(Figure):
    """A Figure that a notebook shows when it ends a cell.

    Without pyplot there is no global state, nothing to close and no figure shown twice, but
    also nobody who tells IPython how to show one.
    """

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png", dpi=100, metadata={"Software": None})
        return png.getvalue()


def throughput_by_tokens(records: pd.DataFrame, out: Path | str, *, caption: str) -> Figure:
    """The paper's Figure 1: tokens per second against tokens per request of one step.

    records: one row a timed round with batch_size, tokens_per_request, tokens (verified, all
    requests together) and seconds. The line is the median round, the band smallest to largest;
    a star marks where each batch size first comes within 10 % of its best median, because the
    best point itself moves along the plateau by chance.
    """
    names = ["batch_size", "tokens_per_request", "tokens", "seconds"]
    metrics.require_columns(records, names, "Figure 1 records")
    tps = metrics.throughput(records["tokens"], records["seconds"])
    with matplotlib.rc_context(_STYLE):
        fig, (ax,) = _axes()
        for i, batch_size in enumerate(sorted(set(records["batch_size"]))):
            own = tps[records["batch_size"] == batch_size]
            by_tokens = own.groupby(records["tokens_per_request"])
            middle = by_tokens.median()
            _line(ax, middle.index, middle, i, len(MARKERS), label=f"{batch_size}")
            ax.fill_between(middle.index, by_tokens.min(), by_tokens.max(), color=PALETTE[i % 10], alpha=0.15)
            knee = middle.index[int((middle >= 0.9 * middle.max()).to_numpy().argmax())]
            ax.plot(
                [knee],
                [middle[knee]],
                marker="*",
                markersize=12,
                markerfacecolor="white",
                markeredgecolor=PALETTE[i % 10],
                zorder=4,
            )
        ax.set(xlabel="tokens per request in one step", ylabel="tokens per second")
        ax.set(xlim=(0, None), ylim=(0, None))
        ax.set_title("Throughput against tokens per request")
        _legend(ax, "batch size (star: 90 % of its peak)")
        return _finish(fig, out, caption)


def roofline(
    records: pd.DataFrame,
    ceiling: pd.Series,
    rho: float,
    ideal: pd.DataFrame,
    out: Path | str,
    *,
    caption: str,
) -> Figure:
    """Left: tokens per second against all tokens of a pass, under the machine's roofline. Right: the speedup
    of each method at its largest k, and, hollow, what the roofline leaves of its kappa.

    records: as for `throughput_by_tokens`; ceiling: tokens of a pass -> tokens per second at most; rho: how
    many tokens a pass can take at the price of one, so that batch size x k <= rho is free; ideal:
    `roofline.ideal_speedups`.
    """
    metrics.require_columns(records, ["batch_size", "tokens", "seconds"], "Figure 1 records")
    metrics.require_columns(ideal, ["batch_size", "k", "method", "speedup", "roofline"], "ideal speedups")
    tps = metrics.throughput(records["tokens"], records["seconds"])
    with matplotlib.rc_context(_STYLE):
        fig, (left, right) = _axes(2)
        for i, batch_size in enumerate(sorted(set(records["batch_size"]))):
            own = records["batch_size"] == batch_size
            middle = tps[own].groupby(records["tokens"][own]).median()
            _line(left, middle.index, middle, i, len(MARKERS), label=f"{batch_size}")
        left.plot(ceiling.index, ceiling, color=INK, linewidth=1, zorder=1)
        left.axvline(rho, color=INK, linewidth=1, linestyle=":", zorder=1)
        left.annotate(
            f"ρ = {rho:.0f}",
            (rho, 0.02),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.set(xlabel="tokens of a pass, all requests", ylabel="tokens per second")
        left.set_title("Under the roofline")
        longest = ideal.loc[ideal["k"] == ideal.groupby("method")["k"].transform("max")]
        for i, method in enumerate(dict.fromkeys(longest["method"])):
            own = longest.loc[longest["method"] == method].sort_values("batch_size")
            _line(right, own["batch_size"], own["speedup"], i, label=f"{method}, k = {own['k'].iloc[0]}")
            _line(right, own["batch_size"], own["roofline"], i, hollow=True)
        right.axhline(1.0, color=INK, linewidth=1, linestyle="--", zorder=1)
        right.set_xscale("log", base=2)
        right.xaxis.set_major_locator(FixedLocator(sorted(set(longest["batch_size"]))))
        right.xaxis.set_minor_locator(NullLocator())
        for axis in (left.xaxis, left.yaxis, right.xaxis):
            axis.set_major_formatter(ScalarFormatter())
        right.set(xlabel="batch size", ylabel="speedup over plain decoding", ylim=(0, None))
        right.set_title("Achieved, and ideal (hollow)")
        _legend(left, "batch size")
        _legend(right, None, beside=longest["method"].nunique() > 5)
        return _finish(fig, out, caption)


def acceptance_by_position(tables: Mapping[str, pd.DataFrame], out: Path | str, *, caption: str) -> Figure:
    """Acceptance at each draft position, for several drafts.

    tables: draft name -> metrics.acceptance_by_position(). Left: share of all steps that accept
    the position; right: share of those that accepted everything before it, where at least 30 did.
    The legend adds up 1 + the unconditional shares: kappa, where no step was cut short.
    """
    with matplotlib.rc_context(_STYLE):
        fig, axes = _axes(2)
        for i, (name, table) in enumerate(tables.items()):
            total = 1 + table["unconditional"].sum()
            label = f"{name} (κ ≈ {total:.2f})"
            _line(axes[0], table["position"], table["unconditional"], i, label=label)
            many = table.loc[table["reached"] >= _ENOUGH]
            _line(axes[1], many["position"], many["conditional"], i)
        titles = ("of all steps", f"of the steps that got this far (at least {_ENOUGH})")
        for ax, title in zip(axes, titles, strict=True):
            ax.set_title(title)
            ax.set(xlabel="draft position", xlim=axes[0].get_xlim(), ylim=(0, 1.02))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.yaxis.set_major_formatter("{x:.0%}")
        axes[0].set(ylabel="accepted")
        _legend(axes[0], None)
        return _finish(fig, out, caption)


def speedup_by_batch(
    table: pd.DataFrame, out: Path | str, *, caption: str, paper: pd.DataFrame | None = None
) -> Figure:
    """Speedup over plain decoding against batch size, a line for each method and k.

    table: tables.build_table1() (or its CSV); the bars are smallest to largest paired round.
    paper: tables.paper_table(1), drawn as hollow markers for the methods and k in `table`.
    """
    names = ["batch_size", "k", "method", "speedup", "speedup_min", "speedup_max"]
    metrics.require_columns(table, names, "rows of Table 1")
    drafted = table.loc[table["method"] != BASELINE]
    methods = list(dict.fromkeys(drafted["method"]))
    lines = sorted({(methods.index(m), int(k)) for m, k in drafted[["method", "k"]].values})
    batch_sizes = set(drafted["batch_size"])
    with matplotlib.rc_context(_STYLE):
        fig, (ax,) = _axes(
            height=max(4.0, 0.25 * len(lines) + 1.5)
        )  # the legend beside it has a row for each
        for i, (place, k) in enumerate(lines):
            # Lines of one batch size stand side by side, so that no bar hides another.
            aside = 1.05 ** (i - (len(lines) - 1) / 2)
            own = _of(drafted, methods[place], k)
            most = f"k {'up to' if methods[place].endswith(AUTO) else '='} {k}"
            name = most if len(methods) == 1 else f"{methods[place]}, {most}"
            _line(ax, own["batch_size"] * aside, own["speedup"], i, label=name)
            ax.errorbar(
                own["batch_size"] * aside,
                own["speedup"],
                yerr=[own["speedup"] - own["speedup_min"], own["speedup_max"] - own["speedup"]],
                color=PALETTE[i % 10],
                linestyle="none",
                capsize=3,
            )
            if paper is not None:
                theirs = _of(paper, methods[place], k)
                batch_sizes |= set(theirs["batch_size"])
                _line(ax, theirs["batch_size"] * aside, theirs["speedup"], i, hollow=True)
        if paper is not None:
            ax.plot([], [], "o", markerfacecolor="white", markeredgecolor=INK, label="the paper")
        ax.axhline(1.0, color=INK, linewidth=1, linestyle="--", zorder=1)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(sorted(batch_sizes)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.set(xlabel="batch size", ylabel="speedup over plain decoding")
        ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
        alone = f": {methods[0]}" if len(methods) == 1 else ""
        ax.set_title(f"Speedup against batch size{alone}")
        _legend(ax, None, beside=True)
        return _finish(fig, out, caption)


def training_curves(
    logs: Mapping[str, Sequence[Mapping[str, Any]] | pd.DataFrame],
    out: Path | str,
    *,
    caption: str,
) -> Figure:
    """Loss, tokens per step on the validation split, and accuracy by draft position.

    logs: draft name -> rows of its log.jsonl (step, loss, and where it was validated accuracy, a
    list with one share for each position, and tokens_per_step). Loss is drawn faint as logged and
    strong as its running mean. Accuracy is that of the last validation.
    """
    with matplotlib.rc_context(_STYLE):
        fig, (left, middle, right) = _axes(3)
        for i, (name, records) in enumerate(logs.items()):
            log = records if isinstance(records, pd.DataFrame) else pd.DataFrame(list(records))
            metrics.require_columns(log, ["step", "loss"], f"training log rows of {name}")
            color = PALETTE[i % 10]
            loss = log.loc[log["loss"].notna()]
            left.plot(loss["step"], loss["loss"], color=color, alpha=0.25, linewidth=1)
            window = max(1, len(loss) // 20)
            smooth = loss["loss"].rolling(window, min_periods=1).mean()
            left.plot(loss["step"], smooth, color=color, label=name)
            if "tokens_per_step" in log:
                seen = log.loc[log["tokens_per_step"].notna()]
                _line(middle, seen["step"], seen["tokens_per_step"], i)
            if "accuracy" in log:
                # rows without a validation hold NaN instead of a list
                lists = [row for row in log["accuracy"].to_numpy() if isinstance(row, _LISTS)]
                if lists:
                    _line(right, range(1, len(lists[-1]) + 1), lists[-1], i)
        left.set_title("training loss")
        middle.set_title("tokens per step, validation")
        right.set_title("accuracy, last validation")
        for ax in (left, middle):
            ax.set(xlabel="optimizer step")
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        right.set(xlabel="draft position", ylim=(0, 1.02))
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.yaxis.set_major_formatter("{x:.0%}")
        _legend(left, None)
        return _finish(fig, out, caption)


def attention_masks(context: np.ndarray, draft: np.ndarray, out: Path | str, *, caption: str) -> Figure:
    """The paper's Figure 2b: which position may see what.

    context: bool (length, length), draft: bool (l_d, l_d); row = the one that looks, column =
    what it looks at, True = may see. Pass the masks that the model itself uses.
    """
    for name, mask in (("context", context), ("draft", draft)):
        if mask.ndim != 2 or mask.dtype != np.bool_:
            raise ValueError(f"{name} must be a boolean matrix, got {mask.dtype} {mask.shape}")
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        fig, axes = _axes(2, height=4.3)
        parts = (
            (axes[0], context, "context attention", "context position"),
            (axes[1], draft, "draft attention", "draft position"),
        )
        for ax, mask, title, what in parts:
            ax.imshow(mask, cmap=ListedColormap(["#f2f2f2", PALETTE[0]]), vmin=0, vmax=1)
            ax.set_xticks(np.arange(-0.5, mask.shape[1]), minor=True)
            ax.set_yticks(np.arange(-0.5, mask.shape[0]), minor=True)
            ax.grid(which="minor", color="white", linewidth=2)
            ax.tick_params(which="minor", length=0)
            ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            ax.set(xlabel=f"{what} seen", ylabel=f"{what} looking")
            ax.set_title(title)
            sns.despine(ax=ax, left=True, bottom=True)
        return _finish(fig, out, caption)


def engine_ratios(table: pd.DataFrame, out: Path | str, *, caption: str) -> Figure:
    """Throughput of each system over that of transformers' generate, a group of bars for each batch size.

    table: rows of `bench_engine.bench_engine` (or its CSV); the thin bars are smallest to largest round, over
    the median of transformers' rounds.
    """
    names = ["system", "batch_size", "k", "tps_median", "tps_min", "tps_max"]
    metrics.require_columns(table, names, "rows of the engine benchmark")
    plain = table.loc[table["system"] == "transformers"].set_index("batch_size")["tps_median"]
    shown = table.loc[table["system"] != "transformers"]
    systems = list(shown[["system", "k"]].drop_duplicates().itertuples(index=False, name=None))
    batch_sizes = sorted(set(shown["batch_size"]))
    width = 0.8 / len(systems)
    with matplotlib.rc_context(_STYLE):
        fig, (ax,) = _axes()
        for i, (system, k) in enumerate(systems):
            own = shown.loc[(shown["system"] == system) & (shown["k"] == k)].set_index("batch_size")
            ratio = own[["tps_median", "tps_min", "tps_max"]].div(plain.reindex(own.index), axis=0)
            at = [batch_sizes.index(b) + (i - (len(systems) - 1) / 2) * width for b in own.index]
            spread = [ratio["tps_median"] - ratio["tps_min"], ratio["tps_max"] - ratio["tps_median"]]
            label = f"{system}, k = {k}"
            ax.bar(at, ratio["tps_median"], width * 0.9, yerr=spread, color=PALETTE[i % 10], label=label)
        ax.axhline(1.0, color=INK, linewidth=1, linestyle="--", zorder=1)
        ax.set_xticks(range(len(batch_sizes)), [str(b) for b in batch_sizes])
        ax.set(xlabel="batch size", ylabel="tokens per second over transformers'")
        ax.set_title("The engine against others, transformers' generate = 1")
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the bars
        return _finish(fig, out, caption)


def draft_quality(table: pd.DataFrame, curves: pd.DataFrame, out: Path | str, *, caption: str) -> Figure:
    """Tokens per step of each variant of the study, a dot for each seed, and how they were reached in time.

    table: of `study.compare`; curves: the validated rows of `study.training_log`. A line is the mean over
    seeds.
    """
    metrics.require_columns(table, ["variant", "seed", "tokens_per_step"], "rows of the study")
    metrics.require_columns(curves, ["variant", "seconds", "step", "tokens_per_step"], "curves of the study")
    variants = list(dict.fromkeys(table["variant"]))
    with matplotlib.rc_context(_STYLE):
        fig, (left, right) = _axes(2)
        for i, name in enumerate(variants):
            own = table.loc[table["variant"] == name, "tokens_per_step"]
            place = len(variants) - 1 - i  # the first one on top
            _line(left, own, [place] * len(own), i, hollow=True)
            left.plot(own.mean(), place, "|", color=PALETTE[i % 10], markersize=18, markeredgewidth=3)
            course: Any = curves.loc[curves["variant"] == name].groupby("step")
            mean = course[["seconds", "tokens_per_step"]].mean()
            _line(right, mean["seconds"] / 60, mean["tokens_per_step"], i, crowd=1)
        left.set_yticks(range(len(variants)), variants[::-1])
        left.set(xlabel="tokens per step", ylim=(-0.6, len(variants) - 0.4))
        left.set_title("at equal data")
        right.set(xlabel="minutes of training", ylabel="tokens per step")
        right.set_title("on the way, colours as left")
        return _finish(fig, out, caption)


# --- shared ----------------------------------------------------------------------------------


def _axes(columns: int = 1, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    width = {1: 7.2, 2: 8.4, 3: 11.0}[columns]
    fig = ShownFigure(figsize=(width, height), layout="constrained")
    return fig, list(fig.subplots(1, columns, squeeze=False)[0])


def _line(ax: Axes, x: Any, y: Any, i: int, crowd: int = 0, **kw: Any) -> None:
    hollow = kw.pop("hollow", False)
    ax.plot(
        x,
        y,
        color=PALETTE[i % 10],
        marker=MARKERS[i % len(MARKERS)],
        markersize=4 if crowd else 6,
        markerfacecolor="white" if hollow else PALETTE[i % 10],
        linestyle="none" if hollow else ("-", "--", ":")[i // len(MARKERS) % 3],
        zorder=2.5 if hollow else 3,
        **kw,
    )


def _of(table: pd.DataFrame, method: str, k: int) -> pd.DataFrame:
    own = table.loc[(table["method"] == method) & (table["k"] == k)]
    return own.sort_values("batch_size")


def _legend(ax: Axes, title: str | None, beside: bool = False) -> None:
    """Inside the axes where matplotlib finds room, or beside them: many lines leave none."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if beside else {}
    if ax.get_legend_handles_labels()[0]:
        ax.legend(title=title, alignment="left", **place)


def _finish(fig: Figure, out: Path | str, caption: str) -> Figure:
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    per_line = round(_WRAP * fig.get_figwidth() / 7.2)
    fig.supxlabel("\n".join(textwrap.wrap(caption, per_line)), fontsize=8, color=INK, x=0.01, ha="left")
    # Not with_suffix: a stem such as qwen2.5 would lose its ".5".
    fig.savefig(out.with_name(out.name + ".png"), metadata={"Software": None})
    fig.savefig(out.with_name(out.name + ".svg"), metadata={"Date": None})
    return fig
