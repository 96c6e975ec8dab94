"""One distribution for target and draft, and accept rules that keep it."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from helpers import chi_square_p
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specformer.sampling import accepted_prefix, distribution, draw, match, ratio_rule


def by_transformers(logits, temperature, top_k, top_p):
    """(n, V) -> probabilities, by transformers' own warpers in the order that generate applies them."""
    ids = cast(torch.LongTensor, torch.zeros(logits.shape[0], 1, dtype=torch.long))
    scores = TemperatureLogitsWarper(temperature)(ids, logits) if temperature != 1 else logits
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores.softmax(-1)


SETTINGS = [
    (0.7, 0, 1.0),
    (1.3, 0, 1.0),
    (1.0, 1, 1.0),
    (1.0, 5, 1.0),
    (0.7, 500, 1.0),
    (1.0, 0, 0.9),
    (1.3, 0, 0.3),
    (0.5, 0, 1e-6),
    (0.8, 20, 0.95),
]


def test_distribution_equals_transformers_warpers_row_by_row():
    """Rows with different settings in one call."""
    logits = 3 * torch.randn(len(SETTINGS), 4, 97, generator=torch.Generator().manual_seed(0))
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*SETTINGS, strict=True))
    p = distribution(logits, temperature, top_k, top_p)
    assert p.dtype == torch.float32 and p.shape == logits.shape
    for r, setting in enumerate(SETTINGS):
        expected = by_transformers(logits[r], *setting)
        assert torch.equal(p[r] > 0, expected > 0), setting
        torch.testing.assert_close(p[r], expected, rtol=1e-5, atol=1e-7)
    assert ((p[2] > 0).sum(-1) == 1).all() and ((p[7] > 0).sum(-1) == 1).all()


def test_distribution_of_bfloat16_logits_is_float32():
    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    one, off = torch.ones(1), torch.zeros(1, dtype=torch.long)
    p = distribution(logits, 0.7 * one, off, one)
    assert torch.equal(p, distribution(logits.float(), 0.7 * one, off, one))
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 2), rtol=0, atol=1e-6)


def test_top_k_keeps_ties_of_the_last_score():
    logits = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0]]])
    one = torch.ones(1)
    p = distribution(logits, one, torch.tensor([2]), one)
    assert (p[0, 0] > 0).tolist() == [False, True, True, True, False]


def test_draw_has_the_frequencies_and_never_the_impossible():
    p = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    uniform = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = draw(p.expand(len(uniform), -1), uniform)
    counts = torch.bincount(tokens, minlength=7)
    assert counts[p == 0].sum() == 0
    assert chi_square_p(counts[p > 0], p[p > 0].double() / p.double().sum() * len(uniform)) > 0.01


def test_draw_at_the_edges_and_unnormalised():
    p = torch.tensor([[0.0, 2.0, 0.0, 6.0]])
    for u, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert draw(p, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_draw_over_a_real_vocabulary_does_not_drift():
    """A flat distribution over 150k tokens: token i exactly for u in [i, i + 1) / V."""
    V = 150_000
    at = torch.tensor([0, 1, 77_777, V - 2, V - 1])
    uniform = (at + 0.5).double() / V
    assert draw(torch.full((len(at), V), 1 / V), uniform).tolist() == at.tolist()


def test_accepted_prefix_and_match():
    matches = [[True, True, True], [True, False, True], [False, True, True]]
    assert accepted_prefix(torch.tensor(matches)).tolist() == [3, 1, 0]
    choice = torch.tensor([[1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 9]])
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 9, 9]])
    assert match(choice, drafts).tolist() == [3, 1, 0]
    assert match(choice[:, :1], drafts[:, :0]).tolist() == [0, 0, 0]


def random_rows(rows, k, V, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(1, k + 1, V, generator=generator)).softmax(-1).expand(rows, -1, -1)
    q = (2 * torch.randn(1, k, V, generator=generator)).softmax(-1).expand(rows, -1, -1)
    uniform = torch.rand(3, rows, k + 1, dtype=torch.float64, generator=generator)
    return p, q, uniform


def test_equal_distributions_accept_everything():
    p, _, uniform = random_rows(500, 3, 8)
    drafts = draw(p[:, :3], uniform[2, :, :3])
    accepted, token = ratio_rule(p, p[:, :3], drafts, uniform[1, :, :3], uniform[0])
    assert (accepted == 3).all()
    assert torch.equal(token, draw(p[:, 3], uniform[0, :, 3]))


def test_disjoint_distributions_accept_nothing_and_draw_from_p():
    p = torch.tensor([0.0, 0.0, 0.25, 0.75]).expand(4000, 3, 4)
    q = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(4000, 2, 4)
    _, _, uniform = random_rows(4000, 2, 4)
    drafts = draw(q, uniform[2, :, :2])
    accepted, token = ratio_rule(p, q, drafts, uniform[1, :, :2], uniform[0])
    assert (accepted == 0).all()
    counts = torch.bincount(token, minlength=4)
    assert counts[:2].sum() == 0
    assert chi_square_p(counts[2:], torch.tensor([1000, 3000])) > 0.01


def test_point_mass_that_equals_p_leaves_no_residual():
    """p == q == one token: nothing is left of max(p - q, 0), and nothing becomes NaN or token 0."""
    p = torch.tensor([0.0, 0.0, 1.0]).expand(1, 2, 3)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    accepted, token = ratio_rule(p, p[:, :1], torch.tensor([[2]]), zero[:, :1], zero)
    assert accepted.tolist() == [1] and token.tolist() == [2]


@pytest.mark.parametrize("seed", [0, 1])
def test_ratio_rule_keeps_the_distribution(seed):
    """First committed token ~ p_0 whatever q is; and the number accepted is what the theory says."""
    rows, k, V = 100_000, 2, 6
    p, q, uniform = random_rows(rows, k, V, seed)
    drafts = draw(q, uniform[2, :, :k])
    accepted, token = ratio_rule(p, q, drafts, uniform[1, :, :k], uniform[0])
    first = torch.where(accepted > 0, drafts[:, 0], token)
    counts = torch.bincount(first, minlength=V).double()
    expected = p[0, 0].double() / p[0, 0].double().sum() * rows
    assert chi_square_p(counts, expected) > 0.01
    overlap = torch.minimum(p[0, :k], q[0]).sum(-1).tolist()  # acceptance probability at each position
    chances = [1 - overlap[0], overlap[0] * (1 - overlap[1]), overlap[0] * overlap[1]]
    found = torch.bincount(accepted, minlength=3).double()
    assert chi_square_p(found, torch.tensor(chances).double() / sum(chances) * rows) > 0.01
    # the second committed token, where there is one, ~ p_1
    second = torch.where(accepted > 1, drafts[:, 1], token)[accepted > 0]
    counts = torch.bincount(second, minlength=V).double()
    assert chi_square_p(counts, p[0, 1].double() / p[0, 1].double().sum() * len(second)) > 0.01
