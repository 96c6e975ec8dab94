"""What the training loop saves against a plain one, and the memory that a step should take.

Plain: transformers' own forward with an attention mask and output_hidden_states, all logits of all draft
positions at once under autograd. Ours: training.py's pieces. Draft, batches, labels, AdamW are the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from specformer.base import Base, load_base, resolve_hooks
from specformer.drafts import DraftConfig, new_draft
from specformer.hardware import GIB, describe
from specformer.hidden import HiddenStates
from specformer.losses import CHUNK, head_loss
from specformer.matmul import packed_matmul_available
from specformer.pipeline import Meter
from specformer.probes import MIB, in_own_process, peak_mib, plain_head_loss
from specformer.target import Target
from specformer.training import (
    Batch,
    Row,
    Schedule,
    choose_sequences,
    following_tokens,
    micro_batches,
    weigh,
)

KINDS = ("plain", "computed", "cached", "profile")
"""The plain loop; ours with hidden states computed in each step; ours with them read from disk; the same
with the draft vocabulary that the profile trains with, so that fewer logits are computed."""


@dataclass(frozen=True)
class Workload:
    """What is trained on, once for all contenders; settings as in params.yaml.

    folder, dtype, device: the base LLM; rows: dialogues with id, prompt_ids, answer_ids; steps: optimizer
    steps of one measurement; draft: options of DraftConfig such as draft_length.
    """

    folder: str
    rows: Sequence[Row]
    hooks: Sequence[int | float]
    draft: Mapping[str, Any]
    steps: int
    sequences_per_step: int
    micro_batch: int
    max_length: int
    anchor_fraction: float
    anchor_decay: float
    lr: float
    clip: float
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0


class Loops:
    """The contenders over the steps of a workload, on one base, one draft and one AdamW.

    hidden_dir: where those that do not compute them keep the base's hidden states. All but "profile" score
    the base's whole vocabulary.
    """

    def __init__(self, work: Workload, hidden_dir: Path):
        self.work = work
        self.base = load_base(work.folder, dtype=work.dtype, device=work.device)
        self.target = Target(self.base, work.max_length)
        hooks = resolve_hooks(work.hooks, self.base.num_layers)
        self.draft = new_draft(
            self.base, "specformer", work.rows, hooks=hooks, init="base", seed=work.seed, **work.draft
        )
        self.draft.to(self.base.device, torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.draft.parameters(), lr=work.lr)
        kept = HiddenStates(self.target, hooks, hidden_dir)
        computed = HiddenStates(self.target, hooks, None)
        self.hidden_states = {"computed": computed, "cached": kept, "profile": kept}
        rows = choose_sequences(work.rows, work.max_length)
        plan = Schedule(rows, work.sequences_per_step, 1.0, work.max_length, work.anchor_fraction, work.seed)
        self.sequences = [plan.step(s) for s in range(work.steps)]
        self.steps = [self._batches(sequences) for sequences in self.sequences]

    def _batches(self, sequences: list) -> list[Batch]:
        return micro_batches(
            sequences,
            self.work.micro_batch,
            self.draft.draft_length,
            self.work.anchor_decay,
            self.base.device,
        )

    def gradients(self, kind: str, batches: Sequence[Batch]) -> float:
        """Forward and backward of one step, as one of KINDS: its loss; gradients add up in the draft."""
        head = self.draft.head(self.target) if kind == "profile" else self.target.head
        labels = [head.to_index(b.labels) for b in batches]
        weights = weigh(torch.stack([(own >= 0).sum(0) for own in labels]).sum(0), 1.0, [])
        half = self.target.dtype == torch.bfloat16
        loss = 0.0
        for batch, own in zip(batches, labels, strict=True):
            with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
                if kind == "plain":
                    taps = transformers_taps(self.base, batch, self.draft.hooks)
                else:
                    taps = self.hidden_states[kind](batch.sequences).taps
                following = following_tokens(batch.ids)
                hidden = self.draft.training_hidden(taps, following, batch.rows, batch.columns, self.target)
                if kind == "plain":
                    value, grad = plain_head_loss(hidden, own, weights, head)
                else:
                    scored = head_loss(hidden.detach(), own, weights, head)
                    value, grad = scored.loss, scored.grad
                hidden.backward(grad)
            loss += value
        return loss

    def step(self, kind: str, batches: Sequence[Batch]) -> None:
        """One optimizer step."""
        self.gradients(kind, batches)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.work.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, kind: str) -> float:
        """All steps of the workload -> wall seconds."""
        start = time.perf_counter()
        for batches in self.steps:
            self.step(kind, batches)
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        return time.perf_counter() - start

    def warm_up(self, kind: str) -> None:
        """A step on four anchors of one dialogue, so that AdamW's state and lazy set-up are there."""
        first = min(self.sequences[0], key=lambda s: len(s.ids))
        self.step(kind, self._batches([replace(first, anchors=first.anchors[:4])]))

    def estimate(self) -> TrainingMemory:
        """`training_memory` of the largest micro-batch."""
        model = self.base.model
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        batches = [batch for step in self.steps for batch in step]
        estimates = [
            training_memory(
                self.draft.config,
                draft_parameters=self.draft.parameter_counts().total,
                dtype=self.base.dtype,
                packed_parameters=sum(m.weight.numel() for m in linears if packed_matmul_available(m.weight)),
                micro_batch=batch.ids.shape[0],
                length=batch.ids.shape[1],
                anchors=len(batch.rows),
                vocabulary=model.config.vocab_size,
            )
            for batch in batches
        ]
        return max(estimates, key=lambda e: e.step)


