"""Distributions and the accept rules. p is the base LLM's distribution, q the draft's.

One float32 function makes both (`distribution`), so that what is drawn and what is tested never differ.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits: Tensor) -> Tensor:
    """The most probable token (...) of logits (..., V). On a CPU `max` is four times as fast as `argmax`."""
    return logits.max(-1).indices


def distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits (R, n, V) -> probabilities (R, n, V) in float32 after temperature, top-k and top-p, as
    transformers applies them (in that order; top-p keeps the smallest set reaching p, at least one token).

    temperature (R,) > 0; top_k (R,) int, 0 = off; top_p (R,) in (0, 1].
    """
    scores = logits.float() / temperature[:, None, None]
    V = scores.shape[-1]
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        ordered, order = scores.sort(-1, descending=True)
        rank = torch.arange(V, device=scores.device)
        limit = torch.where(top_k > 0, top_k, V)[:, None, None]
        # top-k keeps ties of the k-th score, as a threshold does
        kth = ordered.gather(-1, (limit.clamp(max=V) - 1).expand(-1, scores.shape[1], 1))
        ordered = ordered.masked_fill(ordered < kth, float("-inf"))
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = (mass_before >= top_p[:, None, None]) & (rank > 0) & (top_p[:, None, None] < 1)
        ordered = ordered.masked_fill(cut, float("-inf"))
        scores = torch.empty_like(scores).scatter_(-1, order, ordered)
    return scores.softmax(-1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: probabilities (..., V) float32 (need not be normalised), uniform (...) float64 in
    [0, 1) -> token ids (...) int64. The running sum is taken in float64: over 150k entries float32 drifts."""
    total = probabilities.double().cumsum(-1)
    point = (uniform * total[..., -1]).unsqueeze(-1)
    token = torch.searchsorted(total, point, right=True)[..., 0]
    return token.clamp(max=probabilities.shape[-1] - 1)


def accepted_prefix(matches: Tensor) -> Tensor:
    """matches (B, k) bool -> number of leading True per row (B,) int64."""
    return matches.long().cumprod(1).sum(1)


def match(choice: Tensor, drafts: Tensor) -> Tensor:
    """Accept rule for deterministic drafts (greedy, or a point mass under sampling).

    choice (B, k + 1): the base LLM's own token at every verified position, argmax or drawn from p; drafts
    (B, k) -> accepted (B,). A draft is kept while it equals the base's token. Under sampling that keeps
    draft x with probability p(x) and otherwise yields a draw from p restricted to the rest: speculative
    sampling with q a point mass, and the text is the very one plain decoding draws from the same uniforms.
    """
    return accepted_prefix(choice[:, :-1] == drafts)


def ratio_rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, redraw: Tensor) -> tuple[Tensor, Tensor]:
    """Accept rule for sampled drafts (Leviathan et al. 2023, Algorithm 1).

    p (R, k + 1, V), q (R, k, V) float32; drafts (R, k) drawn from q; accept (R, k) and redraw (R, k + 1)
    uniforms. Draft x is kept with probability min(1, p(x) / q(x)); at the first rejection the token is
    drawn from max(p - q, 0), after k acceptances from p. -> accepted (R,), next token (R,).
    """
    k = drafts.shape[1]
    px = p[:, :k].gather(-1, drafts[..., None])[..., 0]
    qx = q.gather(-1, drafts[..., None])[..., 0]
    accepted = accepted_prefix(accept * qx < px)
    r = torch.arange(p.shape[0], device=p.device)
    q_padded = torch.cat((q, torch.zeros_like(p[:, :1])), 1)
    residual = (p[r, accepted] - q_padded[r, accepted]).clamp(min=0)
    # p == q to the last bit leaves nothing: then any draw from p is right
    empty = residual.sum(-1, keepdim=True) == 0
    residual = torch.where(empty, p[r, accepted], residual)
    return accepted, draw(residual, redraw[r, accepted])
