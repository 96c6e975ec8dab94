"""What the report says of the paper's claims, from the tables alone."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import pandas as pd

from specformer.tables import paper_table

if TYPE_CHECKING:
    from great_tables import GT

METHOD = "specformer"
STEADY = 0.15
"""How far the speedup may move between batch sizes, as a share of its largest value, to be called steady."""
PACKAGES = ("specformer", "torch", "transformers", "accelerate", "dvc")


def claims(table1: pd.DataFrame, table2: pd.DataFrame) -> pd.DataFrame:
    """The paper's claims that Tables 1 and 2 can speak to.

    table1, table2: as `tables.build_table1` and `build_table2` make them. Returns a row a claim: claim,
    paper and ours (the numbers, in words), holds (bool: what the claim says is true of our numbers; how far
    they are from the paper's is in the tables). The claim on batch sizes needs two of them, else it is left
    out.
    """
    paper1, paper2 = paper_table(1), paper_table(2).set_index("variant")
    ours1 = table1.loc[table1["method"] == METHOD]
    theirs1 = paper1.loc[paper1["method"] == METHOD]
    ours2 = table2.set_index("variant")
    rows = [
        (
            "Drafting is faster than plain decoding at every batch size and k.",
            f"speedup {_range(theirs1['speedup'])}",
            f"speedup {_range(ours1['speedup'])}",
            bool((ours1["speedup"] > 1).all()),
        )
    ]
    if ours1["batch_size"].nunique() > 1:
        drops, paper_drops = _movement(ours1), _movement(theirs1)
        rows.append(
            (
                "The speedup is the same at small and large batch.",
                f"moves by {paper_drops:.0%}, batch {_span(theirs1['batch_size'])}",
                f"moves by {drops:.0%}, batch {_span(ours1['batch_size'])}",
                drops <= STEADY,
            )
        )
    without, with_it = ours2.loc["no_self_distill"], ours2.loc["self_distill"]
    rows += [
        (
            "Self-distillation yields more tokens per step.",
            f"{paper2.loc['self_distill', 'kappa']:.2f} against {paper2.loc['no_self_distill', 'kappa']:.2f}",
            f"{with_it['kappa']:.2f} against {without['kappa']:.2f}",
            bool(with_it["kappa"] > without["kappa"]),
        ),
        (
            "Without self-distillation there is no speedup.",
            f"{paper2.loc['no_self_distill', 'speedup']:.2f}",
            f"{without['speedup']:.2f}",
            bool(without["speedup"] <= 1),
        ),
        (
            "With self-distillation there is one.",
            f"{paper2.loc['self_distill', 'speedup']:.2f}",
            f"{with_it['speedup']:.2f}",
            bool(with_it["speedup"] > 1),
        ),
    ]
    return pd.DataFrame(rows, columns=["claim", "paper", "ours", "holds"])


def claims_table(found: pd.DataFrame, *, title: str, caption: str) -> GT:
    """`claims()` as HTML for a notebook."""
    from great_tables import GT

    shown = found.assign(holds=["holds" if holds else "does not hold" for holds in found["holds"]])
    table = GT(shown, id="claims").tab_header(title=title, subtitle=caption)
    return table.cols_label(
        cases={"claim": "claim", "paper": "the paper", "ours": "ours", "holds": "verdict"}
    )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _movement(rows: pd.DataFrame) -> float:
    """The largest spread of the speedup over batch sizes at one k, as a share of its largest value."""
    by_k = rows.groupby("k")["speedup"].agg(["min", "max"])
    return max(1 - low / high for low, high in zip(by_k["min"], by_k["max"], strict=True))


def _range(values: pd.Series) -> str:
    return f"{values.min():.2f} to {values.max():.2f}"


def _span(values: pd.Series) -> str:
    return f"{values.min()} to {values.max()}"
