"""A draft for others: its weights, a model card, and the code by which transformers decodes with it.

The card's numbers come from the files of the run that made the draft; each says from which.

There is no export to the layout of vLLM's `speculators` library (vllm-project/speculators): the configs of
its block drafts (DFlash, DSpark) and of EAGLE-3 cannot express SpecFormer. They describe whole decoder layers
of one `transformer_layer_config`, between a fusing Linear and a head, and have no field for

- a norm of its own for each hidden state that is read (Equation 7);
- an attention without feed-forward, with its own keys and values, before the draft's layers (Equation 8);
- weights that belong to one draft position (Equation 9): a DFlash block tells its places apart by mask tokens
  and RoPE, EAGLE-3 drafts token by token;
- draft attention over the l_d positions alone, without RoPE (Equation 10);
- the switches `anchor_token`, `positional` and `draft_attention`.

What they could hold: the hooks (`aux_hidden_state_layer_ids`), a cut vocabulary (`draft_vocab_size`, `d2t`),
the draft length (`block_size`) and the base (`verifier`, by name and architecture, without a fingerprint). Of
our other drafts `eagle3` comes near; theirs fuses exactly three hidden states.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from specformer import hub
from specformer.drafts.interface import CONFIG, WEIGHTS, Draft, DraftConfig, read_config
from specformer.errors import UserError
from specformer.sources import PACKAGES
from specformer.tables import write_text

CARD, SUMMARY, LOG = "README.md", "summary.json", "log.jsonl"
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"
CODE = '''"""Decodes with the draft of this repository, for the base LLM that its card names:
`model.generate(..., custom_generate=<this repository>, trust_remote_code=True)`."""

from specformer.hf import generate  # noqa: F401
'''
SETTINGS = ("soft_labels", "position_weights", "anchor_fraction", "lr", "epochs", "sequences_per_step")
"""Of the training's settings those that a card shows, besides the draft's own."""


class Metric(NamedTuple):
    """One number of a card. measured: on what and how; file: where it was read."""

    name: str
    value: float
    measured: str
    file: str


def read_summary(source: Path) -> dict[str, Any]:
    """What `training.train` wrote when it had finished; UserError when it has not."""
    try:
        return json.loads((source / SUMMARY).read_text())
    except FileNotFoundError:
        raise UserError(f"{source} holds no finished training run: run `dvc repro` first") from None


def training_metrics(source: Path, summary: Mapping[str, Any]) -> list[Metric]:
    """Tokens per step on the validation dialogues, and there the share of right tokens at each position."""
    best = summary["tokens_per_step"]
    found = [Metric("tokens per step", best, "on unseen dialogues (validation)", SUMMARY)]
    lines = [json.loads(line) for line in (source / LOG).read_text().splitlines()]
    saved = next(line for line in lines if line.get("tokens_per_step") == best)
    for j, share in enumerate(saved["validation"]["accuracy"]):
        measured = f"token {j + 1} of a draft is the base's (validation, step {saved['step']})"
        found.append(Metric(f"accuracy {j + 1}", share, measured, LOG))
    return found


def table_metrics(table: Path, file: str, method: str, base_name: str) -> list[Metric]:
    """The best speedup over k = 0 at each batch size of a profile's Table 1, with its tokens per step.

    table: the CSV, `file` its name for people; nothing where it is missing or has no such method and base.
    """
    import pandas as pd

    if not table.exists():
        return []
    rows = pd.read_csv(table)
    rows = rows[(rows["method"] == method) & (rows["base_model"] == base_name)]
    found = []
    for row in rows.loc[rows.groupby("batch_size")["speedup"].idxmax()].to_dict("records"):
        measured = f"over k = 0 at batch {row['batch_size']}, k = {row['k']}, kappa {row['kappa']:.3f}; "
        place = row["cpu"] if row["accelerator"] == "none" else row["accelerator"]
        found.append(Metric("speedup", row["speedup"], f"{measured}{place}, {row['dtype']}", file))
    return found


def card(
    config: DraftConfig,
    summary: Mapping[str, Any],
    *,
    data: str,
    metrics: Sequence[Metric],
    made_by: Mapping[str, str] | None = None,
) -> str:
    """The model card (Markdown behind YAML): what the draft is for, what made it, what it was seen to do, and
    under which licences.

    summary: of `read_summary`; data: where its dialogues and their answers come from, and their licence, in
    words; made_by: more that is known of its making, such as the command.
    """
    settings, name = summary["settings"], config.base_name
    package = PACKAGES.get(name.removeprefix("package:"))
    kept = {
        "kind": config.kind,
        "hidden states read": ", ".join(map(str, config.hooks)),
        "anchor token": config.anchor_token,
        "draft vocabulary": config.vocabulary or "whole",
        **{key.replace("_", " "): settings[key] for key in SETTINGS if key in settings},
    }
    minutes = (summary["seconds"] + summary.get("hidden_seconds", 0)) / 60
    made = {
        "base LLM": f"{name} (fingerprint {config.base_fingerprint})",
        "specformer": config.specformer_version,
        "data": data,
        "dialogues, tokens": f"{summary['dialogues']:,}, {summary['tokens']:,}",
        "seed": settings["seed"],
        "steps, minutes": f"{summary['steps']:,}, {minutes:.0f}",
        "settings": ", ".join(f"{key}: {value}" for key, value in kept.items()),
        **(made_by or {}),
    }
    header = ModelCardData(
        # where only the base's card knows the licence, the hub wants to be told so
        license=package.licence.lower() if package else "other",
        license_name=None if package else "that-of-the-base-model",
        base_model=name if hub.is_name(name) else None,
        library_name="specformer",
        tags=["speculative-decoding", "custom_generate"],
        model_name=f"specformer draft for {name}",
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="validation",
                dataset_name="unseen dialogues (validation)",
                metric_type=metric.name.replace(" ", "_"),
                metric_value=metric.value,
            )
            for metric in metrics
            if metric.file in (SUMMARY, LOG)
        ],
    )
    label = Draft.kinds[config.kind].label or config.kind
    rows = "\n".join(f"| {key} | {value} |" for key, value in made.items())
    seen = "\n".join(f"| {m.name} | {m.value:.3f} | {m.measured} | `{m.file}` |" for m in metrics)
    return f"""---
{header.to_yaml()}
---

