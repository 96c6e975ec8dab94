"""Run by tests/test_distributed.py under torchrun: train a draft on the tiny base, in float32.

Arguments: base folder, rows (JSON), output folder, a count of steps after which to stop (0: none), the kind
of draft and its vocabulary (0: all).
"""

from __future__ import annotations

import json
import sys

from specformer import training
from specformer.base import load_base
from specformer.drafts import new_draft


def main() -> None:
    folder, rows, out, stop, kind, vocabulary = sys.argv[1:7]
    base = load_base(folder, dtype="float32", device="cpu")
    with open(rows) as file:
        data = json.load(file)
    options = {"init": "base", "seed": 0, "draft_length": 3, "vocabulary": int(vocabulary)}
    draft = new_draft(base, kind, data, **options)
    if int(stop):
        step = training.Schedule.step

        def dying(self, s):
            if s == int(stop):
                raise KeyboardInterrupt
            return step(self, s)

        training.Schedule.step = dying  # type: ignore[method-assign]
    try:
        training.train(
            base,
            draft,
            data,
            data[:3],
            out,
            epochs=1,
            sequences_per_step=6,
            micro_batch=2,
            max_length=64,
            anchor_fraction=0.5,
            anchor_decay=1.0,
            soft_labels=0,
            position_weights=1.0,
            lr=1e-3,
            min_lr=1e-4,
            warmup=0.25,
            eps=1e-8,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            clip=1.0,
            validate_every=2,
            checkpoint_every=2,
            dtype="float32",
        )
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
