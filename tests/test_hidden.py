"""Hidden states kept on disk are the base's own, and nobody else's."""

from __future__ import annotations

import pytest
import torch

from specformer.errors import UserError
from specformer.hidden import HiddenStates
from specformer.target import Target
from specformer.training import Sequence_

HOOKS = (0, 2, 4)


def sequence(name, ids):
    return Sequence_(name, torch.tensor(ids), torch.tensor([0]))


@pytest.fixture
def batch():
    return [sequence("a", [5, 6, 7, 8, 9]), sequence("b", [9, 8, 7])]


def test_stored_states_equal_computed_ones(tiny_llama, tmp_path, batch):
    target = Target(tiny_llama, 32)
    computed = HiddenStates(target, HOOKS, None)(batch).taps
    stored = HiddenStates(target, HOOKS, tmp_path / "hidden")
    first = stored(batch).taps
    target.encode = None  # type: ignore[assignment]  # the second time nothing may be computed
    second = stored(list(reversed(batch))).taps
    assert torch.equal(first, second.flip(0))
    assert torch.equal(first[0], computed[0]) and torch.allclose(first[1, :3], computed[1, :3])
    assert (first[1, 3:] == 0).all()
    size = sum(f.stat().st_size for f in (tmp_path / "hidden").iterdir())
    assert size >= 8 * stored.bytes_per_token() == 8 * len(HOOKS) * 64 * 4
    stored.clear()
    assert not (tmp_path / "hidden").exists()


def test_same_id_with_other_tokens_is_computed_again(tiny_llama, tmp_path, batch):
    states = HiddenStates(Target(tiny_llama, 32), HOOKS, tmp_path)
    states(batch)
    other = states([sequence("a", [5, 6, 7, 8, 1])])
    fresh = HiddenStates(Target(tiny_llama, 32), HOOKS, None)([sequence("a", [5, 6, 7, 8, 1])])
    assert torch.equal(other.taps, fresh.taps)


def test_the_bases_next_tokens_are_its_own(tiny_llama, tmp_path, batch):
    """Top tokens and log-probabilities against transformers' own forward; zeros behind a text's end."""
    states = HiddenStates(Target(tiny_llama, 32), HOOKS, tmp_path / "hidden", top=5)
    for teaching in (states(batch), states(batch)):  # computed, then read back
        assert teaching.top_tokens.shape == teaching.top_logprobs.shape == (2, 5, 5)
        for b, s in enumerate(batch):
            n = len(s.ids)
            theirs = tiny_llama.model(s.ids[None]).logits[0].log_softmax(-1).topk(5, -1)
            torch.testing.assert_close(teaching.top_logprobs[b, :n], theirs.values, rtol=1e-4, atol=1e-4)
            assert torch.equal(teaching.top_tokens[b, :n], theirs.indices)
            assert not teaching.top_tokens[b, n:].any()
    assert states(batch).taps.shape == (2, 5, 3, 64)


def test_a_run_that_wants_fewer_or_more_next_tokens_shares_the_folder(tiny_llama, tmp_path, batch):
    target = Target(tiny_llama, 32)
    five, encode = HiddenStates(target, HOOKS, tmp_path, top=5)(batch), target.encode
    target.encode = None  # type: ignore[assignment]  # fewer: nothing may be computed
    two = HiddenStates(target, HOOKS, tmp_path, top=2)(batch)
    assert torch.equal(two.top_tokens, five.top_tokens[..., :2]) and torch.equal(two.taps, five.taps)
    target.encode = encode
    seven = HiddenStates(target, HOOKS, tmp_path, top=7)(batch)
    assert torch.equal(seven.top_tokens[..., :5], five.top_tokens) and seven.top_tokens.shape[-1] == 7


def test_drafts_with_other_hooks_share_the_folder(tiny_llama, tmp_path, batch):
    """What others will read is kept from the first on; what nobody announced is computed."""
    target, encode = Target(tiny_llama, 32), Target(tiny_llama, 32).encode
    HiddenStates(target, HOOKS, tmp_path, others=[((1, 2), 0), ((3,), 4)])(batch)
    fresh = HiddenStates(Target(tiny_llama, 32), (3, 1), None, top=4)(batch)
    target.encode = None  # type: ignore[assignment]
    second = HiddenStates(target, (3, 1), tmp_path, top=4)
    kept = second(batch)
    assert torch.equal(kept.taps, fresh.taps) and torch.equal(kept.top_tokens, fresh.top_tokens)
    second.fill(batch)  # nothing to do
    (tmp_path / "few").mkdir()
    target.encode = encode
    few = HiddenStates(target, HOOKS, tmp_path / "few")
    few(batch)
    more = HiddenStates(target, (0, 1), tmp_path / "few")
    more.fill(batch)
    target.encode = None  # type: ignore[assignment]
    assert more(batch).taps.shape == (2, 5, 2, 64)


def test_states_of_another_base_are_refused(tiny_llama, tiny_qwen3, tmp_path, batch):
    HiddenStates(Target(tiny_llama, 32), HOOKS, tmp_path)(batch)
    with pytest.raises(UserError, match="base"):
        HiddenStates(Target(tiny_qwen3, 32), HOOKS, tmp_path)(batch)


def test_damaged_files_are_named(tiny_llama, tmp_path, batch):
    states = HiddenStates(Target(tiny_llama, 32), HOOKS, tmp_path)
    states(batch)
    file = sorted(tmp_path.iterdir())[0]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=file.name):
        states(batch)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="checksum"):
        states(batch)
