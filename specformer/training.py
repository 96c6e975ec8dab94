"""The one training loop, for every draft model: frozen base, answer-token loss, resumable.

A step takes `sequences_per_step` dialogues, sorted by length into right-padded micro-batches. The base runs
without attention mask (causal attention makes right padding harmless). The loss is the mean over draft
positions of the mean cross-entropy at that position (Equation 6b), over all labels of the step, so neither
padding nor the split into micro-batches nor the number of processes changes it. A draft may add a loss of its
own features, averaged alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from specformer.base import DTYPES, Base
from specformer.drafts.interface import Draft
from specformer.errors import UserError
from specformer.hidden import GIB, HiddenStates, Teaching
from specformer.losses import NONE, HeadLoss, SoftLabels, head_loss
from specformer.probes import digests
from specformer.progress import Progress
from specformer.sampling import greedy
from specformer.target import Head, Target, unpack_linears

Row = dict[str, Any]
LOG, CHECKPOINT, DONE, SUMS = "log.jsonl", "checkpoint", "summary.json", "checksums.json"


@dataclass
class Sequence_:
    """One dialogue ready to train on: token ids (T,) and the anchors t it contributes, in random order."""

    id: str
    ids: Tensor
    anchors: Tensor


def answer_anchors(prompt_length: int, total: int) -> range:
    """Positions t to draft from: x_{t+1} is an answer token and t + 2 is one too.

    The first is the last prompt token, from which decoding drafts after the prefill.
    """
    return range(prompt_length - 1, total - 2)


def draft_labels(ids: Tensor, rows: Tensor, columns: Tensor, lengths: Tensor, draft_length: int) -> Tensor:
    """Labels (N, draft_length): token t + 2 + j of the row, NONE beyond its length.

    ids (B, T); rows, columns (N,) name the anchors t; lengths (B,).
    """
    at = columns[:, None] + 2 + torch.arange(draft_length, device=ids.device)
    inside = at < lengths[rows, None]
    return torch.where(inside, ids[rows[:, None], at.clamp(max=ids.shape[1] - 1)], NONE)


def thin(labels: Tensor, decay: float) -> Tensor:
    """Keep labels of position j at only a share decay^j of the anchors (which come in random order).

    Late positions are rarely reached, and each costs a pass over the LM head; their mean stays unbiased.
    """
    N, length = labels.shape
    keep = torch.tensor([math.ceil(N * decay**j) for j in range(length)], device=labels.device)
    return labels.masked_fill(torch.arange(N, device=labels.device)[:, None] >= keep, NONE)


@dataclass
class Batch:
    """A right-padded micro-batch: ids (B, T), anchors rows/columns (N,), labels (N, l_d), tokens unpadded."""

    sequences: Sequence[Sequence_]
    ids: Tensor
    rows: Tensor
    columns: Tensor
    labels: Tensor
    tokens: int


def following_tokens(ids: Tensor) -> Tensor:
    """The token after each position: ids (B, T) -> (B, T); the last column has none and stays."""
    return torch.cat((ids[:, 1:], ids[:, -1:]), 1)


def soft_targets(teaching: Teaching, batch: Batch, head: Head) -> SoftLabels | None:
    """The base's own distribution where each label stands, over the draft's vocabulary; None without.

    Label j of anchor t is token t + 2 + j, which the base predicts at position t + 1 + j.
    """
    if not teaching.top_tokens.shape[-1]:
        return None
    l_d, T = batch.labels.shape[1], batch.ids.shape[1]
    at = batch.columns[:, None] + 1 + torch.arange(l_d, device=batch.ids.device)
    rows, at = batch.rows[:, None], at.clamp(max=T - 1)
    index = head.to_index(teaching.top_tokens[rows, at])
    mass = teaching.top_logprobs[rows, at].exp() * (index >= 0)
    return SoftLabels(index, mass / mass.sum(-1, keepdim=True).clamp(min=1e-9))


def make_batch(
    sequences: Sequence[Sequence_], draft_length: int, decay: float, device: torch.device
) -> Batch:
    """Pad sequences to their longest and lay out anchors and labels."""
    lengths = torch.tensor([len(s.ids) for s in sequences])
    ids = torch.nn.utils.rnn.pad_sequence([s.ids for s in sequences], batch_first=True)
    rows = torch.cat([torch.full_like(s.anchors, b) for b, s in enumerate(sequences)])
    columns = torch.cat([s.anchors for s in sequences])
    # interleave by each sequence's own (random) order, so that thinning takes the same share of every one
    share = torch.cat([torch.arange(len(s.anchors)) / len(s.anchors) for s in sequences])
    order = torch.argsort(share, stable=True)
    rows, columns = rows[order], columns[order]
    labels = thin(draft_labels(ids, rows, columns, lengths, draft_length), decay)
    return Batch(
        sequences,
        ids.to(device),
        rows.to(device),
        columns.to(device),
        labels.to(device),
        int(lengths.sum()),
    )


def choose_sequences(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Rows that have at least one anchor once cut to `max_length` tokens."""
    return [r for r in rows if len(answer_anchors(len(r["prompt_ids"]), _total(r, max_length))) > 0]


