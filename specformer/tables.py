"""Recorded rounds and steps -> the paper's tables, with its printed values beside ours.

A CSV holds what was measured and nothing else; its first columns are those of the paper's CSV.
Rows that the paper has and we did not run appear in the comparison only, as "not run".
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from specformer import metrics
from specformer.errors import UserError

if TYPE_CHECKING:
    from great_tables import GT

BASELINE = "none"
AUTO = "_auto"
"""Ends the name of a method whose k the engine chooses; its records hold the most it may choose."""
VARIANTS = {
    BASELINE: BASELINE,
    "specformer_no_self_distill": "no_self_distill",
    "specformer": "self_distill",
    "specformer_plus": "self_distill_plus",
}
"""Method of a record -> variant of Table 2."""

ABLATIONS = ("specformer", "no_positional_ffn", "causal_draft_attention", "larger")
"""Variants of Table 4."""

PAPER_FILES = {
    1: "table1_throughput.csv",
    2: "table2_self_distillation.csv",
    3: "table3_base_size.csv",
    4: "table4_ablation.csv",
}
TABLE1_KEYS = ["batch_size", "k", "method"]
TABLE2_KEYS = ["batch_size", "k", "variant"]
TABLE3_KEYS = ["batch_size", "k", "base_model"]
QUOTABLE = 3
"""Rounds that a speed needs at least to be quoted."""

_MEASURED = [
    *("kappa", "tps", "speedup", "tps_min", "tps_max", "speedup_min", "speedup_max"),
    *("theta", "p", "tps_decode", "requests", "rounds"),
]
_MACHINE = ["cpu", "cores", "threads", "accelerator", "dtype", "torch"]
_FORMATS = {
    **dict.fromkeys(["kappa", "kappa_min", "kappa_max", "difference"], ".3f"),
    "theta": ".3f",
    "p": ".4f",
    **dict.fromkeys(["tps", "tps_min", "tps_max", "tps_decode"], ".2f"),
    **dict.fromkeys(["speedup", "speedup_min", "speedup_max"], ".3f"),
}
_THROUGHPUT = [
    *("method", "batch_size", "k", "round", "requests", "tokens", "seconds", "prefill_seconds"),
    *_MACHINE,
]


def paper_table(number: int) -> pd.DataFrame:
    """Table 1-4 of the paper, as printed there."""
    if number not in PAPER_FILES:
        raise ValueError(f"the paper has tables 1-4, got {number}")
    return pd.read_csv(str(files("specformer") / "paper" / PAPER_FILES[number]))


def build_table1(
    throughput: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    base_model: str,
    base_parameters: float,
    drafts: Mapping[str, Mapping[str, float]],
    labels: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Table 1: throughput and speedup for each batch size, k and method.

    throughput, steps: the records of one run (columns as in throughput.parquet and
    steps/*.parquet). drafts: method -> its parameter counts "m_s" and "m_p"; a method that is not
    there gets an empty p. labels: method -> its name for people, where that is another. tps is
    `metrics.serving_throughput`, of answers as long as the baseline's in the same round. Returns the
    paper's columns (batch_size, k, method, kappa, tps, speedup), then the spread over rounds, theta,
    p, tps_decode (prefill out), requests (a round), rounds, label, base_model, dtype, threads, cpu,
    accelerator; sorted, the baseline repeated for each
    k, as the paper does. Raises UserError for missing columns, records of two machines or dtypes
    in one table, rounds that do not pair, and rounds without step records.
    """
    table = _measure(throughput, steps, base_model, base_parameters, drafts)
    table["label"] = [(labels or {}).get(method, method) for method in table["method"]]
    return _sorted(table, TABLE1_KEYS, paper_table(1)).loc[
        :, [*TABLE1_KEYS, *_MEASURED, "label", "base_model", "dtype", "threads", "cpu", "accelerator"]
    ]


