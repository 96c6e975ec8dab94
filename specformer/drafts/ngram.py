"""N-gram drafting, or prompt lookup (apoorvumang/prompt-lookup-decoding, huggingface/transformers): no model.

The longest run of at most NGRAM newest tokens that stood in the row's text before, at its first place, is
taken to go on as it did there. Departures: every row of a batch is looked up at once and always k tokens are
proposed (beyond the text's end the newest one again, and anything where nothing is found: both are simply
rejected); the text's very first token is not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specformer.cache import KVStore, Window
from specformer.drafts.interface import Choose, Draft, register
from specformer.target import Target

NGRAM = 3
"""Most tokens that are matched, prompt-lookup-decoding's default."""


@register("ngram")
class NGram(Draft):
    """Training-free drafts from the row's own text. Its store keeps tokens where others keep keys: at each
    position the token after it."""

    label = "n-gram"
    tapped = 0

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        return ()

    def passes(self, k: int) -> int:
        return 0

    def new_store(self, target: Target, rows: int, limit: int, attention: str) -> KVStore:
        return KVStore(1, rows, 1, 1, limit, torch.long, target.device)

    @torch.no_grad()
    def propose(
        self,
        taps: Tensor,
        last: Tensor,
        following: Tensor,
        window: Window,
        store: KVStore | None,
        target: Target,
        k: int,
        choose: Choose,
    ) -> Tensor:
        if store is None:
            raise ValueError("n-gram drafting needs a store: it keeps the text")
        tokens = following[:, :, None, None]
        store.write(0, window, tokens, tokens)
        text = store.read(0, window)[0][:, 0, :, 0]
        return look_up(text, window.positions.gather(1, last[:, None])[:, 0], k)


def look_up(text: Tensor, newest: Tensor, k: int) -> Tensor:
    """text (B, T) int64, of which row b counts up to place newest[b] (B,) -> how it may go on (B, k)."""
    places, end = torch.arange(text.shape[1], device=text.device), newest[:, None]
    matched = torch.zeros_like(text)  # how many tokens up to each place equal the newest ones
    equal = places < end
    for n in range(NGRAM):
        equal = equal & (places >= n) & (text.roll(n, 1) == text.gather(1, (end - n).clamp(min=0)))
        matched += equal
    found = (matched * text.shape[1] - places).max(1, keepdim=True).indices  # the first of the longest
    return text.gather(1, (found + 1 + torch.arange(k, device=text.device)).minimum(end))