def _total(row: Row, max_length: int) -> int:
    return min(max_length, len(row["prompt_ids"]) + len(row["answer_ids"]))


def token_ids(row: Row, max_length: int) -> Tensor:
    """Prompt and answer (T,) int64, cut to `max_length`."""
    return torch.tensor((list(row["prompt_ids"]) + list(row["answer_ids"]))[:max_length])


class Schedule:
    """Which dialogues make up step s, and where their anchors are: a function of (seed, s) alone, so that a
    resumed run needs no random state."""

    def __init__(
        self, rows: Sequence[Row], per_step: int, epochs: float, max_length: int, fraction: float, seed: int
    ):
        self.rows, self.per_step, self.max_length = rows, per_step, max_length
        self.fraction, self.seed = fraction, seed
        self.steps_per_epoch = max(1, math.ceil(len(rows) / per_step))
        self.steps = max(1, round(self.steps_per_epoch * epochs))

    def step(self, s: int) -> list[Sequence_]:
        epoch, inside = divmod(s, self.steps_per_epoch)
        order = torch.randperm(len(self.rows), generator=_generator(self.seed, epoch, 0)).tolist()
        picked = order[inside * self.per_step : (inside + 1) * self.per_step]
        generator = _generator(self.seed, s, 1)
        return [self._sequence(self.rows[i], generator) for i in picked]

    def _sequence(self, row: Row, generator: torch.Generator) -> Sequence_:
        ids = token_ids(row, self.max_length)
        candidates = torch.tensor(list(answer_anchors(len(row["prompt_ids"]), len(ids))))
        count = max(1, round(self.fraction * len(candidates)))
        keep = torch.randperm(len(candidates), generator=generator)[:count]
        return Sequence_(row["id"], ids, candidates[keep])


def _generator(*parts: int) -> torch.Generator:
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(seed)


def micro_batches(
    sequences: list[Sequence_], size: int, draft_length: int, decay: float, device: torch.device
) -> list[Batch]:
    """Length-bucketed micro-batches of a step, longest first."""
    ordered = sorted(sequences, key=lambda s: (-len(s.ids), s.id))
    return [
        make_batch(ordered[i : i + size], draft_length, decay, device) for i in range(0, len(ordered), size)
    ]


class DraftForward(torch.nn.Module):
    """`training_hidden` as a forward, so that Accelerate (and through it DDP) can wrap the draft."""

    def __init__(self, draft: Draft):
        super().__init__()
        self.draft = draft

    def forward(self, taps: Tensor, batch: Batch, target: Target) -> Tensor:
        following = following_tokens(batch.ids)
        return self.draft.training_hidden(taps, following, batch.rows, batch.columns, target)


