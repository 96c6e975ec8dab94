"""The ragged cache: after any acceptances it holds what a fresh prefill of the same tokens holds."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import nano_base, perturbed_specformer, prompts, proposing_bigrams

from specformer import cache
from specformer.cache import KVStore, Window, segments
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.target import Target

CPU = torch.device("cpu")


def new_store(limit=40, step=8, rows=3):
    return KVStore(2, rows, 2, 4, limit, torch.float32, CPU, step=step)


def fill(store, rows, start, n, seed=0):
    """Write random keys and values; returns them."""
    generator = torch.Generator().manual_seed(seed)
    window = Window.at(rows, start, n, int(start.max()) + n, torch.float32, False)
    store.ensure(window.upto)
    made = []
    for layer in range(len(store.kv)):
        k, v = torch.randn(2, len(start), n, 2, 4, generator=generator)
        store.write(layer, window, k, v)
        made.append((k, v))
    return window, made


@pytest.mark.parametrize("rows", [slice(0, 3), torch.tensor([2, 0, 1])])
def test_write_and_read_at_each_rows_own_place(rows):
    store = new_store()
    start = torch.tensor([0, 5, 9])
    window, made = fill(store, rows, start, 3)
    for layer, (k, v) in enumerate(made):
        keys, values = store.read(layer, window)
        assert keys.shape == values.shape == (3, 2, 12, 4)
        for b, s in enumerate(start.tolist()):
            assert torch.equal(keys[b, :, s : s + 3], k[b].transpose(0, 1))
            assert torch.equal(values[b, :, s : s + 3], v[b].transpose(0, 1))
            assert not keys[b, :, :s].any() and not keys[b, :, s + 3 :].any()


def test_reading_the_first_rows_copies_nothing():
    store = new_store()
    window, _ = fill(store, slice(0, 2), torch.tensor([0, 1]), 2)
    keys, _ = store.read(0, window)
    assert keys.untyped_storage().data_ptr() == store.kv[0].untyped_storage().data_ptr()


def test_growth_keeps_what_was_written():
    store = new_store()
    assert store.bytes() == 0
    window, _ = fill(store, slice(0, 3), torch.tensor([0, 2, 4]), 3)
    assert store.capacity == 8
    before = [tuple(t.clone() for t in store.read(i, window)) for i in range(2)]
    for tokens, capacity in ((8, 8), (9, 16), (37, 40), (40, 40), (3, 40)):
        store.ensure(tokens)
        assert store.capacity == capacity
        assert store.bytes() == 2 * 2 * 3 * 2 * 4 * 4 * capacity
    for i in range(2):
        assert all(torch.equal(a, b) for a, b in zip(store.read(i, window), before[i], strict=True))


def test_the_limit_is_refused_with_the_sizes():
    store = new_store(limit=20)
    store.ensure(20)
    with pytest.raises(UserError, match=r"20 tokens per row, 21 are needed"):
        store.ensure(21)
    assert store.capacity == 20


def test_a_window_beyond_the_capacity_is_refused():
    """The C++ kernel would write into another row's memory."""
    store = KVStore(1, 2, 2, 16, 64, torch.float32, torch.device("cpu"), step=16)
    store.ensure(16)
    k = torch.ones(2, 1, 2, 16)
    window = Window.at(slice(0, 2), torch.tensor([3, 16]), 1, 17, torch.float32, fresh=False)
    with torch.no_grad(), pytest.raises(ValueError, match="room for 16 tokens a row, the window ends at 17"):
        store.write(0, window, k, k)


def test_move_copies_one_row_and_only_its_length():
    store = new_store()
    fill(store, slice(0, 3), torch.tensor([0, 0, 0]), 8)
    before = [kv.clone() for kv in store.kv]
    store.move(2, 0, 5)
    for old, new in zip(before, store.kv, strict=True):
        assert torch.equal(new[:, 0, :, :5], old[:, 2, :, :5])
        assert torch.equal(new[:, 0, :, 5:], old[:, 0, :, 5:])
        assert torch.equal(new[:, 1:], old[:, 1:])


