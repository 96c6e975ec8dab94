"""The chunked loss over the frozen head against autograd's plain cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specformer.base import load_base
from specformer.losses import SoftLabels, head_loss
from specformer.probes import plain_head_loss
from specformer.target import Target

N, LENGTH, H, V = 23, 4, 64, 320


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
def target(request):
    return Target(request.getfixturevalue(request.param), 8)


def batch(dtype=torch.float32, missing=0.3):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, LENGTH, H, generator=generator).to(dtype)
    labels = torch.randint(0, V, (N, LENGTH), generator=generator)
    labels[torch.rand(N, LENGTH, generator=generator) < missing] = -100
    counts = (labels >= 0).sum(0)
    return hidden, labels, torch.where(counts > 0, 1 / (counts.clamp(min=1) * LENGTH), 0.0)


def plain(hidden, labels, weights, base, dtype=torch.float64):
    """The whole graph by autograd: transformers' own norm and head, full logits at once."""
    x = hidden.to(dtype).requires_grad_()
    norm, head = base.model.model.norm, base.model.lm_head
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.to(dtype)
    logits = scaled @ head.weight.to(dtype).T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    loss = (each.view(labels.shape) * weights.to(dtype)).sum()
    loss.backward()
    assert x.grad is not None
    return float(loss.detach()), x.grad, logits.detach()


@pytest.mark.parametrize("chunk", [1, 5, 23, 512])
def test_loss_and_gradient_equal_autograd(target, chunk):
    hidden, labels, weights = batch()
    loss, grad, logits = plain(hidden, labels, weights, target.base)
    found = head_loss(hidden, labels, weights, target.head, chunk=chunk)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.grad.shape == hidden.shape and found.grad.dtype == torch.float32
    assert (found.grad - grad).norm() / grad.norm() < 1e-6
    assert not found.grad[labels < 0].any()
    right = (logits.argmax(-1) == labels) & (labels >= 0)
    assert found.correct.tolist() == right.sum(0).tolist()
    assert found.count.tolist() == (labels >= 0).sum(0).tolist()


def test_it_counts_what_is_right(target):
    """Labels that are the argmax by construction at two positions, never at a third."""
    hidden, labels, weights = batch(missing=0.0)
    best = target.logits(hidden).argmax(-1)
    labels = best.clone()
    labels[:, 2] = (best[:, 2] + 1) % V
    labels[:7, 1] = -100
    found = head_loss(hidden, labels, weights, target.head, chunk=4)
    assert found.correct.tolist() == [N, N - 7, 0, N]
    assert found.count.tolist() == [N, N - 7, N, N]


def test_weights_scale_each_position_by_itself(target):
    hidden, labels, _ = batch()
    alone = [head_loss(hidden, labels, w, target.head) for w in torch.eye(LENGTH)]
    weights = torch.tensor([0.5, 0.0, 2.0, 3.0])
    both = head_loss(hidden, labels, weights, target.head)
    assert both.loss == pytest.approx(sum(w * a.loss for w, a in zip(weights.tolist(), alone, strict=True)))
    for j, w in enumerate(weights.tolist()):
        torch.testing.assert_close(both.grad[:, j], w * alone[j].grad[:, j])
        assert not alone[j].grad[:, [i for i in range(LENGTH) if i != j]].any()


def test_no_labels_at_all(target):
    hidden, labels, weights = batch()
    found = head_loss(hidden, torch.full_like(labels, -100), weights, target.head)
    assert found.loss == 0 and not found.grad.any()
    assert found.correct.tolist() == found.count.tolist() == [0] * LENGTH


def test_the_base_gets_no_gradient(target):
    hidden, labels, weights = batch()
    head_loss(hidden.requires_grad_(), labels, weights, target.head)
    assert hidden.grad is None
    assert all(p.grad is None for p in target.base.model.parameters())


def test_a_hopeless_label_gives_a_finite_loss_and_still_a_gradient(tiny_llama):
    """Probability 0 in float32: the loss is cut at -log(1e-38), the gradient still pulls the label up."""
    target = Target(tiny_llama, 8)
    assert target.head.norm_weight is not None
    target.head.norm_weight = 100 * target.head.norm_weight
    hidden, _, weights = batch(missing=0.0)
    found = head_loss(hidden, target.logits(hidden).argmin(-1), (weights > 0) / (N * LENGTH), target.head)
    assert 80 < found.loss < 87.5
    assert found.grad.isfinite().all() and found.grad.norm() > 0.01