def backward(
    draft: Draft,
    hidden: Tensor,
    teaching: Teaching,
    batch: Batch,
    weights: Tensor,
    head: Head,
    target: Target,
    world: int = 1,
) -> HeadLoss:
    """Score a micro-batch and add the loss's gradient, times `world`, to the draft's parameters.

    hidden (N, trained_length, H): of `training_hidden`; weights (trained_length,): of one label at each
    position (`weigh`), which the draft scales by its `head_share`. The loss returned holds the draft's own
    features' (`Draft.feature_loss`).
    """
    soft, shares = soft_targets(teaching, batch, head), weights * draft.head_share
    scored = head_loss(hidden.detach(), batch.labels, shares, head, soft)
    roots, gradients = [hidden], [scored.grad * world]
    if scored.weight_grad is not None:
        roots.append(head.weight)
        gradients.append(scored.weight_grad * world)
    features = draft.feature_loss(hidden, teaching.taps, batch.rows, batch.columns, target)
    if features is not None:
        features = (features * weights * (batch.labels >= 0)).sum()
        scored.loss += float(features.detach())
        roots.append(features)
        gradients.append(torch.full_like(features, world))
    torch.autograd.backward(roots, gradients)
    return scored


@torch.no_grad()
def validate(
    draft: Draft, target: Target, rows: Sequence[Row], max_length: int, states: HiddenStates | None = None
) -> dict[str, Any]:
    """Teacher-forced acceptance on the base's own greedy answers.

    Where every answer is what the base would say, a draft token is accepted exactly if it equals the
    answer's; walking each answer by its accepted runs therefore gives the tokens_per_step of decoding.
    states: where the base's hidden states come from (default: computed). Returns accuracy (list, share of
    right tokens per draft position) and tokens_per_step.
    """
    states = states or HiddenStates(target, draft.hooks, None)
    length, device, head = draft.draft_length, target.device, draft.head(target)
    mode = draft.training
    draft.eval()  # a draft may train on fewer positions than it drafts
    right = torch.zeros(length, dtype=torch.long)
    seen = torch.zeros(length, dtype=torch.long)
    tokens = steps = 0
    for row in rows:
        ids = token_ids(row, max_length)[None]
        columns = torch.tensor(list(answer_anchors(len(row["prompt_ids"]), ids.shape[1])))
        zeros = torch.zeros_like(columns)
        labels = draft_labels(ids, zeros, columns, torch.tensor([ids.shape[1]]), length)
        taps = states([Sequence_(row["id"], ids[0], columns)]).taps
        following = following_tokens(ids.to(device))
        hidden = draft.training_hidden(taps, following, zeros.to(device), columns.to(device), target)
        guess = torch.cat([greedy(head(h)) for h in hidden.to(target.dtype).split(256)])
        hit = head.to_tokens(guess).cpu() == labels
        right += hit.sum(0)
        seen += (labels >= 0).sum(0)
        accepted = hit.long().cumprod(1).sum(1).tolist()
        tokens += len(accepted)  # all after the prefill's token; nothing beyond the end counts
        at = 0
        while at < len(accepted):
            steps += 1
            at += accepted[at] + 1
    draft.train(mode)
    return {
        "accuracy": (right / seen.clamp(min=1)).tolist(),
        "tokens_per_step": tokens / max(steps, 1),
    }