def test_window_masks_by_each_rows_length():
    window = Window.at(slice(0, 2), torch.tensor([0, 3]), 2, 5, torch.float32, False)
    assert window.positions.tolist() == [[0, 1], [3, 4]]
    assert window.lengths.tolist() == [2, 5] and window.lengths.dtype == torch.int32
    mask = window.mask
    assert mask.shape == (2, 1, 2, 5)
    visible = (mask[:, 0] == 0).tolist()
    assert visible[0] == [[True] + [False] * 4, [True] * 2 + [False] * 3]
    assert visible[1] == [[True] * 4 + [False], [True] * 5]
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}
    picked = window.pick(torch.tensor([1, 0]), torch.float32)
    assert picked.positions.tolist() == [[1], [3]]
    assert (picked.mask[:, 0, 0] == 0).tolist() == [[True] * 2 + [False] * 3, [True] * 4 + [False]]


def test_a_drafts_own_tokens_lie_behind_the_last_accepted_one():
    """Two places behind positions 1 and 4; of three behind, the second row's lies beyond the limit of 7."""
    positions, runs = torch.tensor([[0, 1], [3, 4]]), [(0, 1, 2), (1, 2, 5)]
    window = Window(slice(0, 2), positions, 5, torch.float32, False, runs)
    own = window.behind(torch.tensor([1, 1]), 2, 7, torch.float32)
    assert (own.positions.tolist(), own.upto) == ([[3], [6]], 7)
    assert own.runs == [(0, 1, 4), (1, 2, 7)] and not own.fresh
    assert (own.mask[:, 0, 0] == 0).sum(-1).tolist() == [4, 7]
    beyond = window.behind(torch.tensor([1, 1]), 3, 7, torch.float32)
    assert (beyond.positions.tolist(), beyond.upto) == ([[4], [6]], 7)
    assert beyond.runs == [(0, 1, 5), (1, 2, 7)]
    block = window.behind(torch.tensor([0, 1]), 1, 7, torch.float32, n=3)
    assert (block.positions.tolist(), block.upto) == ([[1, 2, 3], [5, 6, 6]], 7)
    assert block.runs == [(0, 1, 5), (1, 2, 7)]
    assert (block.mask[0, 0] == 0).sum(-1).tolist() == [2, 3, 4]


def test_segments_put_rows_of_similar_length_together():
    assert segments([300]) == [(0, 1, 300)]
    assert segments([300, 310, 290]) == [(0, 3, 310)]
    assert segments([2000, 20, 30, 1900]) == [(0, 1, 2000), (1, 3, 30), (3, 4, 1900)]
    rng = random.Random(0)
    for _ in range(50):
        ends = [rng.randint(1, 3000) for _ in range(rng.randint(1, 20))]
        runs = segments(ends)
        assert [r for a, b, _ in runs for r in range(a, b)] == list(range(len(ends)))
        assert all(longest == max(ends[a:b]) for a, b, longest in runs)


