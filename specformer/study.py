"""Which change to the draft or to its training is worth what: variants x seeds, same dialogues and steps.

One training loop for all; what differs is named in the settings. Finished runs are kept, so a killed study
goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specformer import hardware
from specformer.base import Base
from specformer.drafts import new_draft
from specformer.target import Target
from specformer.training import LOG, Row, train

PAPER: dict[str, Any] = {
    "draft_attention": "bidirectional",
    "positional": "ffn",
    "layers": 1,
    "anchor_token": "none",
    "vocabulary": 0,
    "soft_labels": 0,
    "position_weights": 1.0,
}
OF_THE_DRAFT = ("draft_attention", "positional", "layers", "anchor_token", "vocabulary")


def variants(vocabulary: int, plus: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name -> what differs from the paper's draft with a cut vocabulary: one change each, Table 4's first,
    then `plus`."""
    cut = {"vocabulary": vocabulary}
    return {
        "specformer, whole vocabulary": {},
        "specformer": cut,
        "causal draft attention": cut | {"draft_attention": "causal"},
        "no positional FFN": cut | {"positional": "embedding"},
        "larger": cut | {"layers": 2},
        "anchor token, positional": cut | {"anchor_token": "positional"},
        "anchor token, context": cut | {"anchor_token": "context"},
        "soft labels": cut | {"soft_labels": 8},
        "decaying weights": cut | {"position_weights": 0.7},
        "acceptance-aware weights": cut | {"position_weights": "acceptance"},
        "specformer_plus": cut | dict(plus),
    }


def run_folder(out_dir: Path, name: str, seed: int) -> Path:
    """Where `study` keeps the run of a variant and seed."""
    return out_dir / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def study(
    base: Base,
    target: Target,
    rows: Sequence[Row],
    validation: Sequence[Row],
    out_dir: Path,
    *,
    changes: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    draft: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train every variant with every seed and validate it; a row each, and the curves that led there.

    changes: name -> settings that differ from PAPER; draft: arguments of `new_draft`, options: of `train`.
    Columns: variant, seed, steps, tokens, seconds (of training, the base's hidden states not counted),
    tokens_per_step (best validation), equal_time (best validation within the time of the fastest variant,
    each at the pace of its least disturbed seed), accuracy_1.. (last validation, per position), machine.
    Columns of the curves, a row for each validation: variant, seed, step, tokens, seconds, tokens_per_step.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    most = max(int(change.get("soft_labels", 0)) for change in changes.values())
    # the variant that keeps the most of the base goes first: the others find it on disk
    order = sorted(changes, key=lambda name: int(changes[name].get("soft_labels", 0)) < most)
    logs = {}
    print(f"study: {len(changes)} variants x {len(seeds)} seeds on {len(rows)} dialogues", flush=True)
    for seed in seeds:
        for name in order:
            settings = PAPER | dict(changes[name])
            fresh = new_draft(
                base, "specformer", rows, **draft, seed=seed, **{key: settings[key] for key in OF_THE_DRAFT}
            )
            own = {key: value for key, value in settings.items() if key not in OF_THE_DRAFT}
            folder = run_folder(out_dir, name, seed)
            train(
                base,
                fresh,
                rows,
                validation,
                folder,
                **options,
                **own,
                seed=seed,
                target=target,
                hidden_dir=out_dir / "hidden",
            )
            lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
            logs[name, seed] = [line for line in lines if "validation" in line]
    rows_ = compare(logs, names=list(changes)).assign(**hardware.describe(base.dtype, base.device))
    shown = ("step", "tokens", "seconds", "tokens_per_step")
    curves = [
        {"variant": name, "seed": seed, **{key: line[key] for key in shown}}
        for (name, seed), lines in logs.items()
        for line in lines
    ]
    return rows_, pd.DataFrame(curves)


def compare(
    logs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], names: Sequence[str]
) -> pd.DataFrame:
    """Validation lines of each (variant, seed) -> the rows of `study`, in the order of `names`."""
    # machines are shared: another's load would pass for a slow variant
    pace: dict[str, float] = {}
    for (name, _), lines in logs.items():
        pace[name] = min(pace.get(name, np.inf), lines[-1]["seconds"] / lines[-1]["step"])
    shortest = min(pace[name] * lines[-1]["step"] for (name, _), lines in logs.items())
    found = []
    for (name, seed), lines in sorted(logs.items(), key=lambda item: (names.index(item[0][0]), item[0][1])):
        curve = np.maximum.accumulate([line["tokens_per_step"] for line in lines])
        found.append(
            {
                "variant": name,
                "seed": seed,
                "steps": lines[-1]["step"],
                "tokens": lines[-1]["tokens"],
                "seconds": lines[-1]["seconds"],
                "tokens_per_step": float(curve[-1]),
                # the best kept grows between validations: read it off the line through them
                "equal_time": float(
                    np.interp(shortest / pace[name], [line["step"] for line in lines], curve)
                ),
                **{f"accuracy_{j}": a for j, a in enumerate(lines[-1]["validation"]["accuracy"], 1)},
            }
        )
    return pd.DataFrame(found)
