"""The draft inside vLLM: whatever vLLM's scheduler does, it drafts what it would draft from scratch."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import perturbed_specformer, prompts, run
from transformers import AutoConfig

from specformer.base import base_fingerprint
from specformer.cache import KVStore, Window
from specformer.chat import encode_prompt
from specformer.drafts import load_draft, new_draft
from specformer.engine import Request
from specformer.errors import UserError
from specformer.metrics import tokens_per_step
from specformer.pretrained import PROMPTS, packaged_folder
from specformer.target import Target
from specformer.vllm import Drafter, PagedStore, ServedWeights, Step

BLOCK, K = 4, 3


class PagedTarget(Target):
    """A base LLM as vLLM serves it: its stores follow block tables."""

    def new_store(self, rows, limit, layers=None, attention="auto"):
        geometry = (layers or 1, rows, self.kv_heads, self.head_dim, limit, self.dtype, self.device)
        return PagedStore(*geometry, block=BLOCK, places=K)


class Scheduler:
    """vLLM as far as a draft sees it: requests read in chunks, in blocks of a cache that others had before.

    texts: request -> its tokens, the newest one not read yet; read: how many of them the cache holds.
    """

    def __init__(self, drafter, seed=0):
        self.drafter, self.rng = drafter, random.Random(seed)
        self.free = list(range(1, 120))
        self.rng.shuffle(self.free)
        self.texts, self.read, self.blocks = {}, {}, {}

    def add(self, name, text):
        self.texts[name], self.read[name], self.blocks[name] = list(text), 0, []

    def preempt(self, name):
        """Its blocks go to others, it is read anew from its first token."""
        self.free = self.free[:1] + self.blocks[name] + self.free[1:]
        self.read[name], self.blocks[name] = 0, []

    def finish(self, name):
        self.preempt(name)
        del self.texts[name], self.read[name], self.blocks[name]

    def step(self, rows, proposing=True):
        """One step; rows: name -> (tokens to run, tokens that it commits if that reaches its text's end). All
        but the last of these were drafted, and random drafts behind them were not accepted. -> drafts."""
        parts, starts, tables, sampled = [], [], [], []
        for name, (count, new) in rows.items():
            text, start, blocks = self.texts[name], self.read[name], self.blocks[name]
            wrong = [self.rng.randrange(3, 300) for _ in range(K + 1)]
            parts.append((text + new[:-1] + wrong)[start : start + count])
            while len(blocks) * BLOCK < start + count:
                blocks.append(self.free.pop(0))
            # behind a row's blocks vLLM's table holds what lay there before
            tables.append((blocks + self.rng.choices(range(1, 120), k=30))[:30])
            starts.append(start)
            sampled.append(new if start + count >= len(text) else [])
        taps = []
        for (name, part), start in zip(zip(rows, parts, strict=True), starts, strict=True):
            whole = torch.tensor([self.texts[name][:start] + part])
            taps.append(self.drafter.target.encode(whole, self.drafter.draft.hooks)[1][0, start:])
        counts = [len(part) for part in parts]
        first = [sum(counts[:b]) for b in range(len(counts))]
        ids = torch.tensor([token for part in parts for token in part])
        self.drafter.see(Step(ids, torch.cat(taps), first, starts, counts, torch.tensor(tables), BLOCK))
        tokens, lengths = np.zeros((len(rows), 200), np.int32), np.zeros(len(rows), np.int32)
        for b, (name, new) in enumerate(zip(rows, sampled, strict=True)):
            text = self.texts[name]
            text += new
            self.read[name] = len(text) - 1 if new else starts[b] + counts[b]
            tokens[b, : len(text)], lengths[b] = text, len(text)
        return self.drafter.propose(sampled, lengths, tokens) if proposing else None


def from_scratch(draft, target, text):
    """What the draft says behind a text, read at once in a cache of its own."""
    ids, n, head = torch.tensor([text]), len(text) - 1, draft.head(target)
    store = KVStore(1, 1, target.kv_heads, target.head_dim, 256, target.dtype, target.device)
    store.ensure(n + K)
    _, taps = target.encode(ids[:, :-1], draft.hooks)
    window = Window.at(slice(0, 1), torch.zeros(1, dtype=torch.long), n, n, target.dtype, fresh=False)
    last, choose = torch.tensor([n - 1]), lambda logits, j: head.to_tokens(logits.argmax(-1))
    return draft.propose(taps, last, ids[:, 1:], window, store, target, K, choose)[0].tolist()


@pytest.mark.parametrize(
    "kind", [("specformer", {}), ("specformer", {"anchor_token": "context"}), ("eagle3", {"vocabulary": 200})]
)
def test_it_drafts_as_from_scratch_whatever_is_scheduled(tiny_llama, kind):
    """Prompts in chunks, rows reordered and left out, preempted and finished requests whose blocks others
    get, drafts accepted or not, steps without a call."""
    name, options = kind
    torch.manual_seed(0)
    draft = new_draft(
        tiny_llama, name, [{"answer_ids": list(range(300))}], init="random", seed=3, draft_length=K, **options
    ).eval()
    target, rng, seen = PagedTarget(tiny_llama, 256), random.Random(1), Counter()
    for parameter in draft.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    vllm = Scheduler(Drafter(draft, target, rows=4, k=K))
    texts = iter(prompts(tiny_llama, 12, seed=2))
    together: list[str] = []
    for turn in range(60):
        while len(vllm.texts) < 5 and (text := next(texts, None)) is not None:
            vllm.add(f"r{len(seen)}-{turn}-{len(vllm.texts)}", text)
        if not together and rng.random() < 0.15:
            vllm.preempt(rng.choice(list(vllm.texts)))
            seen["preempted"] += 1
        names = together or rng.sample(list(vllm.texts), rng.randint(1, min(4, len(vllm.texts))))
        rng.shuffle(names)
        rows, amid = {}, []
        for name in names:
            left = len(vllm.texts[name]) - vllm.read[name]
            accepted = rng.randint(0, K) if left == 1 and len(vllm.texts[name]) > 1 else 0
            count = K + 1 if accepted or (left == 1 and rng.random() < 0.5) else min(left, rng.randint(1, 9))
            rows[name] = (count, [rng.randrange(3, 300) for _ in range(accepted + 1)])
            amid.append(count < left)
            seen["chunk" if amid[-1] else f"accepted {accepted}"] += 1
        proposing = rng.random() < 0.8
        drafts = vllm.step(rows, proposing)
        # a step that nobody drafts after goes on with the same rows, as vLLM's do
        together = [] if proposing else names
        if drafts is None:
            seen["no call"] += 1
            continue
        for name, unfinished, found in zip(rows, amid, drafts, strict=True):
            text = vllm.texts[name]
            assert found == ([] if unfinished else from_scratch(draft, target, text)), (turn, name)
            if len(text) > 70:
                vllm.finish(name)
                seen["finished"] += 1
    assert {"chunk", "preempted", "no call", "finished", *(f"accepted {a}" for a in range(K + 1))} <= set(
        seen
    )


def test_a_store_follows_the_table_and_keeps_what_lies_behind_to_itself():
    """Two rows of one block each, and a chain that runs beyond it: vLLM's other blocks stay untouched."""
    store = PagedStore(1, 2, 1, 2, 64, torch.float32, torch.device("cpu"), block=BLOCK, places=K)
    table = torch.tensor([[5, 6], [7, 5]])
    store.follow(table, [3, 4])
    window = Window(torch.tensor([0, 1]), torch.tensor([[2, 3, 4], [3, 4, 5]]), 6, torch.float32, False, [])
    k = torch.arange(12.0).view(2, 3, 1, 2)
    store.write(0, window, k, -k)
    keys, values = store.read(0, window)
    assert keys.shape == (2, 1, 6, 2) and torch.equal(values, -keys)
    assert torch.equal(keys[0, 0, 2:5], k[0, :, 0]) and torch.equal(keys[1, 0, 3:6], k[1, :, 0])
    written = store.kv[0][0].abs().sum((1, 2, 3)).nonzero()[:, 0].tolist()
    ours = 2 * store.spare
    assert set(written) == {0, 1, ours + 5, ours + 7}
    store.follow(table, [8, 5])
    assert torch.equal(store.read(0, window)[0][0, 0, 2:4], k[0, :2, 0]), "what was written stays"


def test_the_fingerprint_comes_from_the_folder(tiny_llama, tiny_llama_folder, smollm2, smollm2_folder):
    for base, folder in ((tiny_llama, tiny_llama_folder), (smollm2, smollm2_folder)):
        weights = ServedWeights(AutoConfig.from_pretrained(folder), str(folder), None)
        assert base_fingerprint(weights) == base_fingerprint(base.model)  # type: ignore[arg-type]


def test_sharded_weights_are_found_and_missing_ones_named(tiny_llama, tmp_path):
    tiny_llama.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    weights = ServedWeights(tiny_llama.model.config, str(tmp_path), None)
    assert base_fingerprint(weights) == base_fingerprint(tiny_llama.model)  # type: ignore[arg-type]
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(UserError, match="holds no model.safetensors"):
        ServedWeights(tiny_llama.model.config, str(tmp_path), None).get_parameter("model.norm.weight")


def test_what_cannot_be_drafted_is_refused(tiny_llama):
    target = PagedTarget(tiny_llama, 256)
    with pytest.raises(UserError, match=r"num_speculative_tokens is 5: this draft gives 1\.\.4"):
        Drafter(perturbed_specformer(tiny_llama), target, 4, 5)
    with pytest.raises(UserError, match="'ngram' keeps a cache that vLLM cannot page"):
        Drafter(new_draft(tiny_llama, "ngram", [], init="random", seed=0, draft_length=4), target, 4, 4)


# Runs under vLLM's python.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
llm = LLM(**job["llm"], disable_log_stats=False)
out = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]],
                   SamplingParams(temperature=0, max_tokens=job["max_tokens"]), use_tqdm=False)
counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
print("answer:" + json.dumps([[list(o.outputs[0].token_ids) for o in out], counted]))
"""


def serve(folder, draft, prompt_ids, max_tokens, **options):
    """Answers of a fresh vLLM, and its counters; draft: folder or None."""
    llm = {"model": str(folder), "dtype": "float32", "max_model_len": 256} | options
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if draft is not None:
        environment["SPECFORMER_DRAFT"] = str(draft)
        llm["speculative_config"] = {
            "method": "custom_class",
            "model": "specformer.vllm.Proposer",
            "num_speculative_tokens": 4,
        }
    job = json.dumps({"llm": llm, "prompts": prompt_ids, "max_tokens": max_tokens})
    command = [os.environ["SPECFORMER_VLLM_PYTHON"], "-c", SERVE, job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("answer:"))


@pytest.mark.server
@pytest.mark.skipif("SPECFORMER_VLLM_PYTHON" not in os.environ, reason="names no environment with vLLM")
def test_vllm_answers_the_same_and_accepts_what_our_engine_accepts(smollm2, smollm2_folder):
    """Few slots, short chunks and a cache too small for all: queued, chunked and preempted requests."""
    draft = packaged_folder(smollm2)
    assert draft is not None
    texts = [*PROMPTS[:5], " ".join(PROMPTS)]
    ids = [encode_prompt(smollm2.tokenizer, [{"role": "user", "content": t}]) for t in texts]
    options = {
        "enforce_eager": True,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "num_gpu_blocks_override": 9,
    }
    plain, _ = serve(smollm2_folder, None, ids, 32, **options)
    drafted, counted = serve(smollm2_folder, draft, ids, 32, **options)
    assert drafted == plain
    assert counted["vllm:num_preemptions"] > 0
    ours, _ = run(
        smollm2, [Request(str(i), p, 32) for i, p in enumerate(ids)], load_draft(draft, smollm2), k=4
    )
    assert [ours[str(i)].ids for i in range(len(ids))] == plain
    kappa = tokens_per_step([s for r in ours.values() for s in r.steps])
    steps = counted["vllm:spec_decode_num_drafts"]
    assert 1 + counted["vllm:spec_decode_num_accepted_tokens"] / steps == pytest.approx(kappa, abs=0.05)
