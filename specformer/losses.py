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

from specformer.target import Target

CHUNK = 512
"""Rows of logits held at once: 512 x 49152 in bfloat16 are 50 MB."""


@dataclass
class HeadLoss:
    """What one pass over the LM head yields, summed, not averaged.

    loss: sum over labels of weight * cross-entropy (float64, a number); grad (N, l_d, H): its gradient by the
    draft's output; correct, count (l_d,) int64: labels whose argmax was right, labels that counted.
    """

    loss: float
    grad: Tensor
    correct: Tensor
    count: Tensor


def head_loss(
    hidden: Tensor, labels: Tensor, weights: Tensor, target: Target, chunk: int = CHUNK
) -> HeadLoss:
    """Cross-entropy of draft hidden states through the base's frozen final norm and LM head (Equation 6b).

    hidden (N, l_d, H), before the final norm; labels (N, l_d) int64, -100 where there is none; weights (l_d,)
    float32, a factor per position. Matmuls in the base's dtype; softmax is reduced in float32.
    """
    length = hidden.shape[1]
    grad = torch.zeros_like(hidden)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    correct = torch.zeros(length, dtype=torch.long, device=hidden.device)
    for j in range(length):
        for rows in (labels[:, j] >= 0).nonzero()[:, 0].split(chunk):
            x = hidden[rows, j].detach().to(target.dtype).requires_grad_()
            label = labels[rows, j, None]
            with torch.enable_grad():
                normed = target.norm(x)
            with torch.no_grad():
                logits = target.head(normed.detach())
                correct[j] += (logits.max(-1, keepdim=True).indices == label).sum()
                p = logits.softmax(-1)
                del logits
                picked = p.gather(-1, label)
                # bfloat16 and float32 reach down to 1e-38: no probability of a label is lost before the log
                loss -= weights[j] * picked.double().clamp_min(1e-38).log().sum()
                p.scatter_(-1, label, picked - 1)  # softmax minus one-hot: the gradient of the logits
                normed.backward(p @ target.head_weight)
            assert x.grad is not None
            grad[rows, j] = (weights[j] * x.grad).to(grad.dtype)
    return HeadLoss(float(loss), grad, correct, (labels >= 0).sum(0))
