"""The draft model that comes with the package, and the command that replaces it.

It is there for the first minute: decoding, the walkthrough and a first benchmark work before anyone trains.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from specformer.base import Base, base_fingerprint
from specformer.chat import encode_prompt
from specformer.drafts.interface import CONFIG, WEIGHTS, Draft
from specformer.engine import Engine, Request
from specformer.errors import UserError

HOME = Path(str(files("specformer") / "packaged"))
RECORD = "record.json"
MOST_BYTES = 16 * 10**6
"""Largest weights file that may be packaged."""
PROMPTS = (
    "Explain to a child why the moon changes its shape.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the main differences between a virus and a bacterium?",
    "Give me a packing list for a week of hiking in the mountains.",
    "Write a short letter to my landlord asking to repair the heating.",
    "How does a bicycle stay upright while it is moving?",
    "Summarise the story of Romeo and Juliet in five sentences.",
    "I have 3 boxes with 12 eggs each and break 5 eggs. How many are left?",
    "Suggest three names for a small bakery and say why each fits.",
    "Describe the steps of making bread from flour, water, salt and yeast.",
    "What should I consider before adopting a dog?",
    "Write a SQL query that finds the five customers who spent the most.",
)
"""What the recorded tokens_per_step is measured on; written for this purpose."""


def packaged_folder(base: Base, home: Path = HOME) -> Path | None:
    """The folder of the packaged draft that fits `base`, or None.

    home: where such folders lie (default: in the package).
    """
    wanted = base_fingerprint(base.model)
    for config in sorted(home.glob(f"*/{CONFIG}")):
        if json.loads(config.read_text())["base_fingerprint"] == wanted:
            return config.parent
    return None


def requests(base: Base, max_new_tokens: int) -> list[Request]:
    """PROMPTS as greedy requests, in the base's chat format."""
    return [
        Request(str(i), encode_prompt(base.tokenizer, [{"role": "user", "content": text}]), max_new_tokens)
        for i, text in enumerate(PROMPTS)
    ]


def measure(base: Base, draft: Draft, k: int, max_new_tokens: int = 64) -> dict[str, Any]:
    """Decode PROMPTS greedily, one by one: k, max_new_tokens, steps and tokens_per_step.

    In float32 on a CPU the numbers come out the same again; give such a base to record them.
    """
    from specformer.metrics import tokens_per_step  # needs pandas

    engine = Engine(base, draft, k=k, batch_size=1, max_length=max_new_tokens + 128)
    steps = [step for result in engine.run(requests(base, max_new_tokens)) for step in result.steps]
    return {
        "k": k,
        "max_new_tokens": max_new_tokens,
        "prompts": len(PROMPTS),
        "steps": len(steps),
        "tokens_per_step": round(tokens_per_step(steps), 4),
    }


def package(
    source: Path,
    base: Base,
    draft: Draft,
    *,
    command: str,
    data: str,
    machine: Mapping[str, Any],
    home: Path = HOME,
) -> Path:
    """Replace the packaged draft by the trained one in `source`, and write its record and model card.

    source: a folder that `training.train` finished; base, draft: the base LLM in float32 and the draft loaded
    for it; command, data: what made it, in words; machine: a `hardware.describe` record. Returns the folder.
    Raises UserError for an unfinished run and for weights above MOST_BYTES.
    """
    # these need packages that `packaged_folder` does without
    from specformer.sharing import CARD, Metric, card, read_summary, training_metrics
    from specformer.tables import write_text

    summary = read_summary(source)
    size = (source / WEIGHTS).stat().st_size
    if size > MOST_BYTES:
        raise UserError(f"{source / WEIGHTS} has {size / 1e6:.1f} MB, at most {MOST_BYTES / 1e6:.0f} fit")
    folder = home / re.split("[/:]", base.name)[-1].lower()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)
    record = measure(base, draft, k=draft.draft_length)
    write_text(json.dumps(record, indent=2) + "\n", folder / RECORD)
    shown = f"{machine['cpu']}, {machine['cores']} cores, {machine['dtype']}, torch {machine['torch']}"
    measured = f"on the {record['prompts']} prompts of `specformer/pretrained.py`, greedy, float32, "
    measured += f"k = {record['k']}, {record['max_new_tokens']} new tokens"
    text = card(
        draft.config,
        summary,
        data=data,
        made_by={"command": f"`{command}`", "machine": shown},
        metrics=[
            *training_metrics(source, summary),
            Metric("tokens per step", record["tokens_per_step"], measured, RECORD),
        ],
    )
    write_text(text, folder / CARD)
    return folder
