"""Greedy decoding held against transformers' own `generate`, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specformer.base import Base
from specformer.engine import Engine, Request

GAP = 1e-4
"""A differing greedy token is excused where the base's two best logits are closer than this."""


@dataclass(frozen=True)
class GreedyCheck:
    """Answers compared token by token: equal ones, excused ones (a near-tie of the base), other ones."""

    same: int
    excused: int
    different: int

    @property
    def total(self) -> int:
        return self.same + self.excused + self.different


def check_greedy(base: Base, requests: Sequence[Request], ours: Mapping[str, list[int]]) -> GreedyCheck:
    """Compare our greedy answers with transformers' own `generate`, one prompt at a time.

    ours: request id -> new token ids. Where they part, the base's logits before that token decide: a gap
    below `GAP` between its two best tokens excuses the difference, since either order of additions is right.
    """
    counts = {"same": 0, "excused": 0, "different": 0}
    for request in requests:
        theirs = generate_alone(base, request)
        mine = ours[request.id]
        if mine == theirs:
            counts["same"] += 1
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        near = at is not None and top2_gap(base, [*request.prompt_ids, *theirs[:at]]) < GAP
        counts["excused" if near else "different"] += 1
    return GreedyCheck(**counts)


def generate_alone(base: Base, request: Request) -> list[int]:
    """The new tokens of transformers' own greedy `generate` for one request."""
    ids = torch.tensor([request.prompt_ids], device=base.device)
    out = base.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=[*base.stop_token_ids, *request.stop_token_ids],
        pad_token_id=base.stop_token_ids[0],
    )
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def top2_gap(base: Base, ids: Sequence[int]) -> float:
    """Difference of the base's two best logits after `ids`."""
    logits = base.model(torch.tensor([list(ids)], device=base.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return first - second


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Request id -> new token ids."""
    return {result.id: result.ids for result in engine.run(list(requests))}