def train(
    base: Base,
    draft: Draft,
    rows: Sequence[Row],
    validation: Sequence[Row],
    out_dir: str | Path,
    *,
    epochs: float,
    sequences_per_step: int,
    micro_batch: int,
    max_length: int,
    anchor_fraction: float,
    anchor_decay: float,
    soft_labels: int,
    position_weights: float | str,
    lr: float,
    min_lr: float,
    warmup: float,
    eps: float,
    betas: tuple[float, float],
    weight_decay: float,
    clip: float,
    validate_every: int,
    checkpoint_every: int,
    patience: int = 0,
    log_with: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    hidden_gib: float = 0.0,
    hidden_dir: str | Path | None = None,
    hidden_others: Sequence[tuple[tuple[int, ...], int]] = (),
    target: Target | None = None,
) -> dict[str, Any]:
    """Train `draft` on `rows` and save the best one by validation tokens_per_step in `out_dir`.

    rows, validation: dialogues with id, prompt_ids, answer_ids; validation answers must be the base's own.
    anchor_fraction: share of answer positions drafted from; anchor_decay: see `thin`; soft_labels: learn from
    the base's own so many most probable tokens instead of from the text's one (0: the text's);
    position_weights: see `weigh`; warmup: share of the steps; dtype: of the draft's matmuls ("auto": the
    base's), its weights and AdamW's state are float32;
    patience: stop after so many validations without a better tokens_per_step (0: never); log_with: "dvclive"
    or "tensorboard", which then writes below `out_dir`, beside log.jsonl (None: neither).
    hidden_gib: disk that the base's hidden states may take to be reused over epochs (0: computed each time),
    hidden_dir: where (default: a folder in `out_dir`, deleted at the end); hidden_others: hooks and
    soft_labels of other drafts that will read that folder.
    Writes log.jsonl (a line a step: step, tokens, loss, lr, seconds, accuracy per position; validation lines
    with tokens_per_step too), checkpoint/ while it runs, and config.json, model.safetensors, summary.json.
    A run that was killed goes on from its checkpoint, on one CPU process bit for bit; a finished one with
    the same settings is returned as it is. Raises UserError for no usable rows, a checkpoint of other
    settings or a corrupt one, a loss that is not finite (step and dialogues named), and a draft without
    parameters.
    """
    out_dir = Path(out_dir)
    settings: dict[str, Any] = {k: v for k, v in locals().items() if isinstance(v, int | float | str | tuple)}
    for place in ("out_dir", "hidden_dir", "hidden_others", "hidden_gib", "log_with"):
        settings.pop(place, None)
    settings |= {"rows": len(rows), "base": draft.config.base_fingerprint}
    settings["betas"] = list(betas)
    settings["data"] = data_digest(rows)
    settings["draft"] = json.loads(json.dumps(vars(draft.config)))
    finished = _finished(out_dir, settings)
    if finished is not None:
        return finished
    if not draft.trainable:
        raise UserError(f"a draft of kind {draft.config.kind!r} has nothing to train: use it as it is")
    rows = choose_sequences(rows, max_length)
    validation = choose_sequences(validation, max_length)
    if not rows or not validation:
        raise UserError(
            f"no dialogue to train or validate on is long enough to draft from within max_length "
            f"{max_length}: raise train.max_length or shorten the prompts"
        )

    AcceleratorState._reset_state()  # it keeps the precision of the process's first run otherwise
    precision = DTYPES.get(dtype, base.dtype)
    accelerator = Accelerator(
        cpu=base.device.type == "cpu",
        mixed_precision="bf16" if precision == torch.bfloat16 else "no",
        log_with=log_with,
        project_dir=str(out_dir),
    )
    _start_tracker(accelerator, out_dir, log_with)
    target = target or Target(base, max_length)
    plan = Schedule(rows, sequences_per_step, epochs, max_length, anchor_fraction, seed)
    unpack_linears(draft)
    draft = draft.to(base.device, torch.float32).train()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, math.ceil(warmup * plan.steps), plan.steps, min_lr=min_lr
    )
    model, optimizer = accelerator.prepare(DraftForward(draft), optimizer)
    state = TrainingState(settings)
    accelerator.register_for_checkpointing(state, scheduler)
    out_dir.mkdir(parents=True, exist_ok=True)
    _resume(accelerator, state, out_dir, settings)
    accelerator.wait_for_everyone()  # all have read what the first one may replace
    if accelerator.is_main_process:  # of other settings: from here on the folder is no longer that run's
        (out_dir / DONE).unlink(missing_ok=True)

    world, rank = accelerator.num_processes, accelerator.process_index
    hidden_states = _hidden_states(
        target,
        [*rows, *validation],
        plan,
        max_length,
        [(draft.hooks, soft_labels), *hidden_others],
        hidden_gib,
        hidden_dir,
        out_dir,
    )
    head = draft.head(target)
    average = sum(_total(r, max_length) for r in rows) / len(rows)
    accelerator.print(
        f"training {out_dir.name}: {plan.steps} steps of {sequences_per_step} dialogues, about "
        f"{plan.steps * sequences_per_step * average / 1e3:.0f}k tokens, "
        f"{draft.parameter_counts().total / 1e6:.1f}M trainable parameters"
        + (f", going on at step {state.step}" if state.step else "")
    )
    started = time.perf_counter()
    whole = [Sequence_(r["id"], token_ids(r, max_length), torch.empty(0)) for r in [*rows, *validation]]
    hidden_states.fill(whole[rank::world], name=f"hidden states for {out_dir.name}")
    accelerator.wait_for_everyone()
    state.hidden_seconds += time.perf_counter() - started
    # one writer: another process's handle, or its tidying up, would lose lines
    log = (out_dir / LOG).open("a") if accelerator.is_main_process else None
    with Progress(f"train {out_dir.name}", plan.steps, "steps", done=state.step) as bar:
        while state.step < plan.steps and not _gave_up(state, patience):
            started = time.perf_counter()
            batches = micro_batches(
                plan.step(state.step), micro_batch, draft.trained_length, anchor_decay, base.device
            )
            for batch in batches:
                batch.labels = head.to_index(batch.labels)
            counts = torch.stack([(b.labels != NONE).sum(0) for b in batches]).sum(0)
            learnt = torch.stack([(b.labels >= 0).sum(0) for b in batches]).sum(0)
            weights = weigh(learnt, position_weights, state.accuracy)
            loss, correct = 0.0, torch.zeros_like(counts)
            mine = batches[rank::world]
            if not mine:  # fewer batches than processes, and the others wait for a gradient: one of nothing
                mine, weights = batches[:1], torch.zeros_like(weights)
            for i, batch in enumerate(mine):
                with accelerator.autocast():
                    teaching = hidden_states(batch.sequences)
                    # gradients are summed over micro-batches and averaged over processes
                    with _synchronise_last(accelerator, model, i == len(mine) - 1):
                        hidden = model(teaching.taps, batch, target)
                        scored = backward(draft, hidden, teaching, batch, weights, head, target, world)
                loss += scored.loss
                correct += scored.correct * (rank < len(batches))
                if not math.isfinite(loss):
                    names = ", ".join(s.id for s in batch.sequences)
                    raise UserError(
                        f"the loss is {loss} at step {state.step}, dialogues {names}: the checkpoint of step "
                        f"{state.saved} is kept in {out_dir}; lower train.lr or use float32"
                    )
            summed = torch.tensor([loss], dtype=torch.float64, device=base.device)
            loss = float(accelerator.reduce(summed, "sum")[0])
            correct = torch.as_tensor(accelerator.reduce(correct, "sum"))
            share = (correct / counts.clamp(min=1)).tolist()
            state.accuracy = [
                0.98 * old + 0.02 * new for old, new in zip(state.accuracy or share, share, strict=True)
            ]
            accelerator.clip_grad_norm_(draft.parameters(), clip)
            optimizer.step()
            rate = scheduler.get_last_lr()[0]
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            state.step += 1
            state.tokens += sum(b.tokens for b in batches)
            state.seconds += time.perf_counter() - started
            entry: dict[str, Any] = {
                "step": state.step,
                "tokens": state.tokens,
                "loss": loss,
                "lr": rate,
                "seconds": round(state.seconds, 3),
                "accuracy": share,
            }
            last = state.step == plan.steps
            if last or state.step % validate_every == 0:
                entry["validation"] = _validate(draft, target, validation, max_length, hidden_states)
                entry["tokens_per_step"] = entry["validation"]["tokens_per_step"]
                better = entry["tokens_per_step"] > state.best
                if accelerator.is_main_process and better:
                    draft.save_pretrained(out_dir)
                state.best = max(state.best, entry["tokens_per_step"])
                state.stale = 0 if better else state.stale + 1
            accelerator.log(_flat(entry), step=state.step)
            if log is not None:
                log.write(json.dumps(entry) + "\n")
                log.flush()
            if last or state.step % checkpoint_every == 0:
                _checkpoint(accelerator, state, out_dir)
            bar.advance(
                1,
                f"loss {loss:.3f} first position {entry['accuracy'][0]:.0%} best tokens/step "
                f"{state.best:.2f} {state.tokens / state.seconds:.0f} tok/s",
            )
    if log is not None:
        log.close()
    for tracker in accelerator.trackers:  # `end_training` would take down the process group too
        tracker.finish()
    if _gave_up(state, patience):
        accelerator.print(f"stopped at step {state.step}: {patience} validations without a better draft")
    summary = {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 1),
        "hidden_seconds": round(state.hidden_seconds, 1),
        "tokens_per_second": round(state.tokens / state.seconds, 1),
        "tokens_per_step": state.best,
        "dialogues": len(rows),
        "settings": settings,
    }
    if accelerator.is_main_process:
        (out_dir / DONE).write_text(json.dumps(summary, indent=2) + "\n")
        shutil.rmtree(out_dir / CHECKPOINT, ignore_errors=True)
        if hidden_dir is None:
            hidden_states.clear()
    accelerator.wait_for_everyone()
    return summary


