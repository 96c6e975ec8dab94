"""The README's numbers, filled in from the files that the pipeline wrote; nothing is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from specformer.errors import UserError
from specformer.hardware import caption
from specformer.roofline import A100
from specformer.tables import AUTO, BASELINE, summarise

ENGINE = ["batch_size", "k", "tps_median", "ratio_to_transformers", "ratio_to_vllm", "theta", "efficiency"]
COLUMNS = ["batch_size", "k", "kappa", "tps", "speedup", "speedup_min", "speedup_max", "theta"]


def markdown(table: pd.DataFrame) -> str:
    """A plain Markdown table of strings and numbers as they are."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).values.tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(results: Path, number: int, first: str) -> str:
    """Table `number` of a profile, the columns that a README has room for."""
    rows = pd.read_csv(results / "tables" / f"table{number}.csv", dtype=str, keep_default_na=False)
    rounds = rows["rounds"].iloc[0]
    return markdown(rows.loc[:, [first, *COLUMNS]]) + f"\n\n{machine(results)}; {rounds} rounds."


def machine(results: Path) -> str:
    """What the benchmark ran on."""
    return caption(pd.read_parquet(results / "throughput.parquet").iloc[0].to_dict())


def engine(results: Path) -> str:
    """The engine's benchmark: every system at every batch size."""
    rows = pd.read_csv(results / "engine_bench.csv")
    rows = rows.sort_values(["batch_size", "ratio_to_transformers"], ascending=[True, False], kind="stable")
    one = rows.iloc[0]
    shown = pd.DataFrame(rows, columns=["system", *ENGINE, "draft_share"])
    shown["tps_median"] = [f"{value:.1f}" for value in shown["tps_median"]]
    for column in [*ENGINE[3:], "draft_share"]:
        shown[column] = [f"{value:.2f}" if value == value else "" for value in shown[column]]
    kernels = ", C++ kernels" if one.kernels == "native" else ""
    under = f"{one.cpu}, {one.threads} threads, {one.dtype}{kernels}; {one.rounds} rounds."
    return f"{markdown(shown)}\n\n{under}"


def rivals(results: Path) -> str:
    """Every draft at the k that all have, from the profile cpu-full beside this one; speedups with spread."""
    full = results.parent / "cpu-full"
    rows = pd.read_csv(full / "tables" / "table1.csv")
    k = rows.groupby("k")["label"].nunique().idxmax()
    chosen = rows["method"].str.endswith(AUTO)
    own: Any = rows.loc[((rows["k"] == k) | chosen) & (rows["method"] != BASELINE)]
    speeds = {
        f"batch {size}": part.set_index("label").apply(
            lambda r: f"{r.speedup:.2f} ({r.speedup_min:.2f} to {r.speedup_max:.2f})", axis=1
        )
        for size, part in own.groupby("batch_size")
    }
    shown = pd.DataFrame(
        {"tokens per step": own.groupby("label")["kappa"].mean().map("{:.2f}".format), **speeds}
    )
    shown = shown.loc[list(dict.fromkeys(own["label"]))].reset_index(names="draft")
    under = f"Speedup over k = 0, k = {k} (auto: at most {rows['k'].max()}); {machine(full)}; "
    return f"{markdown(shown)}\n\n{under}{rows['rounds'].iloc[0]} rounds."


def study(results: Path) -> str:
    """What each change to the draft and its training is worth, from the profile cpu-study beside this one."""
    rows = pd.read_csv(results.parent / "cpu-study" / "draft_quality.csv")
    columns = ["variant", "tokens_per_step", "lowest", "highest", "equal_time", "difference"]
    found = summarise(rows)
    alike = found.loc[~found["certain"] & (found["variant"] != "specformer"), "variant"]
    shown = found.loc[:, columns]
    for column in shown.columns[1:]:
        shown[column] = [f"{value:.3f}" for value in shown[column]]
    one = rows.iloc[0]
    under = f"{rows.steps.iloc[0]} steps, {rows.seed.nunique()} seeds; {caption(one.to_dict())}."
    near = f"No different from specformer beyond the spread over seeds: {', '.join(alike) or 'none'}."
    return f"{markdown(shown)}\n\n{near} {under}"


def long_training(results: Path) -> str:
    """What longer training reaches, from the profile cpu-long beside this one."""
    rows: Any = pd.read_csv(results.parent / "cpu-long" / "draft_quality.csv")
    told = ", ".join(
        f"{row.variant} {row.tokens_per_step:.2f} tokens per step ({row.tokens / 1e6:.1f}M tokens in "
        f"{row.seconds / 60:.0f} minutes)"
        for row in rows.itertuples()
    )
    steps = rows.steps.iloc[0]
    return f"After {steps:,} steps of the profile `cpu-long`: {told}, the base's hidden states not counted."


