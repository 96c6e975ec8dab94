"""The training loop: what is learnt from, that splits do not matter, and that nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Killed, answered, killed_at, nano_base, perturbed_specformer, settings

from specformer import training
from specformer.base import base_fingerprint, load_base
from specformer.drafts import SpecFormer, load_draft, new_draft
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.hidden import HiddenStates
from specformer.losses import head_loss
from specformer.target import Target
from specformer.training import (
    Schedule,
    Sequence_,
    answer_anchors,
    choose_sequences,
    draft_labels,
    following_tokens,
    make_batch,
    micro_batches,
    soft_targets,
    thin,
    train,
    validate,
    weigh,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tiny_tokenizer):
    return nano_base(tiny_tokenizer, 320, stop_token_ids=(0, 2))


@pytest.fixture(scope="module")
def rows(base):
    """The base's own greedy answers, as self-distillation stores them."""
    return answered(base, 24, 14)


def fresh_draft(base):
    return perturbed_specformer(base, 3)


# ---------------------------------------------------------------- anchors and labels


def test_anchors_begin_at_the_last_prompt_token():
    """Prompt 10 11 12, answer 20 21 22 23: the first draft is made at 12, after the base's 20, for 21."""
    ids = torch.tensor([10, 11, 12, 20, 21, 22, 23])
    columns = torch.tensor(list(answer_anchors(3, 7)))
    assert columns.tolist() == [2, 3, 4]
    labels = draft_labels(ids[None], torch.zeros(3, dtype=torch.long), columns, torch.tensor([7]), 3)
    assert labels.tolist() == [[21, 22, 23], [22, 23, -100], [23, -100, -100]]
    for one_token in (4, 3):  # an answer of one token or none leaves nothing to draft
        assert len(answer_anchors(3, one_token)) == 0


def test_nothing_of_the_prompt_nor_of_the_padding_is_a_label():
    """Padding equals the end token (0); the true end stays a label, what stands behind it does not."""
    long = Sequence_("a", torch.tensor([10, 11, 12, 13, 20, 21, 22, 0]), torch.tensor([3, 4, 5]))
    short = Sequence_("b", torch.tensor([14, 23, 24, 0]), torch.tensor([0, 1]))
    batch = make_batch([long, short], 4, 1.0, CPU)
    assert batch.ids.shape == (2, 8) and batch.ids[1, 4:].tolist() == [0, 0, 0, 0]
    assert batch.tokens == 12
    found = {
        (int(r), int(c)): line.tolist()
        for r, c, line in zip(batch.rows, batch.columns, batch.labels, strict=True)
    }
    assert found == {
        (0, 3): [21, 22, 0, -100],
        (0, 4): [22, 0, -100, -100],
        (0, 5): [0, -100, -100, -100],
        (1, 0): [24, 0, -100, -100],
        (1, 1): [0, -100, -100, -100],
    }


def test_thinning_keeps_a_share_of_late_positions():
    labels = torch.arange(100)[:, None].expand(-1, 4).clone()
    assert (thin(labels, 1.0) == labels).all()
    assert (thin(labels, 0.5) >= 0).sum(0).tolist() == [100, 50, 25, 13]


def test_schedule_is_a_function_of_seed_and_step(rows):
    plan = Schedule(rows, 5, 2, 64, 0.5, seed=1)
    assert (plan.steps_per_epoch, plan.steps) == (5, 10)
    epochs = [[s.id for i in range(e, e + 5) for s in plan.step(i)] for e in (0, 5)]
    for epoch in epochs:
        assert sorted(epoch) == [r["id"] for r in rows], "an epoch sees every dialogue once"
    assert epochs[0] != epochs[1]
    by_id = {r["id"]: r for r in rows}
    again = Schedule(rows, 5, 2, 64, 0.5, seed=1)
    for a, b in zip(plan.step(7), again.step(7), strict=True):
        assert a.id == b.id and torch.equal(a.anchors, b.anchors)
        row = by_id[a.id]
        n, total = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["answer_ids"])
        assert a.ids.tolist() == row["prompt_ids"] + row["answer_ids"]
        assert len(set(a.anchors.tolist())) == len(a.anchors) == max(1, round(0.5 * (total - n - 1)))
        assert set(a.anchors.tolist()) <= set(answer_anchors(n, total))
    other = Schedule(rows, 5, 2, 64, 0.5, seed=2)
    assert [s.id for s in plan.step(0)] != [s.id for s in other.step(0)]