@torch.no_grad()
def transformers_taps(base: Base, batch: Batch, hooks: tuple[int, ...]) -> Tensor:
    """Hidden states (B, T, hooks, H) of a right-padded batch by transformers' own forward.

    Without its LM head and key/value cache, which a plain loop need not pay for.
    """
    mask = pad_sequence([torch.ones_like(s.ids) for s in batch.sequences], batch_first=True)
    model: Any = base.model.model
    before_norm = []  # HS[L] is the last layer's own output; transformers gives it after the final norm
    handle = model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    out = model(
        input_ids=batch.ids,
        attention_mask=mask.to(batch.ids.device),
        output_hidden_states=True,
        use_cache=False,
    )
    handle.remove()
    states = [*out.hidden_states[:-1], before_norm[0]]
    return torch.stack([states[i] for i in hooks], 2)


def bench_training(work: Workload, repeats: int = 3) -> dict[str, Any]:
    """Throughput of the three loops, alternating in one process, and each one's peak memory in its own.

    Returns the workload's sizes; for each of KINDS `<kind>_seconds` (list, of `steps` steps),
    `<kind>_tokens_per_second` (median) and `<kind>_peak_gib` (above what lay in memory before the steps, the
    optimizer's state included there; a cached state file also counts where it is read); throughput_ratio and
    peak_memory_ratio (ours, hidden states as `hidden_states` says, against plain; the memory's is ours /
    plain), their `_cached` and `_profile` twins, throughput_ratio_spread (least and most of the repeats); the
    estimate of `training_memory` by part, and computed_tensors_peak_gib, what it is an estimate of: the
    process holds the kernels' scratch space besides; the machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        loops = Loops(work, Path(folder))
        batches = [batch for step in loops.steps for batch in step]
        tokens = sum(b.tokens for b in batches)
        for kind in KINDS:  # which also fills the cache
            loops.run(kind)
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for r in range(repeats):
            for kind in KINDS if r % 2 == 0 else KINDS[::-1]:
                seconds[kind].append(loops.run(kind))
        estimate, base = loops.estimate(), loops.base.name
        machine = describe(loops.base.dtype, loops.base.device)
        del loops  # two of it need not fit
        peaks = {kind: in_own_process(_peak, kind, work, folder) for kind in KINDS}
        tensors = in_own_process(_tensors, work, folder)

    def ratios(kind: str) -> list[float]:
        return [plain / ours for plain, ours in zip(seconds["plain"], seconds[kind], strict=True)]

    record: dict[str, Any] = {
        "base": base,
        "draft_length": work.draft["draft_length"],
        "steps": work.steps,
        "sequences_per_step": work.sequences_per_step,
        "micro_batch": work.micro_batch,
        "tokens": tokens,
        "anchors": sum(len(b.rows) for b in batches),
        "labels": sum(int((b.labels >= 0).sum()) for b in batches),
        "hidden_states": "computed",
        "throughput_ratio": median(ratios("computed")),
        "throughput_ratio_spread": [min(ratios("computed")), max(ratios("computed"))],
        "throughput_ratio_cached": median(ratios("cached")),
        "throughput_ratio_cached_spread": [min(ratios("cached")), max(ratios("cached"))],
        "throughput_ratio_profile": median(ratios("profile")),
        "throughput_ratio_profile_spread": [min(ratios("profile")), max(ratios("profile"))],
        "vocabulary": work.draft.get("vocabulary", 0),
        "peak_memory_ratio": peaks["computed"] / peaks["plain"],
        "peak_memory_ratio_cached": peaks["cached"] / peaks["plain"],
        "peak_memory_ratio_profile": peaks["profile"] / peaks["plain"],
    }
    for kind in KINDS:
        record[f"{kind}_seconds"] = seconds[kind]
        record[f"{kind}_tokens_per_second"] = tokens / median(seconds[kind])
        record[f"{kind}_peak_gib"] = peaks[kind] / GIB
    record["estimated_gib"] = {part: size / GIB for part, size in asdict(estimate).items()}
    record["estimated_peak_gib"] = estimate.step / GIB
    record["computed_tensors_peak_gib"] = tensors / GIB
    return record | {"machine": machine}


def _peak(kind: str, work: Workload, folder: str) -> int:
    """Bytes above what a warmed-up loop holds."""
    loops = Loops(work, Path(folder))
    loops.warm_up(kind)
    device = loops.base.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loops.run(kind)
        return torch.cuda.max_memory_allocated(device) - before
    before = psutil.Process().memory_info().rss
    with Meter(interval=0.005) as meter:
        loops.run(kind)
    return meter.peak_bytes - before


def _tensors(work: Workload, folder: str) -> float:
    """Bytes of tensors above what a warmed-up loop holds."""
    loops = Loops(work, Path(folder))
    loops.warm_up("computed")
    return peak_mib(lambda: loops.run("computed"), loops.base.device) * MIB


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes by part. The first four stay; the others come and go with each micro-batch."""

    base_weights: int
    packed_copies: int
    draft_weights: int
    optimizer: int
    gradients: int
    draft_casts: int
    base_forward: int
    hidden_states: int
    draft_activations: int
    draft_backward: int
    head_chunk: int

    @property
    def fixed(self) -> int:
        """Held all the time."""
        return self.base_weights + self.packed_copies + self.draft_weights + self.optimizer

    @property
    def step(self) -> int:
        """The peak above `fixed`: the base's forward, or the head and what follows it backwards, with all
        that waits for its gradient; gradients of earlier micro-batches are there from the second one on."""
        waiting = self.hidden_states + self.draft_casts + self.draft_activations
        return self.gradients + max(self.base_forward, waiting + max(self.head_chunk, self.draft_backward))

    @property
    def total(self) -> int:
        """The most there is at any time."""
        return self.fixed + self.step