@pytest.mark.parametrize("cost", [0, 10**6])
def test_rows_attended_apart_or_together_are_the_same(tiny_qwen3, cost, monkeypatch):
    monkeypatch.setattr(cache, "SEGMENT_COST", cost)
    target = Target(tiny_qwen3, 64)
    store = target.new_store(4, 64)
    store.ensure(64)
    rows = prompts(tiny_qwen3, 4, longest=50)
    for b, row in enumerate(rows):
        start = torch.tensor([0])
        window = Window.at(torch.tensor([b]), start, len(row), len(row), torch.float32, True)
        target.forward(torch.tensor([row]), window, store)
    start, new = torch.tensor([len(r) for r in rows]), torch.tensor([[7, 8, 9]] * 4)
    ends = [len(r) + 3 for r in rows]
    window = Window.at(slice(0, 4), start, 3, max(ends), torch.float32, False, ends)
    assert len(window.runs) == (1 if cost else len(segments(ends)))
    hidden, _ = target.forward(new, window, store)
    for b, row in enumerate(rows):
        alone, _ = target.encode(torch.tensor([row + [7, 8, 9]]))
        torch.testing.assert_close(hidden[b], alone[0, -3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_any_acceptances_leave_the_cache_of_a_fresh_prefill(name, seed, request):
    """Rows feed k + 1 tokens a step and keep a random number of them; wrong ones are overwritten."""
    base = request.getfixturevalue(name)
    rng, k, rows = random.Random(seed), 3, 4
    target, draft = Target(base, 96), perturbed_specformer(base)
    store, draft_store = target.new_store(rows, 96), target.new_store(rows, 96, 1)
    kept: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(12):
        start = torch.tensor([len(row) for row in kept])
        upto = int(start.max()) + k + 1
        store.ensure(upto)
        draft_store.ensure(upto)
        window = Window.at(slice(0, rows), start, k + 1, upto, torch.float32, False)
        ids = torch.tensor([[rng.randrange(3, 300) for _ in range(k + 1)] for _ in range(rows)])
        _, taps = target.forward(ids, window, store, draft.hooks)
        assert taps is not None
        accepted = [rng.choice([0, 0, 1, 2, k]) for _ in range(rows)]
        draft.propose(
            taps, torch.tensor(accepted), ids, window, draft_store, target, 2, lambda x, j: x.argmax(-1)
        )
        for row, a, new in zip(kept, accepted, ids.tolist(), strict=True):
            row.extend(new[: a + 1])
    for b, row in enumerate(kept):
        assert_rows_are_fresh(target, draft, store, draft_store, b, row)


def assert_rows_are_fresh(target, draft, store, draft_store, b, tokens):
    """Row b of both stores, up to its length, against one pass over its tokens alone."""
    n = len(tokens)
    ids, start = torch.tensor([tokens]), torch.tensor([0])
    window = Window.at(slice(0, 1), start, n, n, torch.float32, True)
    fresh, fresh_draft = target.new_store(1, n), target.new_store(1, n, 1)
    fresh.ensure(n)
    fresh_draft.ensure(n)
    _, taps = target.forward(ids, window, fresh, draft.hooks)
    last = torch.tensor([n - 1])
    draft.propose(taps, last, ids, window, fresh_draft, target, 1, lambda x, j: x.argmax(-1))
    for used, made in ((store, fresh), (draft_store, fresh_draft)):
        for kv, expected in zip(used.kv, made.kv, strict=True):
            torch.testing.assert_close(kv[:, b, :, :n], expected[:, 0, :, :n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefill_chunk", [2048, 16])
def test_the_engine_keeps_every_rows_cache_fresh(tiny_tokenizer, prefill_chunk, monkeypatch):
    """After every step, with rows that finish, move, and are refilled; chunked and whole prefill."""
    base = nano_base(tiny_tokenizer, 320, stop_token_ids=(0,))
    draft = perturbed_specformer(base)
    proposing_bigrams(draft, base)  # so that acceptance varies
    engine = Engine(base, draft, k=3, batch_size=3, max_length=80, prefill_chunk=prefill_chunk)
    requests = [Request(str(i), p, 5 + 2 * i) for i, p in enumerate(prompts(base, 9, seed=4))]
    checked, step = [], engine._step

    def step_and_check(slots):
        step(slots)
        for b, row in enumerate(slots):
            if row.finished or not row.length:
                continue
            tokens = (row.request.prompt_ids + row.result.ids)[: row.length]
            assert int(engine._length[b]) == row.length
            if row.decoding:
                assert int(engine._pending[b]) == row.result.ids[-1]
            assert_rows_are_fresh(engine.target, draft, engine.store, engine.draft_store, b, tokens)
            checked.append(row.request.id)

    monkeypatch.setattr(engine, "_step", step_and_check)
    results = list(engine.run(requests))
    accepted = {s.accepted for r in results for s in r.steps}
    assert accepted >= {0, 1, 3}, "the pattern must vary for this test to mean anything"
    assert set(checked) == {r.id for r in requests}