def test_rows_too_short_or_cut_to_nothing_are_left_out():
    rows = [
        {"id": "good", "prompt_ids": [5] * 4, "answer_ids": [6, 7, 0]},
        {"id": "one token", "prompt_ids": [5], "answer_ids": [0]},
        {"id": "long prompt", "prompt_ids": [5] * 20, "answer_ids": [6, 7, 0]},
    ]
    assert [r["id"] for r in choose_sequences(rows, 12)] == ["good"]
    assert [r["id"] for r in choose_sequences(rows, 64)] == ["good", "long prompt"]


# ---------------------------------------------------------------- gradients


def gradients(base, sequences, size, extra_padding=0):
    """Draft gradients of one step as `train` makes them, and its loss."""
    draft, target = fresh_draft(base).train(), Target(base, 128)
    batches = micro_batches(sequences, size, draft.draft_length, 1.0, CPU)
    weights = weigh(torch.stack([(b.labels >= 0).sum(0) for b in batches]).sum(0), 1.0, [])
    loss = 0.0
    for batch in batches:
        ids = F.pad(batch.ids, (0, extra_padding), value=base.stop_token_ids[0])
        _, taps = target.encode(ids, draft.hooks)
        assert taps is not None
        hidden = draft.training_hidden(taps, following_tokens(ids), batch.rows, batch.columns, target)
        scored = head_loss(hidden.detach(), batch.labels, weights, target.head)
        hidden.backward(scored.grad)
        loss += scored.loss
    return loss, torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])


def plain_gradients(base, sequences):
    """The loss as the paper writes it (Equation 6b), one dialogue at a time, by autograd alone."""
    draft, target = fresh_draft(base).train(), Target(base, 128)
    logits, labels = [], []
    for s in sequences:
        _, taps = target.encode(s.ids[None], draft.hooks)
        assert taps is not None
        zeros = torch.zeros_like(s.anchors)
        hidden = draft.training_hidden(taps, following_tokens(s.ids[None]), zeros, s.anchors, target)
        logits.append(base.model.lm_head(base.model.model.norm(hidden)))
        for t in s.anchors.tolist():
            labels.append([int(s.ids[t + 2 + j]) if t + 2 + j < len(s.ids) else -100 for j in range(3)])
    scores, truth = torch.cat(logits), torch.tensor(labels)
    loss = torch.stack([F.cross_entropy(scores[:, j], truth[:, j]) for j in range(3)]).mean()
    loss.backward()
    grads = [p.grad.flatten() for p in draft.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(grads)


def test_micro_batches_and_padding_do_not_change_the_gradient(base, rows):
    sequences = Schedule(rows, 8, 1, 64, 0.6, seed=0).step(0)
    loss, expected = plain_gradients(base, sequences)
    for size, padding in ((1, 0), (3, 0), (8, 0), (8, 17)):
        found, grad = gradients(base, sequences, size, padding)
        assert found == pytest.approx(loss, rel=1e-6), (size, padding)
        assert (grad - expected).norm() / expected.norm() < 2e-6, (size, padding)


# ---------------------------------------------------------------- the loop


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_only_the_draft_learns_and_everything_is_recorded(base, rows, tmp_path):
    before, start = base_fingerprint(base.model), fresh_draft(base)
    logits = base.model(torch.tensor([[5, 6, 7]])).logits
    draft = fresh_draft(base)
    summary = train(base, draft, rows, rows[:4], tmp_path, **settings())
    assert base_fingerprint(base.model) == before
    assert torch.equal(base.model(torch.tensor([[5, 6, 7]])).logits, logits)
    assert all(p.grad is None and not p.requires_grad for p in base.model.parameters())
    for (name, old), new in zip(start.named_parameters(), draft.parameters(), strict=True):
        assert not torch.equal(old, new), f"{name} has not moved"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json", "log.jsonl", "model.safetensors", "summary.json",
    ]  # fmt: skip
    log, used = log_of(tmp_path), choose_sequences(rows, 64)
    assert [e["step"] for e in log] == [1, 2, 3, 4] and summary["steps"] == 4
    assert ["tokens_per_step" in e for e in log] == [False, True, False, True]
    assert log[-1]["tokens"] == summary["tokens"] == sum(len(r["prompt_ids"] + r["answer_ids"]) for r in used)
    assert all(len(e["accuracy"]) == 3 and 0 <= min(e["accuracy"]) <= max(e["accuracy"]) <= 1 for e in log)
    assert log[0]["lr"] == pytest.approx(0) and log[1]["lr"] == pytest.approx(1e-3)
    assert summary["tokens_per_step"] == max(e.get("tokens_per_step", 0) for e in log)
    assert summary["dialogues"] == len(used)
    assert isinstance(load_draft(tmp_path, base), SpecFormer)


