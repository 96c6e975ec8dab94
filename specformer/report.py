"""What the report says of the paper's claims, from the tables alone, and the page that it is read on."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from specformer.tables import paper_table, write_text

if TYPE_CHECKING:
    from great_tables import GT

METHOD = "specformer"
RIVALS = ("hass", "eagle3")
FREE = 1.1
"""A pass that takes at most this much longer than one of a single token verifies its tokens for free."""
STEADY = 0.15
"""How far the speedup may move between batch sizes, as a share of its largest value, to be called steady."""
NEAR = 0.9
"""A speedup of at least this share of the paper's, in the same cell of the table, is as high."""
SHARED = 0.1
"""Weights of one draft position, as a share of those that all positions share, up to which they are few."""
PACKAGES = ("specformer", "torch", "transformers", "accelerate", "dvc")
VERDICTS = {True: "reproduced", False: "not reproduced", None: "not tested here"}


@dataclass(frozen=True)
class Check:
    """One thing that a claim says, asked of the tables.

    asks: the question, with its tolerance; paper, ours: the numbers, in words; holds: the answer, None where
    this run cannot tell, and `ours` then says what is missing; source: the file that the numbers are in.
    """

    asks: str
    paper: str
    ours: str
    holds: bool | None
    source: str


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. It is reproduced when all of its checks that this run can tell hold."""

    number: int
    text: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        told = [check.holds for check in self.checks if check.holds is not None]
        return VERDICTS[all(told) if told else None]


def claims(
    table1: pd.DataFrame,
    table2: pd.DataFrame,
    forwards: pd.DataFrame,
    architecture: dict[str, Any],
    table3: pd.DataFrame | None = None,
    table4: pd.DataFrame | None = None,
) -> list[Claim]:
    """The paper's six claims and what this run says of each.

    table1 to table4: as `tables.build_table1` ... make them, the last two None where they were not run;
    forwards: seconds of bare forward passes (columns batch_size, tokens_per_request, seconds), Figure 1's;
    architecture: m_s and m_p, weights.
    """
    return [
        Claim(1, "Batching uses up the idle compute that drafts are verified with.", (_budget(forwards),)),
        Claim(
            2,
            "SpecFormer drafts in one pass, with weights that the draft positions mostly share.",
            (_weights(architecture), _growth(table1)),
        ),
        Claim(
            3, "It decodes about 1.8 times as fast at every batch size, more than its rivals.", _speed(table1)
        ),
        Claim(4, "Without self-distillation there is no speedup.", _self_distillation(table2)),
        Claim(
            5,
            "Larger bases accept less, and lose less to the draft's own cost.",
            (_sizes(table3, "kappa"), _sizes(table3, "theta")),
        ),
        Claim(
            6,
            "Bidirectional draft attention helps a little, the positional FFN more, a larger draft most.",
            _ablations(table4),
        ),
    ]


def free_tokens(forwards: pd.DataFrame) -> pd.Series:
    """batch size -> the most tokens a request whose pass costs at most FREE times that of one token."""
    medians: Any = forwards.groupby(["batch_size", "tokens_per_request"])["seconds"].median()
    most = {
        batch_size: max(int(n) for n, seconds in own.droplevel(0).items() if seconds <= FREE * own.iloc[0])
        for batch_size, own in medians.groupby("batch_size")
    }
    return pd.Series(most)


def _budget(forwards: pd.DataFrame) -> Check:
    free = free_tokens(forwards)
    told = ", ".join(f"{n} at batch {b}" for b, n in free.items())
    return Check(
        f"Fewer tokens a request are free (a pass within {FREE:.0%} of one token's) the larger the batch.",
        "k <= rho / batch size",
        told,
        bool(free.is_monotonic_decreasing and free.iloc[-1] < free.iloc[0]) if len(free) > 1 else None,
        "figure1.csv",
    )


def _weights(architecture: dict[str, Any]) -> Check:
    shared, own = architecture["m_s"], architecture["m_p"]
    return Check(
        f"A draft position's own weights are at most {SHARED:.0%} of the shared ones.",
        "mostly shared",
        f"{own / 1e6:.2f}M a position, {shared / 1e6:.2f}M shared",
        own <= SHARED * shared,
        "architecture.json",
    )


def _growth(table1: pd.DataFrame) -> Check:
    """By how much p, the compute of a step, grows from the smallest to the largest k."""
    asks, grown = "A step's compute grows more with k with HASS and EAGLE-3.", {}
    if "p" in table1:
        for method in (METHOD, *RIVALS):
            by_k = table1.loc[table1["method"] == method].groupby("k")["p"].first()
            if len(by_k) > 1:
                grown[method] = float(by_k.iloc[-1] - by_k.iloc[0])
    if len(grown) < 2:
        return Check(asks, "", f"none of {', '.join(RIVALS)} was run", None, "table1.csv")
    told = ", ".join(f"{method} by {growth:.3f} of the base's" for method, growth in grown.items())
    holds = all(growth > grown[METHOD] for method, growth in grown.items() if method != METHOD)
    return Check(asks, "once for each token", told, holds, "table1.csv")


def _rivals(table1: pd.DataFrame) -> Check:
    """SpecFormer's speedup over each rival's in the same cell, the smallest and the largest."""

    def over(table: pd.DataFrame) -> dict[str, pd.Series]:
        by_method: Any = table.pivot_table(index=["batch_size", "k"], columns="method", values="speedup")
        return {name: (by_method[METHOD] / by_method[name]).dropna() for name in RIVALS if name in by_method}

    def told(found: dict[str, pd.Series]) -> str:
        return ", ".join(f"over {name} {_range(ratio)}" for name, ratio in found.items())

    ours, theirs = over(table1), over(paper_table(1))
    holds = all((ratio >= 1).all() for ratio in ours.values()) if ours else None
    missing = f"none of {', '.join(RIVALS)} was run"
    asks = "It is at least as fast as HASS and EAGLE-3 in every cell."
    return Check(asks, told(theirs), told(ours) or missing, holds, "table1.csv")


def _speed(table1: pd.DataFrame) -> tuple[Check, ...]:
    paper, keys = paper_table(1), ["batch_size", "k"]
    ours, theirs = (t.loc[t["method"] == METHOD].set_index(keys)["speedup"] for t in (table1, paper))
    cells = ours.index.intersection(theirs.index)
    high = Check(
        f"The speedup is at least {NEAR:.0%} of the paper's at the same batch size and k.",
        _range(theirs[cells]),
        _range(ours[cells]),
        bool((ours[cells] >= NEAR * theirs[cells]).all()) if len(cells) else None,
        "table1.csv",
    )
    faster = Check(
        "Drafting is faster than plain decoding in every cell.",
        _range(theirs),
        _range(ours),
        bool((ours > 1).all()),
        "table1.csv",
    )
    moves, paper_moves = _movement(ours), _movement(theirs)
    steady = Check(
        f"The speedup moves by at most {STEADY:.0%} between batch sizes.",
        f"by {paper_moves:.0%}, batch {_span(theirs)}",
        f"by {moves:.0%}, batch {_span(ours)}",
        moves <= STEADY if ours.index.get_level_values("batch_size").nunique() > 1 else None,
        "table1.csv",
    )
    return faster, high, steady, _rivals(table1)


def _self_distillation(table2: pd.DataFrame) -> tuple[Check, ...]:
    paper, ours = paper_table(2).set_index("variant"), table2.set_index("variant")
    (without, with_it), (paper_without, paper_with) = (
        (t.loc["no_self_distill"], t.loc["self_distill"]) for t in (ours, paper)
    )
    return (
        Check(
            "Self-distillation yields more tokens per step.",
            f"{paper_with['kappa']:.2f} against {paper_without['kappa']:.2f}",
            f"{with_it['kappa']:.2f} against {without['kappa']:.2f}",
            bool(with_it["kappa"] > without["kappa"]),
            "table2.csv",
        ),
        Check(
            "Without it drafting is no faster than plain decoding.",
            f"speedup {paper_without['speedup']:.2f}",
            f"speedup {without['speedup']:.2f}",
            bool(without["speedup"] <= 1),
            "table2.csv",
        ),
        Check(
            "With it drafting is faster.",
            f"speedup {paper_with['speedup']:.2f}",
            f"speedup {with_it['speedup']:.2f}",
            bool(with_it["speedup"] > 1),
            "table2.csv",
        ),
    )


def _sizes(table3: pd.DataFrame | None, column: str) -> Check:
    """Whether a column of Table 3 falls from the smallest to the largest base, averaged over its cells."""

    def ends(table: pd.DataFrame, order: Sequence[str]) -> list[float]:
        by_base: Any = table.pivot_table(index=["batch_size", "k"], columns="base_model", values=column)
        return [float(by_base.dropna()[name].mean()) for name in order]

    asks = f"{column} falls from the smallest base LLM to the largest."
    paper: Any = paper_table(3).loc[lambda table: table["k"] > 0]
    low, high = ends(paper, ("Qwen3-4B", "Qwen3-14B"))
    drafted = None if table3 is None else table3.loc[table3["k"] > 0].sort_values("base_parameters")
    if drafted is None or drafted["base_model"].nunique() < 2:
        return Check(asks, f"{low:.2f} to {high:.2f}", "only one base LLM was run", None, "table3.csv")
    names = list(dict.fromkeys(drafted["base_model"]))
    first, last = ends(drafted, (names[0], names[-1]))
    told = f"{first:.2f} with {names[0]} to {last:.2f} with {names[-1]}"
    return Check(asks, f"{low:.2f} to {high:.2f}", told, last < first, "table3.csv")


def _ablations(table4: pd.DataFrame | None) -> tuple[Check, ...]:
    """Whether each change of Table 4 moves kappa the paper's way, by more than seeds do."""
    paper: Any = paper_table(4).set_index("variant")["kappa"]
    asks = {
        "causal_draft_attention": "Causal draft attention costs kappa, beyond the spread over seeds.",
        "no_positional_ffn": "So does leaving out the positional FFN.",
        "larger": "A larger draft gains kappa, beyond the spread over seeds.",
    }
    ours = None if table4 is None else table4.set_index("variant")
    checks = []
    for variant, question in asks.items():
        theirs = float(paper[variant] - paper["specformer"])
        if ours is None:
            told, holds = "Table 4 was not run", None
        else:
            row = ours.loc[variant]
            told = f"{row['difference']:+.3f} ({row['kappa_min']:.3f} to {row['kappa_max']:.3f})"
            holds = bool(row["certain"]) and (row["difference"] > 0) == (theirs > 0)
        checks.append(Check(question, f"{theirs:+.2f}", told, holds, "table4.csv"))
    return tuple(checks)