@dataclass
class TrainingState:
    """Where a run stands; saved with each checkpoint. seconds: of its steps; hidden_seconds: spent on the
    base's hidden states before them; stale: validations since the best one; saved: step of the last
    checkpoint; accuracy: running
    mean of the share of right labels per draft position."""

    settings: dict[str, Any]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0
    best: float = 0.0
    stale: int = 0
    saved: int = 0
    accuracy: list[float] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _gave_up(state: TrainingState, patience: int) -> bool:
    return 0 < patience <= state.stale


def _start_tracker(accelerator: Accelerator, out_dir: Path, log_with: str | None) -> None:
    """Raises UserError where the package that `log_with` names is not installed."""
    if log_with is None:
        return
    if not accelerator.log_with:
        raise UserError(
            f"train.log_with: {log_with} is not installed: pip install {log_with}, or set it to null"
        )
    # left to itself it rewrites the pipeline's dvc.yaml
    live = {"dir": str(out_dir / "dvclive"), "dvcyaml": None, "save_dvc_exp": False, "resume": True}
    accelerator.init_trackers(out_dir.name, init_kwargs={"dvclive": live})


def _flat(entry: dict[str, Any]) -> dict[str, float]:
    """A log entry as trackers want it: one number a name."""
    flat = {key: entry[key] for key in ("tokens", "loss", "lr", "seconds", "tokens_per_step") if key in entry}
    shares = {"train": entry["accuracy"], "validation": entry.get("validation", {}).get("accuracy", [])}
    for split, accuracy in shares.items():
        flat |= {f"{split}/accuracy_{j}": share for j, share in enumerate(accuracy, 1)}
    return flat


