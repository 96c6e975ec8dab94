"""On a GPU: the engine is lossless, eager and with CUDA graphs; kernels equal float64, training the CPU's."""

from __future__ import annotations

import copy
import json
import time
from importlib.util import find_spec

import interpreted_kernels
import pytest
import torch
from helpers import answered, attended, perturbed_specformer, prompts, run, settings

from specformer import lossless, pretrained
from specformer.drafts import load_draft
from specformer.engine import Request
from specformer.kernels import grouped_rms_norm
from specformer.layers import choose_attention
from specformer.target import Target
from specformer.training import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("k", [0, 4])
def test_greedy_answers_are_what_transformers_generates(base, k):
    requests = [Request(str(i), p, 12) for i, p in enumerate(prompts(base, 9))]
    found, _ = run(base, requests, perturbed_specformer(base) if k else None, k=k, batch_size=4)
    checked = lossless.check_greedy(base, requests, {name: result.ids for name, result in found.items()})
    assert checked.total == 9 and checked.different == 0


def test_cuda_graphs_give_the_same_tokens(base):
    """Slots are refilled and the batch drains, so steps in and out of the graph mix."""
    requests = [Request(str(i), p, 8 + 4 * i) for i, p in enumerate(prompts(base, 7))]
    draft = perturbed_specformer(base)
    eager, _ = run(base, requests, draft, k=4, batch_size=3)
    found, engine = run(base, requests, draft, k=4, batch_size=3, compile=True)
    assert engine.stats.compile > 0
    assert {r: found[r].ids for r in found} == {r: eager[r].ids for r in eager}
    assert [found[r].steps for r in eager] == [eager[r].steps for r in eager]


def test_the_same_seed_gives_the_same_text_in_any_batch(base):
    texts = prompts(base, 6)
    requests = [Request(str(i), p, 10, temperature=0.7, seed=i) for i, p in enumerate(texts)]
    draft = perturbed_specformer(base)
    together, _ = run(base, requests, draft, k=4, batch_size=6)
    alone, _ = run(base, requests, draft, k=4, batch_size=1)
    assert {r: together[r].ids for r in together} == {r: alone[r].ids for r in alone}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 4, 576), (5, 3, 80), (4096, 4, 2560), (4, 33)])
def test_the_triton_kernel_equals_float64(device, shape, dtype):
    x, scale, grad = (t.to(device) for t in interpreted_kernels.case(shape, dtype))
    interpreted_kernels.check(x, scale, grad)


def test_the_kernels_gradient_has_the_same_bits_twice(device):
    found = []
    for _ in range(2):
        x, scale, grad = (t.to(device) for t in interpreted_kernels.case((3000, 4, 576), torch.bfloat16))
        scale.requires_grad_()
        grouped_rms_norm(x, scale, 1e-5).backward(grad)
        found.append(scale.grad)
    assert torch.equal(*found)


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("rows", [slice(0, 3), torch.tensor([3, 0, 2])])
@pytest.mark.parametrize("n", [1, 5])
def test_flash_attn_equals_sdpa_on_ragged_rows(device, rows, n):
    torch.manual_seed(0)
    dtype, D, start = torch.bfloat16, 64, torch.tensor([0, 37, 11], device=device)
    assert choose_attention("auto", torch.device(device), dtype) == "flash"
    q, k, v = (torch.randn(3, n, heads, D, device=device, dtype=dtype) for heads in (6, 2, 2))
    rows = rows if isinstance(rows, slice) else rows.to(device)
    found, _ = attended(q, k, v, rows, start)
    torch.testing.assert_close(found["flash"], found["sdpa"], rtol=2e-2, atol=2e-2)


def test_training_equals_the_cpus(pair, tmp_path):
    """A few steps in float32, from the same weights: the losses agree to the rounding of two devices."""
    rows = answered(pair[0], 16, 20)
    torch.manual_seed(0)
    start = perturbed_specformer(pair[0])
    losses = []
    for base in pair:
        draft, folder = copy.deepcopy(start).to(base.device), tmp_path / base.device.type
        train(base, draft, rows, rows[:4], folder, **settings())
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert len(losses[0]) > 1 and losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_the_packaged_draft_is_timed_and_compared(smollm2_bf16, tell):
    """Lossless up to rounding: the share of identical answers is told, not asserted; so is the speed."""
    base = smollm2_bf16
    folder = pretrained.packaged_folder(base)
    assert folder is not None
    draft, target, size = load_draft(folder, base), Target(base, 256), len(pretrained.PROMPTS)
    requests = pretrained.requests(base, 64)
    answers, tps = {}, {0: [], 4: []}
    for _ in range(4):  # the first warms up
        for k, seconds in tps.items():
            start = time.perf_counter()
            found, engine = run(base, requests, draft, k=k, batch_size=size, target=target)
            seconds.append(engine.stats.tokens / (time.perf_counter() - start))
            answers[k] = {name: result.ids for name, result in found.items()}
    ratios = [four / none for none, four in zip(tps[0][1:], tps[4][1:], strict=True)]
    same = sum(answers[0][name] == answers[4][name] for name in answers[0])
    tell(
        f"packaged draft, k = 4 over k = 0, batch {size}, bfloat16", f"{min(ratios):.2f} to {max(ratios):.2f}"
    )
    tell("identical answers with and without it", f"{same} of {size}")
    assert answers[0].keys() == answers[4].keys()