def test_bfloat16_is_near_exact(tiny_llama_folder):
    """Mean-normalised loss within 1e-3 of float64's on the same bfloat16 numbers; the gradient at least as
    near as plain autograd in bfloat16 comes."""
    base = load_base(tiny_llama_folder, dtype="bfloat16", device="cpu")
    hidden, labels, weights = batch(torch.bfloat16)
    hidden, labels = hidden.repeat(20, 1, 1), labels.repeat(20, 1)
    weights = weights / 20
    loss, grad, _ = plain(hidden, labels, weights, base)
    found = head_loss(hidden, labels, weights, Target(base, 8).head, chunk=100)
    assert found.loss == pytest.approx(loss, rel=1e-3)
    error = (found.grad.double() - grad).norm() / grad.norm()
    _, half, _ = plain(hidden, labels, weights, base, torch.bfloat16)
    assert error < 1.2 * (half.double() - grad).norm() / grad.norm()
    assert error < 0.01


# ---------------------------------------------------------------- draft vocabulary and soft labels

WORDS = torch.tensor([3, 5, 8, *range(40, 120)])


def test_a_cut_head_gives_the_rows_of_the_whole_one(target):
    cut, hidden = target.cut_head(WORDS), batch()[0]
    torch.testing.assert_close(cut(hidden), target.logits(hidden)[..., WORDS])
    assert cut.to_index(torch.tensor([5, 4, -100, 119])).tolist() == [1, -1, -100, len(WORDS) - 1]
    assert cut.to_tokens(torch.tensor([[0, 3]])).tolist() == [[3, 40]]
    p = cut(hidden).softmax(-1)
    full = cut.spread(p)
    assert full.shape[-1] == V == cut.tokens
    torch.testing.assert_close(full.sum(-1), torch.ones(N, LENGTH))
    assert torch.equal(full[..., WORDS], p)
    ids = torch.tensor([4, -100])
    assert torch.equal(target.head.to_index(ids), ids), "the whole vocabulary is its own index"


def test_labels_outside_the_vocabulary_count_as_misses_and_teach_nothing(target):
    hidden, labels, weights = batch()
    cut = target.cut_head(WORDS)
    index = cut.to_index(labels)
    inside = torch.isin(labels, WORDS)
    found = head_loss(hidden, index, weights, cut)
    assert 0 < inside.sum() < (labels >= 0).sum()
    assert found.count.tolist() == (labels >= 0).sum(0).tolist()
    assert not found.grad[~inside].any() and found.grad[inside].any(-1).all()
    logits = target.logits(hidden)[..., WORDS].double()
    each = F.cross_entropy(logits[inside], index[inside], reduction="none")
    expected = (each * weights.expand(N, LENGTH)[inside]).sum()
    assert found.loss == pytest.approx(float(expected), rel=1e-6)


def test_soft_labels_equal_autograd(target):
    """Cross-entropy against a distribution over 5 tokens, in float64 by autograd."""
    hidden, labels, weights = batch()
    generator = torch.Generator().manual_seed(7)
    index = torch.stack([torch.randperm(V, generator=generator)[:5] for _ in range(N * LENGTH)])
    index = index.view(N, LENGTH, 5)
    share = torch.rand(N, LENGTH, 5, generator=generator)
    soft = SoftLabels(index, share / share.sum(-1, keepdim=True))
    found = head_loss(hidden, labels, weights, target.head, soft, chunk=7)

    x = hidden.double().requires_grad_()
    norm, head = target.base.model.model.norm, target.base.model.lm_head
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.double()
    wanted = torch.zeros(N, LENGTH, V, dtype=torch.float64).scatter_(-1, index, soft.probability.double())
    each = -(wanted * (scaled @ head.weight.double().T).log_softmax(-1)).sum(-1) * (labels >= 0)
    loss = (each * weights.double()).sum()
    loss.backward()
    assert x.grad is not None
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert (found.grad - x.grad).norm() / x.grad.norm() < 1e-6


def test_a_one_token_distribution_is_the_hard_label(target):
    hidden, labels, weights = batch()
    soft = SoftLabels(labels[..., None], torch.ones(N, LENGTH, 1))
    hard, one = (head_loss(hidden, labels, weights, target.head, s) for s in (None, soft))
    assert one.loss == pytest.approx(hard.loss) and torch.equal(one.grad, hard.grad)
    assert one.correct.tolist() == hard.correct.tolist()


def test_the_plain_loss_leaves_out_tokens_outside_the_draft_vocabulary(target):
    """-1 marks them: no label to learn, in both losses."""
    hidden, labels, weights = batch()
    labels[:5] = -1
    found = head_loss(hidden, labels, weights, target.head)
    loss, grad = plain_head_loss(hidden, labels, weights, target.head)
    assert loss == pytest.approx(found.loss, rel=1e-5)
    assert not grad[:5].any() and (found.grad - grad).norm() / grad.norm() < 1e-5