def training_memory(
    config: DraftConfig,
    *,
    draft_parameters: int,
    dtype: torch.dtype,
    packed_parameters: int,
    micro_batch: int,
    length: int,
    anchors: int,
    vocabulary: int,
    chunk: int = CHUNK,
) -> TrainingMemory:
    """Memory that a process of training takes, from shapes alone.

    dtype: of the base and of the draft's matmuls; packed_parameters: weights that have a second, reordered
    copy (target.linear: all matmuls on a bfloat16 CPU, else 0); micro_batch sequences of `length` tokens with
    `anchors` anchors in all; vocabulary: rows of the LM head that are scored; chunk: losses.CHUNK.

    With W bytes a number of `dtype`, M and D parameters of base and draft, H, I, G hidden size, feed-forward
    size and hooks, A = (Hq + 2 Hkv) d and Q = Hq d the widths of qkv and of an attention's output,
    n = micro_batch * length tokens, r = anchors * l_d draft rows:

        base_weights       M W
        packed_copies      packed_parameters W
        draft_weights      4 D
        optimizer          8 D (AdamW's two moments, float32)
        gradients          4 D
        draft_casts        D W under autocast, which keeps a cast copy of each weight it meets; else 0
        base_forward       n W (G H + H + 1.5 A + 0.5 Q + 4 I): the tapped states, and one layer's
                           feed-forward beside what its attention leaves
        hidden_states      n W G H
        draft_activations  W (n (2 G H + 2 H + 1.5 (A + Q)) + 2 H anchors + layers r (4 H + A + Q + 4 I)
                              + 2 r H) + 4 H (n + anchors + 2 layers r):
                           what autograd keeps, the inputs of norms among it in float32 (less where a norm
                           is fused), and the draft's output with its gradient
        draft_backward     2 W r I: gradients inside a feed-forward, less what is freed by then
        head_chunk         3 W min(chunk, anchors) vocabulary: logits, their softmax, and the last chunk's

    Left out: the runtime's own memory, scratch space of kernels, RoPE tables, ids and labels.
    """
    W, D = dtype.itemsize, draft_parameters
    H, inner = config.hidden_size, config.intermediate_size
    tapped = len(config.hooks) * H
    A = (config.heads + 2 * config.kv_heads) * config.head_dim
    Q = config.heads * config.head_dim
    n, r = micro_batch * length, anchors * config.draft_length
    kept = n * (2 * tapped + 2 * H + 3 * (A + Q) // 2) + 2 * anchors * H
    kept += config.layers * r * (4 * H + A + Q + 4 * inner) + 2 * r * H
    norm_inputs = H * (n + anchors + 2 * config.layers * r)
    return TrainingMemory(
        base_weights=config.base_parameters * W,
        packed_copies=packed_parameters * W,
        draft_weights=4 * D,
        optimizer=8 * D,
        gradients=4 * D,
        draft_casts=D * W if W < 4 else 0,
        base_forward=n * W * (tapped + H + (3 * A + Q) // 2 + 4 * inner),
        hidden_states=n * W * tapped,
        draft_activations=W * kept + 4 * norm_inputs,
        draft_backward=2 * W * r * inner,
        head_chunk=3 * W * min(chunk, anchors) * vocabulary,
    )