def test_a_finished_run_is_returned_and_other_settings_start_anew(base, rows, tmp_path, capsys):
    first = train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(epochs=0.5))
    weights = (tmp_path / "model.safetensors").read_bytes()
    again = train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(epochs=0.5))
    assert again == json.loads(json.dumps(first)) and "finished earlier" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    other = train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(epochs=0.5, lr=5e-3))
    assert other["settings"]["lr"] == 5e-3
    assert (tmp_path / "model.safetensors").read_bytes() != weights
    assert [e["step"] for e in log_of(tmp_path)] == [1, 2]


def test_two_steps_a_kill_and_two_more_equal_four_bit_for_bit(base, rows, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    four = fresh_draft(base)
    train(base, four, rows, rows[:4], whole, **settings())
    for step in (3, 2):  # killed after step 3 (checkpoint at 2), and again right at the checkpoint
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            with pytest.raises(Killed):
                train(base, fresh_draft(base), rows, rows[:4], parts, **settings())
        assert (parts / "checkpoint").is_dir() and not (parts / "summary.json").exists()
    torch.manual_seed(99)  # other randomness in the new process must not matter
    resumed = fresh_draft(base)
    for p in resumed.parameters():
        p.data.zero_()
    train(base, resumed, rows, rows[:4], parts, **settings())
    for (name, a), b in zip(four.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
    for a, b in zip(log_of(whole), log_of(parts), strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}


def test_a_run_of_other_settings_takes_the_folder_over(base, rows, tmp_path, monkeypatch):
    """Killed amid the second run, the folder no longer passes for the finished first one."""
    train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings())
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(Killed):
            train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(lr=5e-3))
    with pytest.raises(UserError, match="belongs to other settings.*lr"):
        train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings())
    assert train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(lr=5e-3))["steps"] == 4


def test_a_draft_that_has_decoded_still_learns(base, rows, tmp_path):
    """The engine packs a draft's matmuls for inference; training must not run on those copies."""
    draft, start = fresh_draft(base), fresh_draft(base)
    list(Engine(base, draft, k=2, batch_size=2, max_length=64).run([Request("x", [5, 6], 4)]))
    train(base, draft, rows, rows[:4], tmp_path / "used", **settings())
    other = fresh_draft(base)
    train(base, other, rows, rows[:4], tmp_path / "unused", **settings())
    for (name, a), b, c in zip(draft.named_parameters(), other.parameters(), start.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c), name


@pytest.fixture
def killed(base, rows, tmp_path, monkeypatch):
    """A run that died after its checkpoint of step 2."""
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(Killed):
            train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings())
    return tmp_path


