"""The loss over the frozen LM head, one draft position and one chunk of rows at a time.

Full logits (batch, length, l_d, vocabulary) never exist: for each draft position and chunk the logits are
formed, scored, turned into their own gradient in place and multiplied back, so that what stays is the
gradient of the draft's output; a single backward through the draft follows (the paper's intra-batch gradient
accumulation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specformer.target import Head

CHUNK = 512
"""Rows of logits held at once: 512 x 49152 in bfloat16 are 50 MB."""

NONE = -100
"""The label of a draft position that lies behind the text's end."""


@dataclass
class SoftLabels:
    """The base's most probable tokens where each label stands.

    index (N, l_d, n) int64: places in the head's logits, OUTSIDE where the draft vocabulary lacks the token;
    probability (N, l_d, n) float32, summing to 1 over what is inside.
    """

    index: Tensor
    probability: Tensor


@dataclass
class HeadLoss:
    """What one pass over the LM head yields, summed, not averaged.

    loss: sum over labels of weight * cross-entropy (float64, a number); grad (N, l_d, H): its gradient by the
    draft's output; weight_grad (V', H) float32: by the weight of a trainable head, else None; correct, count
    (l_d,) int64: labels whose argmax was right, labels there were (with those outside the draft vocabulary,
    which are never right).
    """

    loss: float
    grad: Tensor
    weight_grad: Tensor | None
    correct: Tensor
    count: Tensor


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor,
    head: Head,
    soft: SoftLabels | None = None,
    chunk: int = CHUNK,
) -> HeadLoss:
    """Cross-entropy of draft hidden states through a final norm and LM head, frozen unless the head is the
    draft's own (Equation 6b).

    hidden (N, l_d, H), before the final norm; labels (N, l_d) int64, `head.to_index` of the text's tokens:
    NONE where the text has ended and OUTSIDE the draft vocabulary there is nothing to learn; weights (l_d,)
    float32, a factor per position. With `soft` the target is the base's own distribution instead of the
    text's token. Matmuls in the head's dtype; softmax is reduced in float32.
    """
    length, dtype = hidden.shape[1], head.weight.dtype
    grad = torch.zeros_like(hidden)
    weight_grad = torch.zeros_like(head.weight, dtype=torch.float32) if head.trainable else None
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    correct = torch.zeros(length, dtype=torch.long, device=hidden.device)
    for j in range(length):
        for rows in (labels[:, j] >= 0).nonzero()[:, 0].split(chunk):
            x = hidden[rows, j].detach().to(dtype).requires_grad_()
            wanted = labels[rows, j, None]
            share = torch.ones_like(wanted, dtype=torch.float32)
            with torch.enable_grad():
                normed = head.norm(x)
            with torch.no_grad():
                logits = head.matmul(normed.detach())
                correct[j] += (logits.max(-1, keepdim=True).indices == wanted).sum()
                p = logits.softmax(-1)
                del logits
                if soft is not None:
                    wanted, share = soft.index[rows, j].clamp(min=0), soft.probability[rows, j]
                # bfloat16 and float32 reach down to 1e-38: no probability of a label is lost before the log
                loss -= weights[j] * (share * p.gather(-1, wanted).double().clamp_min(1e-38).log()).sum()
                p.scatter_add_(-1, wanted, -share.to(p.dtype))  # softmax minus target: the logits' gradient
                if weight_grad is not None:
                    weight_grad += weights[j] * (p.T @ normed.detach().to(p.dtype))
                normed.backward(p @ head.weight)
            assert x.grad is not None
            grad[rows, j] = (weights[j] * x.grad).to(grad.dtype)
    return HeadLoss(float(loss), grad, weight_grad, correct, (labels != NONE).sum(0))