# A {label} draft for {name}

Drafts {config.draft_length} tokens for speculative decoding; the base LLM verifies them, so the text is the
base LLM's own. It fits no other base LLM; with another one it is refused.

```python
model.generate(**inputs, custom_generate="<this repository or folder>", trust_remote_code=True)
```

| made by | |
|---|---|
{rows}

| seen | | measured | file |
|---|---|---|---|
{seen}

## Licence

The draft is derived from its base LLM: it reads that model's hidden states, learns from its outputs and,
unless drawn at random, starts from the weights of its last layer. So the base LLM's licence applies to it
({f"{package.licence}, of {package.holds}" if package else f"see {name}"}). The dialogues: {data}.
"""


def write_folder(
    source: Path, out: Path, *, data: str, metrics: Sequence[Metric] = (), base_name: str | None = None
) -> Path:
    """Write a finished run's draft to `out` as it may be shared: weights, config, summary and log, the card,
    and `custom_generate/`. Returns `out`.

    source: a folder that `training.train` finished; data, metrics: for `card`, besides the training's own;
    base_name: what others know the base LLM by, for one that was a folder here.
    Raises UserError for an unfinished run, a base LLM named by a path without `base_name`, and an `out` that
    holds anything else.
    """
    summary, config = read_summary(source), read_config(source / CONFIG, source)
    config = replace(config, base_name=base_name or config.base_name)
    if not (hub.is_remote(config.base_name) or config.base_name.startswith("package:")):
        raise UserError(
            f"{source} names its base LLM by a folder, {config.base_name}: give the name that others know "
            "it by (--base)"
        )
    ours = {CONFIG, WEIGHTS, SUMMARY, LOG, CARD, Path(GENERATE).parent.name}
    if strangers := sorted({path.name for path in out.glob("*")} - ours):
        raise UserError(f"{out} holds {strangers[0]}, which would be shared too: give an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, LOG):
        shutil.copyfile(source / name, out / name)
    write_text(json.dumps(asdict(config), indent=2) + "\n", out / CONFIG)
    summary["settings"]["draft"]["base_name"] = config.base_name
    write_text(json.dumps(summary, indent=2) + "\n", out / SUMMARY)
    text = card(config, summary, data=data, metrics=[*training_metrics(source, summary), *metrics])
    write_text(text, out / CARD)
    write_text(CODE, out / GENERATE)
    write_text(f"specformer>={version('specformer')}\n", out / REQUIREMENTS)
    return out