def build_table2(
    throughput: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    base_model: str,
    base_parameters: float,
    drafts: Mapping[str, Mapping[str, float]],
    draft_length: int,
    variants: Mapping[str, str] = VARIANTS,
) -> pd.DataFrame:
    """Table 2: the same draft with and without self-distilled training data.

    Arguments and errors as build_table1; draft_length: l_d of the drafts. Only the methods of
    `variants` are taken. Returns the paper's columns (base_model, batch_size, k, draft_length,
    variant, kappa, tps, speedup), then those that build_table1 adds.
    """
    metrics.require_columns(throughput, ["method"], "throughput records")
    taken = throughput.loc[throughput["method"].isin(list(variants))]
    if taken.empty:
        raise UserError(
            f"Table 2 needs records of {', '.join(variants)}; the throughput records hold: "
            f"{', '.join(sorted(set(throughput['method']))) or 'nothing'}. Run the ablation stage."
        )
    table = _measure(taken, steps, base_model, base_parameters, drafts)
    table["variant"] = [variants[method] for method in table["method"]]
    table["draft_length"] = [1 if m == BASELINE else draft_length for m in table["method"]]
    names = ["base_model", "batch_size", "k", "draft_length", "variant"]
    return _sorted(table, TABLE2_KEYS, paper_table(2)).loc[
        :, [*names, *_MEASURED, "dtype", "threads", "cpu", "accelerator"]
    ]


def build_table3(profiles: Mapping[str, tuple[pd.DataFrame, int]]) -> pd.DataFrame:
    """Table 3: SpecFormer on base LLMs of several sizes.

    profiles: of `read_profiles`; a base that several share is taken from the first. Returns the paper's
    columns (batch_size, k, base_model, kappa, tps, speedup, theta; k = 0 is plain decoding), the spread of
    the speedup, base_parameters, the profile, and what it ran on: tokens per second of two machines do not
    compare. Each cell from the smallest base to the largest.
    """
    parts, seen = [], set()
    for profile, (table, size) in profiles.items():
        name = table["base_model"].iloc[0].split("/")[-1]
        if name in seen:
            continue
        seen.add(name)
        own = table.loc[table["method"].isin((BASELINE, "specformer"))]
        own = own.assign(k=own["k"].where(own["method"] != BASELINE, 0)).drop_duplicates(["batch_size", "k"])
        parts.append(own.assign(base_parameters=size, profile=profile, base_model=name))
    measured = ["kappa", "tps", "speedup", "theta", "speedup_min", "speedup_max"]
    kept = [*TABLE3_KEYS, *measured, "base_parameters", "profile", "accelerator", "cpu", "threads", "dtype"]
    table = pd.concat(parts).sort_values(["batch_size", "k", "base_parameters"]).loc[:, kept]
    return table.reset_index(drop=True)


def read_profiles(results: Path) -> dict[str, tuple[pd.DataFrame, int]]:
    """Profile -> its Table 1 and the parameters of its base: that of the folder `results`, and those beside
    it that were run with enough rounds to be quoted."""
    found = {}
    for folder in [results, *sorted(results.parent.iterdir())]:
        file = folder / "tables" / "table1.csv"
        if folder.name in found or not file.exists():
            continue
        table = pd.read_csv(file)
        if folder == results or min(table["rounds"]) >= QUOTABLE:
            about = json.loads((folder / "architecture.json").read_text())
            found[folder.name] = (table, about["base_parameters"])
    return found


def summarise(rows: pd.DataFrame, reference: str = "specformer") -> pd.DataFrame:
    """Mean, smallest and largest over seeds of each variant, and its difference to `reference`'s mean (to
    the first variant's where that was not trained). rows: `study.compare`'s.

    certain: whether the two ranges over seeds do not overlap.
    """
    spread = rows.groupby("variant", sort=False).agg(
        seeds=("seed", "size"),
        tokens_per_step=("tokens_per_step", "mean"),
        lowest=("tokens_per_step", "min"),
        highest=("tokens_per_step", "max"),
        equal_time=("equal_time", "mean"),
        first_position=("accuracy_1", "mean"),
        seconds=("seconds", "mean"),
    )
    own = spread.loc[reference if reference in spread.index else spread.index[0]]
    spread["difference"] = spread["tokens_per_step"] - own["tokens_per_step"]
    spread["certain"] = (spread["lowest"] > own["highest"]) | (spread["highest"] < own["lowest"])
    return spread.reset_index()