def test_changed_settings_are_refused_by_name(base, rows, killed):
    for change, message in (
        ({"lr": 2e-3}, r"lr: 0\.001 -> 0\.002"),
        ({"betas": (0.9, 0.99)}, r"betas: \[0\.9, 0\.95\] -> \[0\.9, 0\.99\]"),
        ({"seed": 6}, "seed: 5 -> 6"),
    ):
        with pytest.raises(UserError, match=message):
            train(base, fresh_draft(base), rows, rows[:4], killed, **settings(**change))
    other = [rows[0] | {"answer_ids": [7, 8, 9]}, *rows[1:]]
    with pytest.raises(UserError, match="data: "):
        train(base, fresh_draft(base), other, rows[:4], killed, **settings())
    assert len(log_of(killed)) == 3, "a refused run changes nothing"
    train(base, fresh_draft(base), rows, rows[:4], killed, **settings())


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "one bit"])
def test_a_corrupt_checkpoint_is_refused(base, rows, killed, damage):
    files = [f for f in (killed / "checkpoint").iterdir() if not f.name.startswith("random_states")]
    assert {f.suffix for f in files} >= {".bin", ".pkl", ".safetensors"}
    for file in files:  # the loop draws nothing from the random states
        whole = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]  # within a tensor or a pickle
            damaged = {
                "truncated": whole[: len(whole) // 2],
                "garbage": b"\xff" * len(whole),
                "one bit": flipped,
            }
            file.write_bytes(damaged[damage])
        with pytest.raises(UserError, match="(?s)checkpoint.* cannot be read.*delete that folder"):
            train(base, fresh_draft(base), rows, rows[:4], killed, **settings())
        file.write_bytes(whole)
    train(base, fresh_draft(base), rows, rows[:4], killed, **settings())


def test_a_loss_that_is_not_finite_stops_with_step_and_dialogues(base, rows, tmp_path, monkeypatch):
    original, calls = training.head_loss, []

    def overflowing(*arguments):
        calls.append(1)
        scored = original(*arguments)
        if len(calls) == 8:  # three micro-batches a step: the second of step 2
            scored.loss = float("nan")
        return scored

    monkeypatch.setattr(training, "head_loss", overflowing)
    draft = fresh_draft(base)
    with pytest.raises(UserError) as caught:
        train(base, draft, rows, rows[:4], tmp_path, **settings())
    step = Schedule(choose_sequences(rows, 64), 6, 1.0, 64, 0.5, 5).step(2)
    guilty = [s.id for s in micro_batches(step, 2, 3, 0.8, CPU)[1].sequences]
    message = str(caught.value)
    assert "the loss is nan at step 2" in message and "checkpoint of step 2 is kept" in message
    assert all(name in message for name in guilty) and len(guilty) == 2
    assert (tmp_path / "checkpoint").is_dir()
    monkeypatch.setattr(training, "head_loss", original)
    assert train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings())["steps"] == 4


def test_no_usable_dialogue_is_said_so(base, rows, tmp_path):
    for some, held in ((rows, []), ([], rows), (rows, [{"id": "x", "prompt_ids": [5], "answer_ids": [2]}])):
        with pytest.raises(UserError, match="no dialogue to train or validate on.*max_length"):
            train(base, fresh_draft(base), some, held, tmp_path, **settings())


@pytest.mark.parametrize("new_tokens", [20, 40])
def test_validation_measures_what_the_engine_measures(base, tiny_qwen3, new_tokens):
    """Teacher-forced acceptance on greedy answers, k = draft_length: the engine's very tokens_per_step,
    whether answers end by themselves or by the cap."""
    for model in (base, tiny_qwen3):
        held = answered(model, 16, new_tokens, seed=11)
        draft, target = perturbed_specformer(model, 4, noise=0.003), Target(model, 128)
        found = validate(draft, target, choose_sequences(held, 128), 128)
        engine = Engine(model, draft, k=4, batch_size=5, max_length=120)
        requests = [Request(r["id"], r["prompt_ids"], new_tokens) for r in held]
        steps = [s for r in engine.run(requests) for s in r.steps]
        assert found["tokens_per_step"] == pytest.approx(sum(s.committed for s in steps) / len(steps))
        assert len(found["accuracy"]) == 4
        assert sum(s.accepted > 0 for s in steps) > 3 and any(s.truncated for s in steps), "too plain a case"


def test_accuracy_by_position_by_hand(base):
    """A draft at its identity start says at every position what the base says after t."""
    draft = perturbed_specformer(base, 2, noise=0.0)
    prompt, answer = [5, 6], [7, 8, 9, 10]
    ids = torch.tensor([prompt + answer])
    says = base.model(ids).logits[0].argmax(-1).tolist()
    found = validate(draft, Target(base, 16), [{"id": "x", "prompt_ids": prompt, "answer_ids": answer}], 16)
    hits = [[says[t] == ids[0, t + 2 + j] for t in (1, 2, 3) if t + 2 + j < 6] for j in (0, 1)]
    assert found["accuracy"] == pytest.approx([sum(map(bool, h)) / len(h) for h in hits])


