"""The drafts of a profile and what sets each apart: SpecFormer, its variants, one change each, and baselines.

All are trained by one loop on the same dialogues and steps, over seeds. Finished runs are kept, so a killed
study goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specformer import shards
from specformer.base import Base, resolve_hooks
from specformer.drafts import Draft, new_draft
from specformer.errors import UserError
from specformer.settings import Settings
from specformer.target import Target
from specformer.training import LOG, Row, train

if TYPE_CHECKING:
    from specformer.pipeline import Run

PAPER: dict[str, Any] = {"soft_labels": 0, "position_weights": 1.0}
"""What the paper's drafts learn from: the text's own tokens, all draft positions alike."""


@dataclass(frozen=True)
class Variant:
    """A draft to train. kind: its registered name; draft: what differs from the profile's section `draft`;
    learns: from PAPER; answers: whose it learns from, "distilled" (the base's own) or "reference"."""

    kind: str = "specformer"
    draft: Mapping[str, Any] = field(default_factory=dict)
    learns: Mapping[str, Any] = field(default_factory=dict)
    answers: str = "distilled"


def variants(settings: Settings) -> dict[str, Variant]:
    """Every draft that the settings can train, by name; a single change against `specformer`, but for `plus`
    and the baselines."""
    known = {
        "specformer": Variant(),
        "specformer_no_self_distill": Variant(answers="reference"),
        "causal_draft_attention": Variant(draft={"draft_attention": "causal"}),
        "no_positional_ffn": Variant(draft={"positional": "embedding"}),
        "larger": Variant(draft={"layers": settings.draft.layers + 1}),
        "whole_vocabulary": Variant(draft={"vocabulary": 0}),
        "anchor_token_positional": Variant(draft={"anchor_token": "positional"}),
        "anchor_token_context": Variant(draft={"anchor_token": "context"}),
        "soft_labels": Variant(learns={"soft_labels": 8}),
        "decaying_weights": Variant(learns={"position_weights": 0.7}),
        "acceptance_aware_weights": Variant(learns={"position_weights": "acceptance"}),
    }
    if settings.plus:
        learns = settings.plus.model_dump()
        known["specformer_plus"] = Variant(draft={"anchor_token": learns.pop("anchor_token")}, learns=learns)
    for name in settings.baselines:
        recipe = Draft.kinds[name].recipe
        draft = {"small_llm": settings.small_llm} if name == "small_llm" else {}
        known[name] = Variant(name, draft, {key: recipe[key] for key in PAPER if key in recipe})
    return known


@dataclass
class Course:
    """What the drafts of a profile are trained with. answers: "distilled" and "reference" rows, read when
    needed; validation: the base's own answers; names: the drafts that share the base's hidden states in
    `hidden` (a folder for each kind of answers)."""

    base: Base
    target: Target
    settings: Settings
    answers: Mapping[str, Sequence[Row]]
    validation: Sequence[Row]
    names: Sequence[str]
    hidden: Path

    def variant(self, name: str) -> Variant:
        """Raises UserError for a draft that the settings do not know."""
        known = variants(self.settings)
        if name not in known:
            raise UserError(f"{name!r} is no draft of this profile: {', '.join(known)}")
        return known[name]

    def start(self, name: str, seed: int) -> Draft:
        """An untrained draft."""
        variant, draft = self.variant(name), self.settings.draft
        common = {"draft_length", "vocabulary", "init"}
        options = draft.model_dump(include=None if variant.kind == "specformer" else common)
        options |= {"hooks": self._hooks(name), **variant.draft}
        return new_draft(self.base, variant.kind, self.answers[variant.answers], seed=seed, **options)

    def train(self, name: str, seed: int, folder: Path) -> dict[str, Any] | None:
        """Train a draft into `folder`, or go on; one that is finished is kept. Returns the loop's summary,
        None for a draft that has nothing to train."""
        variant, draft = self.variant(name), self.start(name, seed)
        if not draft.trainable:
            if os.environ.get("RANK", "0") == "0":  # one writer, of however many processes
                draft.save_pretrained(folder)
            return None
        sharing = {other: self.variant(other) for other in self.names}
        return train(
            self.base,
            draft,
            self.answers[variant.answers],
            self.validation,
            folder,
            **self.settings.train.model_dump(),
            **PAPER | dict(variant.learns),
            seed=seed,
            target=self.target,
            hidden_dir=self.hidden / variant.answers,
            hidden_others=[
                (self._hooks(other), int(found.learns.get("soft_labels", 0)))
                for other, found in sharing.items()
                if found.answers == variant.answers
            ],
        )

    def _hooks(self, name: str) -> tuple[int, ...]:
        kind, layers = self.variant(name).kind, self.base.num_layers
        if kind == "specformer":
            return resolve_hooks(self.settings.draft.hooks, layers)
        return Draft.kinds[kind].default_hooks(layers)


def open_course(run: Run, base: Base | None = None) -> Course:
    """What the stages before have made for training. Raises UserError naming the stage of what is missing."""
    base, settings = base or run.load_base(), run.settings
    dialogues = {
        split: shards.read_table(run.require(run.paths.corpus / f"{split}.parquet", "corpus"))
        for split in ("train", "validation")
    }
    distilled = run.require(run.paths.distilled / "train", "distill")
    rows = shards.read_rows(distilled, dialogues["train"])
    return Course(
        base,
        Target(base, settings.train.max_length),
        settings,
        {
            "distilled": rows,
            "reference": shards.read_rows(run.paths.reference / "train", rows),  # the same prompts
        },
        shards.read_rows(run.paths.distilled / "validation", dialogues["validation"]),
        (*settings.study.variants, *settings.baselines),
        run.paths.data / "hidden",
    )


def training_log(folders: Mapping[tuple[str, int], Path]) -> pd.DataFrame:
    """The logs of trained drafts as a table, a row a step.

    folders: (variant, seed) -> its folder. Columns: variant, seed, step, tokens, loss, lr, seconds (of
    training, the base's hidden states not counted); at validations also tokens_per_step and accuracy_1..,
    the share of right tokens at each draft position.
    """
    shown = ("step", "tokens", "loss", "lr", "seconds", "tokens_per_step")
    rows = []
    for (name, seed), folder in folders.items():
        for text in (folder / LOG).read_text().splitlines():
            line = json.loads(text)
            row = {"variant": name, "seed": seed, **{key: line[key] for key in shown if key in line}}
            # a step's accuracy on its own batch is a by-product: what is kept is the validation's
            accuracy = line.get("validation", {}).get("accuracy", [])
            rows.append(row | {f"accuracy_{j}": share for j, share in enumerate(accuracy, 1)})
    return pd.DataFrame(rows)


def compare(log: pd.DataFrame, machine: Mapping[str, Any]) -> pd.DataFrame:
    """`training_log`'s rows -> a row for each variant and seed, in the order of their variants.

    Columns: variant, seed, steps, tokens, seconds, tokens_per_step (best validation), equal_time (best
    validation within the time of the fastest variant, each at the pace of its least disturbed seed),
    accuracy_1.. (last validation), and those of `machine`.
    """
    found, pace, steps = [], {}, {}
    by_run: Any = log.groupby(["variant", "seed"], sort=False)
    for (name, seed), own in by_run:
        last = own.iloc[-1]
        # machines are shared: another's load would pass for a slow variant
        pace[name] = min(pace.get(name, np.inf), last["seconds"] / last["step"])
        steps[name] = min(steps.get(name, np.inf), last["step"])
        found.append((name, seed, own.dropna(subset="tokens_per_step")))
    shortest = min(pace[name] * steps[name] for name in pace)
    order = list(pace)
    rows = []
    for name, seed, own in sorted(found, key=lambda run: (order.index(run[0]), run[1])):
        best, last = np.maximum.accumulate(own["tokens_per_step"].to_numpy()), own.iloc[-1]
        rows.append(
            {
                "variant": name,
                "seed": seed,
                **{key: last[key] for key in ("step", "tokens", "seconds")},
                "tokens_per_step": float(best[-1]),
                # the best kept grows between validations: read it off the line through them
                "equal_time": float(np.interp(shortest / pace[name], own["step"], best)),
                **last.filter(like="accuracy_").dropna(),
                **machine,
            }
        )
    return pd.DataFrame(rows).rename(columns={"step": "steps"})