def build_table4(summary: pd.DataFrame, *, base_model: str, draft_length: int) -> pd.DataFrame:
    """Table 4: the paper's draft, without its parts and larger, over seeds.

    summary: rows of `summarise`; draft_length: of its drafts. kappa is the tokens per step of greedy
    drafts on unseen answers of the base. Returns the paper's columns (base_model, k, variant, kappa),
    kappa_min, kappa_max, seeds, difference (to specformer's kappa) and certain (whether the two ranges over
    seeds do not overlap). Raises UserError naming variants that were not trained.
    """
    names = {"tokens_per_step": "kappa", "lowest": "kappa_min", "highest": "kappa_max"}
    kept = ["seeds", "difference", "certain"]
    metrics.require_columns(summary, ["variant", *names, *kept], "the summary of the study")
    own = summary.set_index("variant")
    if missing := [name for name in ABLATIONS if name not in own.index]:
        raise UserError(f"Table 4 needs {', '.join(missing)}: add them to study.variants")
    table = own.loc[list(ABLATIONS)].rename(columns=names)
    table = table.assign(base_model=base_model, k=draft_length).reset_index()
    columns = ["base_model", "k", "variant", *names.values(), *kept]
    return table.loc[:, columns]


def _measure(
    throughput: pd.DataFrame,
    steps: pd.DataFrame,
    base_model: str,
    base_parameters: float,
    drafts: Mapping[str, Mapping[str, float]],
) -> pd.DataFrame:
    metrics.require_columns(throughput, _THROUGHPUT, "throughput records")
    columns = ["method", "batch_size", "k", "round", "request", "committed"]
    metrics.require_columns(steps, columns, "step records")
    machine = _one_machine(throughput)
    twice = throughput.duplicated(["method", "batch_size", "k", "round"])
    if twice.any():
        row = throughput.loc[twice].iloc[0]
        raise UserError(
            f"{row['method']} at batch size {row['batch_size']}, k {row['k']} holds round "
            f"{row['round']} twice. Do the records come from two runs? Keep one."
        )
    counted = [throughput[c] for c in ("tokens", "requests", "seconds", "prefill_seconds")]
    rounds = throughput.assign(
        tps=metrics.serving_throughput(_answer_tokens(throughput, steps), *counted),
        tps_decode=metrics.decode_throughput(*counted),
    ).sort_values("round")
    rows = []
    for batch_size, group in rounds.groupby("batch_size"):
        base = group.loc[group["method"] == BASELINE]
        drafted = group.loc[group["method"] != BASELINE]
        pairs = drafted.loc[:, ["method", "k"]].drop_duplicates().to_dict("records")
        for method, k in ((pair["method"], int(pair["k"])) for pair in pairs):
            timed = drafted.loc[(drafted["method"] == method) & (drafted["k"] == k)]
            what = f"{method} at batch size {batch_size}, k {k}"
            if sorted(timed["round"]) != sorted(base["round"]):
                raise UserError(
                    f"{what} has rounds {sorted(timed['round'])} but the baseline (k = 0) has "
                    f"{sorted(base['round'])}: a speedup needs both in each round of one run."
                )
            taken = steps.loc[
                (steps["method"] == method) & (steps["batch_size"] == batch_size) & (steps["k"] == k)
            ]
            if taken.empty:
                raise UserError(f"{what} was timed but has no step records; measure it again.")
            counts = drafts.get(method)
            # l_d = k: a chain drafts and verifies the same positions, and then kappa = a.
            growth = (
                metrics.compute_growth(counts["m_s"], counts["m_p"], k, base_parameters)
                if counts
                else math.nan
            )
            rows.append(
                {"batch_size": batch_size, "k": k, "method": method, "p": growth}
                | _numbers(timed, base, kappa=metrics.tokens_per_step(taken))
            )
        for k in sorted({int(k) for k in drafted["k"]}) or [0]:
            if not base.empty:
                rows.append(
                    {"batch_size": batch_size, "k": k, "method": BASELINE, "p": 1.0}
                    | _numbers(base, base, kappa=1.0)
                )
    return pd.DataFrame(rows).assign(base_model=base_model, **machine)


def _answer_tokens(throughput: pd.DataFrame, steps: pd.DataFrame) -> pd.Series:
    """Mean tokens of the baseline's answers in each record's round: one yardstick for all methods."""
    plain = steps.loc[steps["method"] == BASELINE]
    answers = plain.groupby(["batch_size", "round", "request"])["committed"].sum() + 1
    mean = answers.groupby(["batch_size", "round"]).mean()
    found = mean.reindex(pd.MultiIndex.from_arrays([throughput["batch_size"], throughput["round"]]))
    if found.isna().any():
        batch_size, at = found.index[found.isna()][0]
        raise UserError(
            f"round {at} at batch size {batch_size} has no step records of the baseline (k = 0); "
            "measure it again."
        )
    return found.set_axis(throughput.index)