def test_eight_dialogues_are_learnt_by_heart(base, rows, tmp_path):
    eight = [r for r in rows if len(r["answer_ids"]) > 8][:8]
    options = settings(epochs=60, sequences_per_step=8, micro_batch=8, anchor_fraction=1.0, anchor_decay=1.0)
    options |= {"lr": 5e-3, "validate_every": 60, "checkpoint_every": 100}
    summary = train(base, fresh_draft(base), eight, eight, tmp_path, **options)
    log = log_of(tmp_path)
    assert log[-1]["loss"] < 0.1 * log[0]["loss"]
    assert min(log[-1]["accuracy"]) > 0.95
    # and the saved draft decodes them nearly at the ceiling of 1 + 3 tokens a step
    engine = Engine(base, load_draft(tmp_path, base), k=3, batch_size=4, max_length=96)
    steps = [
        s
        for r in engine.run([Request(r["id"], r["prompt_ids"], len(r["answer_ids"])) for r in eight])
        for s in r.steps
    ]
    assert sum(s.committed for s in steps) / len(steps) > 2.5 and summary["tokens_per_step"] > 2.5


def test_bfloat16_trains_too(tiny_llama_folder, tmp_path):
    """The draft's weights stay float32, its matmuls and the base are bfloat16; the loss falls."""
    half = load_base(tiny_llama_folder, dtype="bfloat16", device="cpu")
    rows = answered(half, 8, 12)
    draft = perturbed_specformer(half, 3)
    options = settings(
        epochs=12, sequences_per_step=8, micro_batch=8, lr=5e-3, dtype="auto", validate_every=100
    )
    train(half, draft, rows, rows[:2], tmp_path, **options)
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    log = log_of(tmp_path)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


# ---------------------------------------------------------------- beyond the paper


def test_position_weights():
    """Shares of positions, divided by their labels; positions without labels take no share."""
    counts = torch.tensor([10, 5, 4, 0])
    torch.testing.assert_close(weigh(counts, 1.0, []) * counts, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))
    decayed = weigh(counts, 0.5, []) * counts
    torch.testing.assert_close(decayed, torch.tensor([4 / 7, 2 / 7, 1 / 7, 0]))
    aware = weigh(counts, "acceptance", [0.5, 0.2, 0.9, 0.9]) * counts
    torch.testing.assert_close(aware, torch.tensor([1 / 1.6, 0.5 / 1.6, 0.1 / 1.6, 0]))
    unknown = weigh(counts, "acceptance", []) * counts
    torch.testing.assert_close(unknown, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))


def test_soft_labels_stand_where_the_labels_do(base, rows):
    """With greedy answers the base's most probable token at each label is that label."""
    target, draft = Target(base, 64), perturbed_specformer(base, 3, vocabulary=200)
    draft.choose_vocabulary(rows, 320)
    head = draft.head(target)
    batch = make_batch(Schedule(rows, 4, 1, 64, 1.0, seed=0).step(0), 3, 1.0, CPU)
    teaching = HiddenStates(target, draft.hooks, None, top=4)(batch.sequences)
    soft = soft_targets(teaching, batch, head)
    assert soft is not None and soft.index.shape == (len(batch.rows), 3, 4)
    there = head.to_index(batch.labels)
    known = there >= 0
    assert known.any() and torch.equal(soft.index[..., 0][known], there[known])
    total = soft.probability.sum(-1)
    assert torch.allclose(total[known], torch.ones(()), atol=1e-5)
    assert not soft.probability[soft.index < 0].any()
    assert soft_targets(HiddenStates(target, draft.hooks, None)(batch.sequences), batch, head) is None