def _hidden_states(
    target: Target,
    rows: Sequence[Row],
    plan: Schedule,
    max_length: int,
    wanted: Sequence[tuple[tuple[int, ...], int]],
    hidden_gib: float,
    hidden_dir: str | Path | None,
    out_dir: Path,
) -> HiddenStates:
    """The base's hidden states, kept on disk when they are used again and fit; says so either way.

    wanted: hooks and soft labels, one's own first.
    """
    (hooks, top), *others = wanted
    folder = Path(hidden_dir) if hidden_dir else out_dir / "hidden"
    computed = HiddenStates(target, hooks, None, top)
    if hidden_gib == 0 or (hidden_dir is None and plan.steps <= plan.steps_per_epoch):
        return computed
    size = 0.0
    for sharing in (others, ()):  # where they do not fit for all, then for this draft alone
        kept = HiddenStates(target, hooks, folder, top, sharing)
        size = sum(_total(r, max_length) for r in rows) * kept.bytes_per_token() / GIB
        if size <= hidden_gib:
            print(f"hidden states: {size:.2f} GiB in {folder}, computed once", flush=True)
            return kept
    print(f"hidden states would take {size:.1f} GiB, {hidden_gib} are allowed: computed every epoch")
    return computed


def weigh(counts: Tensor, by: float | str, accuracy: Sequence[float]) -> Tensor:
    """The factor of one label at each draft position (l_d,): the position's share / its labels in the step.

    counts (l_d,): labels of the step; shares sum to 1 over positions that have labels. by 1.0: equal shares,
    as in the paper; below 1: shares decay as by^j; "acceptance": a position's share goes with the probability
    that those before it are accepted, the product of their `accuracy` (empty: not known yet, equal).
    """
    if by == "acceptance":
        before = torch.tensor([1.0, *accuracy[: len(counts) - 1]] if accuracy else [1.0] * len(counts))
        share = before.cumprod(0).to(counts.device)
    else:
        share = float(by) ** torch.arange(len(counts), device=counts.device)
    share = share * (counts > 0)
    return share / share.sum().clamp(min=1e-9) / counts.clamp(min=1)