def _numbers(timed: pd.DataFrame, base: pd.DataFrame, kappa: float) -> dict[str, Any]:
    tps = metrics.spread(timed["tps"].tolist())
    gain = metrics.speedup(timed["tps"].tolist(), base["tps"].tolist())
    return {
        "kappa": kappa,
        "tps": tps.median,
        "tps_min": tps.min,
        "tps_max": tps.max,
        "speedup": gain.median,
        "speedup_min": gain.min,
        "speedup_max": gain.max,
        "theta": metrics.theta(kappa, gain.median),
        "tps_decode": metrics.spread(timed["tps_decode"].tolist()).median,
        "requests": min(timed["requests"].tolist()),
        "rounds": len(timed),
    }


def _one_machine(records: pd.DataFrame) -> dict[str, Any]:
    """The hardware columns that all records share; UserError naming two that differ."""
    found = records.loc[:, _MACHINE].drop_duplicates()
    if len(found) > 1:
        one, two = (
            ", ".join(f"{name} {row[name]}" for name in _MACHINE) for row in found.head(2).to_dict("records")
        )
        raise UserError(
            "one table holds measurements from two machines or settings, and their speeds do not "
            f"compare. One: {one}. The other: {two}. Measure all rows again on one of them."
        )
    if found.empty:
        raise UserError("the throughput records are empty; run the measuring stage first.")
    return found.to_dict("records")[0]


def _sorted(table: pd.DataFrame, keys: Sequence[str], paper: pd.DataFrame) -> pd.DataFrame:
    """By numbers, then by the last key in the paper's order, then names the paper lacks."""
    name = keys[-1]
    order = {value: i for i, value in enumerate(dict.fromkeys(paper[name]))}
    place = table[name].map(lambda value: order.get(value, len(order)))
    numbers = list(keys[:-1])
    placed = table.assign(_place=place).sort_values([*numbers, "_place", name], kind="stable")
    return placed.drop(columns="_place").reset_index(drop=True)


# --- written forms ---------------------------------------------------------------------------


def write_csv(table: pd.DataFrame, path: Path | str) -> None:
    """Write a table with fixed decimals per column and LF ends: same numbers, same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.to_dict("records"):
        writer.writerow([_text(value, _FORMATS.get(str(name))) for name, value in row.items()])
    write_text(text.getvalue(), path)


def write_text(text: str, path: Path | str) -> None:
    """Write UTF-8 text with LF ends, making the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def _text(value: Any, form: str | None) -> str:
    if isinstance(value, float) and math.isnan(value):
        return ""
    return format(value, form) if form else str(value)


