"""The lean forward pass says what transformers says, in every supported shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import prompts

from specformer.base import base_fingerprint, load_base
from specformer.engine import Engine
from specformer.errors import UserError
from specformer.target import Target, fuse, linear

BASES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3"]


@pytest.fixture(params=BASES)
def base(request):
    return request.getfixturevalue(request.param)


def states_before_norm(base, ids):
    """HS[0..L] and the logits by transformers alone; its last hidden state is after the final norm, so the
    last layer's own output is caught by a hook."""
    caught = []
    hook = base.model.model.layers[-1].register_forward_hook(lambda _, __, out: caught.append(out))
    out = base.model(ids, output_hidden_states=True)
    hook.remove()
    last = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
    return [*out.hidden_states[:-1], last], out.logits, out.hidden_states[-1]


def assert_equal_to_transformers(base, ids, tolerance):
    states, logits, normed = states_before_norm(base, ids)
    target = Target(base, ids.shape[1])
    hooks = tuple(range(base.num_layers + 1))
    hidden, taps = target.encode(ids, hooks)
    assert taps is not None and taps.shape == (*ids.shape, len(hooks), base.model.config.hidden_size)
    for i in hooks:
        scale = states[i].abs().max()
        torch.testing.assert_close(taps[:, :, i] / scale, states[i] / scale, rtol=0, atol=tolerance)
    assert torch.equal(hidden, taps[:, :, -1])
    scale = logits.abs().max()
    torch.testing.assert_close(target.head.norm(hidden), normed, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(hidden) / scale, logits / scale, rtol=0, atol=tolerance)


def test_every_tap_and_logits_equal_transformers(base):
    torch.manual_seed(0)
    ids = torch.randint(3, base.model.config.vocab_size, (2, 50))
    assert_equal_to_transformers(base, ids, 3e-6)


def test_smollm2_equals_transformers(smollm2):
    ids = torch.tensor([smollm2.tokenizer("The river rose in the night, and in the morning").input_ids])
    assert_equal_to_transformers(smollm2, ids, 2e-5)


def test_a_base_spread_to_disk_says_the_same_and_is_not_decoded_with(tiny_llama, tiny_llama_folder):
    some: Any = tiny_llama.model.model
    layer = sum(p.numel() for p in some.layers[0].parameters()) * 4
    ends = sum(p.numel() for p in [*some.embed_tokens.parameters(), *some.norm.parameters()]) * 4
    ends += tiny_llama.model.lm_head.weight.numel() * 4
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    spread: Any = load_base(
        tiny_llama_folder, max_memory={"cpu": f"{(ends + 2 * layer) / 1024}KiB"}, **options
    )
    places = [spread.model.hf_device_map[f"model.layers.{i}"] for i in range(4)]
    assert places == ["cpu", "disk", "disk", "cpu"], "the last one the draft may start from"
    assert spread.model.model.layers[1].mlp.down_proj.weight.device.type == "meta"
    assert base_fingerprint(spread.model) == base_fingerprint(tiny_llama.model)
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (2, 20))
    for hooks in ((0, 2, 4), ()):
        hidden, taps = Target(tiny_llama, 64).encode(ids, hooks)
        found, found_taps = Target(spread, 64).encode(ids, hooks)
        torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_taps, taps, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="spread over devices .* can only be learnt from"):
        Engine(spread, max_length=64)


@pytest.mark.parametrize(
    ("max_memory", "said"),
    [
        ({"cpu": "1KiB"}, "embedding, head and last layer alone take"),
        ({"cpu": "much"}, "'much' is no size such as 20GiB"),
        ({"cpu": "1GiB", 99: "1GiB"}, "'cuda:99' was asked for"),
    ],
)
def test_places_that_cannot_be_are_refused(tiny_llama_folder, max_memory, said):
    with pytest.raises(UserError, match=said):
        load_base(tiny_llama_folder, dtype="float32", device="cpu", max_memory=max_memory)


def test_taps_come_in_the_order_asked(tiny_llama):
    target = Target(tiny_llama, 16)
    ids = torch.tensor([[5, 6, 7]])
    _, taps = target.encode(ids, (4, 0))
    _, every = target.encode(ids, (0, 1, 2, 3, 4))
    assert taps is not None and every is not None
    assert torch.equal(taps[:, :, 0], every[:, :, 4]) and torch.equal(taps[:, :, 1], every[:, :, 0])
    assert target.encode(ids)[1] is None


def test_right_padding_changes_nothing(base):
    """Whatever stands behind a row, also the end token that is the padding."""
    target = Target(base, 64)
    rows = [torch.tensor(p) for p in prompts(base, 6)]
    hooks = (0, base.num_layers)
    for pad in (0, base.stop_token_ids[0], 77):
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
        hidden, taps = target.encode(ids, hooks)
        assert taps is not None
        for b, row in enumerate(rows):
            alone, alone_taps = target.encode(row[None], hooks)
            assert alone_taps is not None
            torch.testing.assert_close(hidden[b, : len(row)], alone[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(taps[b, : len(row)], alone_taps[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folder", ["tiny_llama_folder", "tiny_qwen2_folder", "tiny_qwen3_folder"])
def test_transformers_model_survives_fusing(folder, request):
    base = load_base(request.getfixturevalue(folder), dtype="float32", device="cpu")
    ids = torch.tensor([[5, 9, 200, 31]])
    before = base.model(ids).logits
    state = copy.deepcopy(base.model.state_dict())
    Target(base, 16)
    torch.testing.assert_close(base.model(ids).logits, before, rtol=1e-5, atol=1e-5)
    after = base.model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(state[name], after[name]) for name in state)
    # a view, not a copy: query, key and value share one storage
    a = base.model.model.layers[0].self_attn
    assert a.q_proj.weight.untyped_storage().data_ptr() == a.v_proj.weight.untyped_storage().data_ptr()
    # and a second target is as right as the first
    target = Target(base, 16)
    torch.testing.assert_close(target.logits(target.encode(ids)[0]), before, rtol=1e-4, atol=1e-4)


def test_fused_weights_and_biases():
    torch.manual_seed(0)
    parts = [torch.nn.Linear(8, n) for n in (6, 2, 4)]
    x = torch.randn(3, 8)
    expected = torch.cat([m(x) for m in parts], -1)
    weight, bias = fuse(parts)
    assert weight.shape == (12, 8) and bias is not None and bias.shape == (12,)
    torch.testing.assert_close(F.linear(x, weight, bias), expected)
    torch.testing.assert_close(torch.cat([m(x) for m in parts], -1), expected)
    weight += 1  # the originals see it
    bias += 1
    torch.testing.assert_close(parts[2](x), F.linear(x, weight[8:], bias[8:]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 64)])
def test_bfloat16_matmul(biased, shape):
    """The packed matmul is as near to exact as F.linear is: half a step of bfloat16."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(shape).bfloat16()
    bias = torch.randn(96).bfloat16() if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for found in (linear(weight, bias)(x), F.linear(x, weight, bias)):
        assert found.dtype == torch.bfloat16 and found.shape == (*shape[:-1], 96)
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=0.04)


def test_bfloat16_target_is_near_float32(tiny_qwen2_folder, tiny_qwen2):
    half = load_base(tiny_qwen2_folder, dtype="bfloat16", device="cpu")
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    exact = tiny_qwen2.model(ids).logits
    ours, target = half.model(ids).logits.float(), Target(half, 32)
    packed = target.logits(target.encode(ids)[0]).float()
    scale = exact.std()
    error, theirs = (packed - exact).abs().mean() / scale, (ours - exact).abs().mean() / scale
    assert error < 0.05 and error < 1.5 * theirs