def test_training_with_everything_resumes_bit_for_bit(base, rows, tmp_path, monkeypatch):
    def draft():
        made = perturbed_specformer(base, 3, vocabulary=200, anchor_token="context")
        made.choose_vocabulary(rows, 320)
        return made

    options = settings(soft_labels=4, position_weights="acceptance", hidden_gib=1.0, epochs=2.0)
    whole = train(base, draft(), rows, rows[:4], tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(Killed):
            train(base, draft(), rows, rows[:4], tmp_path / "parts", **options)
    parts = train(base, draft(), rows, rows[:4], tmp_path / "parts", **options)
    files = [tmp_path / run / "model.safetensors" for run in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    losses = [e["loss"] for e in log_of(tmp_path / "whole")]
    assert losses == [e["loss"] for e in log_of(tmp_path / "parts")] and losses[-1] < losses[0]
    assert whole["tokens_per_step"] == parts["tokens_per_step"]
    loaded = load_draft(tmp_path / "whole", base)
    assert torch.equal(torch.as_tensor(loaded.vocabulary), torch.as_tensor(draft().vocabulary))


# ---------------------------------------------------------------- watching it


def test_it_stops_when_validation_no_longer_improves(base, rows, tmp_path, capsys):
    """A rate of nothing: the first validation stays the best, and two more without a better one end it."""
    options = settings(epochs=4.0, validate_every=2, lr=1e-12, min_lr=0.0, patience=2)
    summary = train(base, fresh_draft(base), rows, rows[:4], tmp_path, **options)
    assert summary["steps"] == 6 and "2 validations without a better draft" in capsys.readouterr().out
    assert [e["step"] for e in log_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(load_draft(tmp_path, base), SpecFormer)


def test_dvclive_gets_what_the_log_has(base, rows, tmp_path):
    pipeline = Path(__file__).parent.parent / "dvc.yaml"
    before = pipeline.read_bytes()
    train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(log_with="dvclive"))
    assert pipeline.read_bytes() == before, "it meddles with the pipeline"
    last = log_of(tmp_path)[-1]
    found = json.loads((tmp_path / "dvclive" / "metrics.json").read_text())
    assert found["loss"] == pytest.approx(last["loss"]) and found["step"] == last["step"]
    assert found["tokens_per_step"] == pytest.approx(last["tokens_per_step"])
    assert found["validation"]["accuracy_3"] == pytest.approx(last["validation"]["accuracy"][2])
    lines = (tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()
    assert len(lines) == 1 + last["step"]


def test_a_tracker_that_is_not_installed_is_named(base, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda *_: [])  # as without the package
    with pytest.raises(UserError, match="tensorboard is not installed: pip install tensorboard"):
        train(base, fresh_draft(base), rows, rows[:4], tmp_path, **settings(log_with="tensorboard"))


def test_a_base_that_does_not_fit_teaches_the_same(tiny_llama, tiny_llama_folder, tmp_path):
    """Two of its layers are read from disk as they run."""
    rows = answered(tiny_llama, 12, 10)
    model: Any = tiny_llama.model
    weights = sum(p.numel() for p in model.parameters()) * 4
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    room: dict[int | str, str] = {"cpu": f"{(weights - 2 * layer) / 1024}KiB"}
    spread: Any = load_base(tiny_llama_folder, dtype="float32", device="cpu", max_memory=room)
    assert list(spread.model.hf_device_map.values()).count("disk") == 2
    losses = {}
    for name, base in (("whole", tiny_llama), ("spread", spread)):
        draft = new_draft(base, "specformer", rows, hooks=(0, 2, 4), init="base", seed=0, draft_length=3)
        options = settings(hidden_gib=0.0, soft_labels=4)
        train(base, draft, rows, rows[:4], tmp_path / name, **options)
        log = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in log]
    assert losses["spread"] == pytest.approx(losses["whole"], rel=1e-5)
    assert load_draft(tmp_path / "spread", tiny_llama).draft_length == 3


def test_hidden_states_take_what_room_there_is(tiny_llama, tmp_path, capsys):
    """For all drafts if they fit, else for this one, else they are computed each time."""
    rows = answered(tiny_llama, 4, 8)
    one = sum(len(r["prompt_ids"]) + len(r["answer_ids"]) for r in [*rows, *rows]) * 3 * 64 * 4 / 2**30

    def folder(name, gib):
        fresh = new_draft(
            tiny_llama, "specformer", rows, init="base", seed=0, hooks=(0, 2, 4), draft_length=2
        )
        options = settings(
            hidden_gib=gib, epochs=1.0, hidden_dir=tmp_path / name, hidden_others=[((1, 3), 0)]
        )
        train(tiny_llama, fresh, rows, rows, tmp_path / f"run-{name}", **options)
        kept = list((tmp_path / name).glob("*.safetensors")) if (tmp_path / name).exists() else []
        return sum(file.stat().st_size for file in kept) / 2**30

    assert folder("all", 1.7 * one) >= 5 / 3 * one / 2  # the rows are there twice
    assert one / 2 <= folder("own", 1.5 * one) < 5 / 3 * one / 2
    assert folder("none", 0.9 * one) == 0
    assert "computed every epoch" in capsys.readouterr().out