def compare(ours: pd.DataFrame, paper: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Our rows and the paper's, matched on `keys`, one row each; sorted like build_table*.

    Columns: keys; label, where ours have one; status ("measured" | "not run" | "not in the paper");
    kappa, speedup, and theta with _paper and _difference (ours - paper's) variants; speedup_min,
    speedup_max; tps and tps_paper (another machine's, so no difference). What is missing is NaN. The
    base LLM is not matched: the caller says which one each side used.
    """
    keys = list(keys)
    values = ["kappa", "tps", "speedup", "theta"]
    # The paper prints theta in Table 3 only; it follows from the other two.
    printed = paper.assign(theta=paper["kappa"] / paper["speedup"]).loc[:, [*keys, *values]]
    label = [name for name in ("label",) if name in ours]
    both = ours.loc[:, [*keys, *label, *values, "speedup_min", "speedup_max"]].merge(
        printed, on=keys, how="outer", suffixes=("", "_paper"), indicator="status"
    )
    words = {"both": "measured", "left_only": "not in the paper", "right_only": "not run"}
    both["status"] = both["status"].astype(str).map(lambda value: words[value])
    for name in ("kappa", "speedup", "theta"):
        both[f"{name}_difference"] = both[name] - both[f"{name}_paper"]
    both = _sorted(both, keys, paper)
    return both.loc[
        :,
        [
            *(*keys, *label, "status", "kappa", "kappa_paper", "kappa_difference"),
            *("speedup", "speedup_min", "speedup_max", "speedup_paper", "speedup_difference"),
            *("theta", "theta_paper", "theta_difference", "tps", "tps_paper"),
        ],
    ]


def _display(compared: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Headers and cells as people read them."""
    keys = [name for name in compared.columns[: list(compared.columns).index("status")] if name != "label"]
    headers = [name.replace("_", " ") for name in keys]
    for name in ("κ", "speedup", "θ"):
        headers += [name, f"{name}, paper", "difference"]
    headers += ["tokens/s", "tokens/s, paper"]
    rows = []
    for row in compared.to_dict("records"):
        absent = "not run" if row["status"] == "not run" else "–"
        cells = [str(row[name]) for name in keys]
        if isinstance(row.get("label"), str):
            cells[keys.index("method")] = row["label"]
        if str(row.get("method", "")).endswith(AUTO):
            cells[keys.index("k")] = f"auto, 0 to {row['k']}"
        for name in ("kappa", "speedup", "theta"):
            ours = _cell(row[name], ".2f", absent)
            if name == "speedup" and row["status"] != "not run":
                ours += f" ({row['speedup_min']:.2f} to {row['speedup_max']:.2f})"
            cells += [
                ours,
                _cell(row[f"{name}_paper"], ".2f", "–"),
                _cell(row[f"{name}_difference"], "+.2f", "–"),
            ]
        cells += [_cell(row["tps"], ".1f", absent), _cell(row["tps_paper"], ".0f", "–")]
        rows.append(cells)
    return headers, rows


def _cell(value: float, form: str, absent: str) -> str:
    return absent if math.isnan(value) else format(value, form)


NOTE = (
    "Speedup: ratio of the median rounds (smallest to largest paired round). κ: tokens per step, "
    "the base LLM's own token included. θ = κ / speedup, lower is better. Drafts are chains. "
    "The paper's numbers are another machine's and another base LLM's: compare ratios, not "
    "tokens/s."
)


def to_markdown(compared: pd.DataFrame, *, title: str, caption: str, note: str = NOTE) -> str:
    """A compare() result as Markdown. caption: what ours was measured on (base LLM, hardware)."""
    headers, rows = _display(compared)
    keys = headers.index("κ")
    lines = [f"### {title}", "", caption, ""]
    lines.append("| " + " | ".join(headers) + " |")
    lines.append("|" + "|".join([" --- "] * keys + [" ---: "] * (len(headers) - keys)) + "|")
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([*lines, "", note, ""])


def to_great_table(compared: pd.DataFrame, *, title: str, caption: str, note: str = NOTE) -> GT:
    """The same as HTML for a notebook: a great_tables GT, measured rows in bold."""
    from great_tables import GT, loc, style

    headers, rows = _display(compared)
    names = [f"c{i}" for i in range(len(headers))]  # "difference" stands there three times
    first = headers.index("κ")
    table = GT(pd.DataFrame(rows, columns=names), id="table")
    table = table.cols_label(cases=dict(zip(names, headers, strict=True)))
    table = table.tab_header(title=title, subtitle=caption).tab_source_note(note)
    table = table.cols_align("left", columns=names[:first])
    table = table.cols_align("right", columns=names[first:])
    run = [i for i, status in enumerate(compared["status"]) if status != "not run"]
    return table.tab_style(style.text(weight="bold"), loc.body(rows=run)).tab_style(
        style.text(color="#666666"),
        loc.body(rows=[i for i in range(len(rows)) if i not in run]),
    )


# --- metrics.json ----------------------------------------------------------------------------


def collect_metrics(
    *,
    table1: pd.DataFrame | None = None,
    table2: pd.DataFrame | None = None,
    extra: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """One flat dict for `dvc metrics show`: table1_specformer_b1_k4_speedup and the like.

    extra: more numbers under their own names. Raises ValueError for one that is no finite number
    or whose name is taken.
    """
    found: dict[str, float] = {}
    for prefix, table, name in (("table1", table1, "method"), ("table2", table2, "variant")):
        for row in [] if table is None else table.to_dict("records"):
            stem = f"{prefix}_{row[name]}_b{row['batch_size']}_k{row['k']}"
            for value in ("kappa", "tps", "speedup", "theta"):
                found[f"{stem}_{value}"] = round(float(row[value]), 4)
    for name, value in (extra or {}).items():
        if isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"metric {name} must be a finite number, got {value!r}")
        if name in found:
            raise ValueError(f"metric {name} is already there")
        found[name] = value if isinstance(value, int) else round(float(value), 4)
    return dict(sorted(found.items()))


def write_metrics(values: Mapping[str, float], path: Path | str) -> None:
    """Write collect_metrics() as JSON with sorted keys."""
    write_text(json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n", path)