def _synchronise_last(accelerator: Accelerator, model: torch.nn.Module, last: bool):
    return nullcontext() if last else accelerator.no_sync(model)


def _validate(
    draft: Draft, target: Target, validation: Sequence[Row], max_length: int, states: HiddenStates
) -> dict[str, Any]:
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        return validate(draft, target, validation, max_length, states)


def data_digest(rows: Sequence[Row]) -> str:
    """A short hash of ids and answers: training on other data is another run."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["id"].encode())
        digest.update(str(list(row["answer_ids"])).encode())
    return digest.hexdigest()[:16]


def _finished(out_dir: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    if not (out_dir / DONE).exists():
        return None
    summary = json.loads((out_dir / DONE).read_text())
    if summary["settings"] == json.loads(json.dumps(settings)):
        print(f"training {out_dir.name}: finished earlier with these settings, kept", flush=True)
        return summary
    return None


def _checkpoint(accelerator: Accelerator, state: TrainingState, out_dir: Path) -> None:
    """Save everything that the next step depends on, whole or not at all."""
    state.saved = state.step
    fresh, old = out_dir / (CHECKPOINT + ".tmp"), out_dir / (CHECKPOINT + ".old")
    accelerator.save_state(str(fresh))
    accelerator.wait_for_everyone()  # every process writes its part before the folder is renamed
    if accelerator.is_main_process:
        (fresh / SUMS).write_text(json.dumps(digests(fresh), indent=2))
        shutil.rmtree(old, ignore_errors=True)
        if (out_dir / CHECKPOINT).exists():
            os.replace(out_dir / CHECKPOINT, old)
        os.replace(fresh, out_dir / CHECKPOINT)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def _resume(accelerator: Accelerator, state: TrainingState, out_dir: Path, settings: dict[str, Any]) -> None:
    """Load the checkpoint of a killed run, and cut the log back to it."""
    folder = next((f for f in (out_dir / CHECKPOINT, out_dir / (CHECKPOINT + ".old")) if f.exists()), None)
    if folder is None:
        if accelerator.is_main_process:
            (out_dir / LOG).unlink(missing_ok=True)
        return
    try:
        wanted, found = json.loads((folder / SUMS).read_text()), digests(folder)
        damaged = [name for name, digest in wanted.items() if digest != found.get(name)]
        if damaged:
            raise ValueError(f"{', '.join(damaged)} not as written")
        accelerator.load_state(str(folder))
    except Exception as error:  # torch, safetensors and accelerate each raise their own
        raise UserError(
            f"the checkpoint in {folder} cannot be read ({error}): delete that folder to train from the start"
        ) from error
    now = json.loads(json.dumps(settings))
    then = json.loads(json.dumps(state.settings))
    changed = sorted(k for k in now.keys() | then.keys() if now.get(k) != then.get(k))
    if changed:
        was = ", ".join(f"{k}: {then.get(k)} -> {now.get(k)}" for k in changed)
        raise UserError(
            f"the checkpoint in {folder} belongs to other settings ({was}): delete that folder to train from "
            f"the start, or go back to those settings"
        )
    if not accelerator.is_main_process:
        return
    lines = (out_dir / LOG).read_text().splitlines() if (out_dir / LOG).exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= state.step]
    (out_dir / LOG).write_text("".join(line + "\n" for line in kept))