def training(results: Path) -> str:
    """What the training loop saves against a plain one."""
    record = json.loads((results / "training_bench.json").read_text())
    loss = json.loads((results / "loss_bench.json").read_text())
    low, high = record["throughput_ratio_spread"]
    return (
        f"A training step handles {record['throughput_ratio']:.1f} times the plain loop's tokens per second "
        f"({low:.1f} to {high:.1f}; {record['throughput_ratio_cached']:.1f} times with the base's hidden "
        f"states read from disk, {record['throughput_ratio_profile']:.1f} times with a draft vocabulary of "
        f"{record['vocabulary']:,} besides, as the profile trains), with {record['peak_memory_ratio']:.2f} "
        f"of its peak memory: {record['computed_peak_gib']:.2f} GiB against {record['plain_peak_gib']:.2f}, "
        f"{record['computed_tensors_peak_gib']:.2f} of them tensors (the memory formula says "
        f"{record['estimated_peak_gib']:.2f}). The chunked head loss alone takes "
        f"{loss['memory_ratio']:.2f} of the plain one's memory and {loss['time_ratio']:.2f} of its time. "
        f"{caption(record['machine'])}."
    )


def costs(results: Path) -> str:
    """What `make reproduce` took where these results come from."""
    stages = json.loads((results / "costs.json").read_text()).values()
    minutes = sum(s["seconds"] for s in stages) / 60
    memory = max(s["peak_memory_gib"] for s in stages)
    disk = sum(s["disk_gib"] for s in stages)
    return (
        f"`make reproduce` took {minutes:.0f} minutes after the packages were installed, at most "
        f"{memory:.1f} GiB of memory and {disk:.1f} GiB of disk besides them, on {machine(results)} "
        f"(`specformer plan` shows it stage by stage)."
    )


def headline(results: Path) -> str:
    """What was found, in two sentences."""
    one = pd.read_csv(results / "tables" / "table1.csv")
    two = pd.read_csv(results / "tables" / "table2.csv").set_index("variant")
    rho = json.loads((results / "scale.json").read_text())["rho"]
    drafted = one.loc[one["method"] != BASELINE]
    chosen = drafted["method"].str.endswith(AUTO)
    runs = {
        name: ", ".join(
            f"{r.speedup:.2f}x at batch {r.batch_size}" + ("" if name.endswith(AUTO) else f" (k = {r.k})")
            for r in best.itertuples()
        )
        for name, own in drafted.groupby("method", sort=False)
        for best in [own.loc[own.groupby("batch_size").speedup.idxmax()]]
    }
    told = "; ".join(f"{name} {text}" for name, text in runs.items())
    lost: Any = drafted.loc[~chosen].groupby("batch_size")["speedup"].max()
    lost = lost[lost < 1]
    from_batch = f"from batch {lost.index[0]} on" if len(lost) else "in full at every batch size"
    self_distilled, plain = two.loc["self_distill"], two.loc["no_self_distill"]
    return (
        f"Self-distilled, the draft gives {self_distilled.kappa:.2f} tokens per step on unseen prompts, "
        f"without self-distillation {plain.kappa:.2f} (speedup {self_distilled.speedup:.2f}x against "
        f"{plain.speedup:.2f}x at batch {self_distilled.batch_size}). Best speedup over k = 0 at each batch "
        f"size: {told}. The paper's 1.8x at every batch size is not reproduced here: this machine's rho is "
        f"{rho:.0f} (its A100's: {A100.rho:.0f}), so verifying k + 1 tokens a row is paid for {from_batch} "
        f"(Figure 1), and the draft of an hour accepts little."
    )


def render(text: str, results: Path) -> str:
    """README text with every marked block filled from `results`. Raises UserError for an unknown block, and
    for a result that is missing."""
    blocks: dict[str, Callable[[], str]] = {
        "costs": lambda: costs(results),
        "headline": lambda: headline(results),
        "table1": lambda: table(results, 1, "method"),
        "table2": lambda: table(results, 2, "variant"),
        "engine": lambda: engine(results),
        "rivals": lambda: rivals(results),
        "study": lambda: study(results),
        "training": lambda: training(results),
        "long": lambda: long_training(results),
    }

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in blocks:
            raise UserError(f"the README marks an unknown block {name!r}; known: {', '.join(blocks)}")
        try:
            return f"<!-- specformer:{name} -->\n{blocks[name]()}\n<!-- /specformer -->"
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} is missing: run `dvc repro` first") from error

    return re.sub(r"<!-- specformer:(\w+) -->\n.*?<!-- /specformer -->", fill, text, flags=re.DOTALL)