def write_claims(found: Sequence[Claim], path: Path) -> None:
    """The ledger as JSON: number, text, verdict and checks of each claim."""
    records = [asdict(claim) | {"verdict": claim.verdict} for claim in found]
    write_text(json.dumps(records, indent=2) + "\n", path)


def claims_table(found: Sequence[Claim], *, title: str, caption: str) -> GT:
    """The ledger as HTML for a notebook: a group of rows for each claim."""
    from great_tables import GT

    rows = [
        {
            "claim": f"{claim.number}. {claim.text} {claim.verdict.upper()}",
            "asks": check.asks,
            "paper": check.paper,
            "ours": check.ours,
            "holds": {True: "yes", False: "no", None: "cannot tell"}[check.holds],
        }
        for claim in found
        for check in claim.checks
    ]
    table = GT(pd.DataFrame(rows), id="claims", groupname_col="claim")
    table = table.tab_header(title=title, subtitle=caption)
    return table.cols_label(
        cases={"asks": "what is asked", "paper": "the paper", "ours": "ours", "holds": "so?"}
    )


def write_page(notebook: Path, page: Path) -> None:
    """An executed notebook as one HTML file: text, tables and figures; no code, nothing fetched, and none of
    the warnings on stderr, which name paths of the machine."""
    import nbformat
    from nbconvert import HTMLExporter

    content = nbformat.read(notebook, as_version=4)
    for i, cell in enumerate(content.cells):
        cell.id = str(i)  # papermill's own cell has another name each time
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nothing = {f"{name}_url": "" for name in ("jquery", "require_js", "mathjax", "mermaid_js")}
    exporter = HTMLExporter(
        exclude_input=True,
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        embed_images=True,
        **nothing,
    )
    body, _ = exporter.from_notebook_node(content, {"metadata": {"name": "specformer"}})
    write_text(body, page)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _movement(speedup: pd.Series) -> float:
    """The largest spread of a speedup by (batch size, k) over batch sizes, as a share of its largest."""
    by_k = speedup.groupby("k").agg(["min", "max"])
    return max(1 - low / high for low, high in zip(by_k["min"], by_k["max"], strict=True))


def _range(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}" if len(values) else ""


def _span(speedup: pd.Series) -> str:
    sizes = speedup.index.get_level_values("batch_size")
    return f"{sizes.min()} to {sizes.max()}"
