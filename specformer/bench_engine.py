"""The engine against the systems people use, same model, dtype, prompts and caps, alternating in one run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import pandas as pd
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from specformer import hardware
from specformer.base import Base
from specformer.bench import forward_costs, take
from specformer.drafts.interface import Draft
from specformer.engine import Engine, Request
from specformer.errors import UserError
from specformer.metrics import tokens_per_step
from specformer.progress import Progress
from specformer.target import Target


@dataclass
class Timing:
    """One round of one system: tokens that entered the answers (never beyond a stop) and wall seconds."""

    tokens: int
    seconds: float
    draft_share: float = 0.0
    tokens_per_step: float = 1.0


System = Callable[[Sequence[Request]], Timing]
Key = TypeVar("Key")

FEWEST = 4
"""Requests of a round at the least: one prompt would decide a batch of one."""


def ours(engine: Engine) -> System:
    """Our engine; all requests at once, slots refilled as they become free."""

    def run(requests: Sequence[Request]) -> Timing:
        before = vars(engine.stats).copy()
        start = time.perf_counter()
        results = list(engine.run(list(requests)))
        seconds = time.perf_counter() - start
        spent = {k: getattr(engine.stats, k) - before[k] for k in ("draft", "verify", "rest")}
        steps = [s for r in results for s in r.steps]
        return Timing(
            sum(len(r.ids) for r in results),
            seconds,
            spent["draft"] / sum(spent.values()),
            tokens_per_step(steps) if steps else 1.0,
        )

    return run


def transformers_generate(base: Base, batch_size: int, **options: Any) -> System:
    """transformers' own generate over left-padded batches; `options` such as prompt_lookup_num_tokens."""

    def run(requests: Sequence[Request]) -> Timing:
        tokens, start = 0, time.perf_counter()
        for i in range(0, len(requests), batch_size):
            part = requests[i : i + batch_size]
            longest = max(len(r.prompt_ids) for r in part)
            pad = base.stop_token_ids[0]
            gaps = [longest - len(r.prompt_ids) for r in part]
            ids = torch.tensor([[pad] * g + list(r.prompt_ids) for g, r in zip(gaps, part, strict=True)])
            mask = torch.tensor([[0] * g + [1] * (longest - g) for g in gaps])
            out = base.model.generate(  # type: ignore[operator]
                ids.to(base.device),
                attention_mask=mask.to(base.device),
                max_new_tokens=part[0].max_new_tokens,
                do_sample=False,
                eos_token_id=list(base.stop_token_ids),
                pad_token_id=pad,
                **options,
            )
            tokens += sum(count_answer(row, base.stop_token_ids) for row in out[:, longest:].tolist())
        return Timing(tokens, time.perf_counter() - start)

    return run


def transformers_continuous(base: Base, batch_size: int) -> System:
    """transformers' continuous batching of at most `batch_size` requests; set up anew each round, as its
    `generate_batch` does.

    Raises UserError where it does not run on this device: tried at once on a short request.
    """
    own: Any = base.model
    attention = own.config._attn_implementation

    def run(requests: Sequence[Request]) -> Timing:
        start = time.perf_counter()
        try:
            found = own.generate_batch(
                inputs=[list(r.prompt_ids) for r in requests],
                generation_config=GenerationConfig(
                    max_new_tokens=requests[0].max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(base.stop_token_ids),
                    pad_token_id=base.stop_token_ids[0],
                ),
                continuous_batching_config=ContinuousBatchingConfig(
                    max_requests_per_batch=batch_size,
                    max_batch_tokens=2048,
                    num_blocks=64 * batch_size,
                    page_size=32,
                ),
            )
        finally:
            own.set_attn_implementation(attention)  # it leaves its paged form behind
        seconds = time.perf_counter() - start
        if len(found) < len(requests) or any(answer.error for answer in found.values()):
            raise UserError("transformers' continuous batching lost requests: look at its own output")
        return Timing(
            sum(count_answer(a.generated_tokens, base.stop_token_ids) for a in found.values()), seconds
        )

    try:
        run([Request("try", [base.stop_token_ids[0]] * 4, 2)])
    except Exception as error:  # whatever it is that this device lacks
        raise UserError(f"transformers' continuous batching does not run here: {error}") from error
    return run


def count_answer(ids: Sequence[int], stops: Sequence[int]) -> int:
    """Tokens up to and with the first stop token: what follows is padding."""
    for i, token in enumerate(ids):
        if token in stops:
            return i + 1
    return len(ids)


class VLLM:
    """vLLM in an environment of its own, fed over a pipe; idle while others are timed.

    draft: folder of a draft that it drafts `k` tokens with (`specformer.vllm`), None for vLLM alone.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        dtype: str,
        max_length: int,
        batch_size: int,
        draft: Path | None = None,
        k: int = 0,
    ):
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        arguments: dict[str, Any] = {"model": str(folder), "dtype": dtype, "max_model_len": max_length}
        if draft is not None:
            package = str(Path(__file__).parent.parent)
            environment["PYTHONPATH"] = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
            environment["SPECFORMER_DRAFT"] = str(draft)
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": "specformer.vllm.Proposer",
                "num_speculative_tokens": k,
            }
        self.process = subprocess.Popen(
            [python, "-c", _VLLM, json.dumps(arguments | {"max_num_seqs": batch_size})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        if self._answer() != "ready":
            raise UserError(f"vLLM did not start with {python}: run `{python} -c 'import vllm'` to see why")

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # vLLM prints too; ours are marked
            if line.startswith("specformer:"):
                return json.loads(line.removeprefix("specformer:"))
        return None

    def __call__(self, requests: Sequence[Request]) -> Timing:
        assert self.process.stdin is not None
        prompts = [list(r.prompt_ids) for r in requests]
        message = {"prompts": prompts, "max_tokens": requests[0].max_new_tokens}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer is None:
            raise UserError("vLLM stopped while it was being timed: look at its own output")
        return Timing(answer["tokens"], answer["seconds"], tokens_per_step=answer["tokens_per_step"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


# Runs under vLLM's python, where this package is not installed.
_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
options = json.loads(sys.argv[1])
drafts = "speculative_config" in options
llm = LLM(**options, enforce_eager=False, disable_log_stats=not drafts)
say = lambda x: print("specformer:" + json.dumps(x), flush=True)
def counted():
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")} if drafts else {}
    return [found.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens")]
say("ready")
for line in sys.stdin:
    job, before = json.loads(line), counted()
    start = time.perf_counter()
    out = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]],
                       SamplingParams(temperature=0, max_tokens=job["max_tokens"]), use_tqdm=False)
    seconds = time.perf_counter() - start
    steps, accepted = (b - a for a, b in zip(before, counted()))
    say({"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in out),
         "tokens_per_step": 1 + accepted / max(steps, 1)})
"""


def bench_engine(
    base: Base,
    draft: Draft | None,
    requests: Sequence[Request],
    *,
    batch_sizes: Sequence[int],
    k: int,
    rounds: int,
    max_length: int,
    waves: int = 2,
    attention: str = "auto",
    compile: bool | str = False,
    vllm_python: str | None = None,
    folder: Path | None = None,
    keep: Callable[[pd.DataFrame], None] = lambda table: None,
) -> pd.DataFrame:
    """Time our k = 0 and k > 0, transformers' generate, its prompt lookup (batch 1) and vLLM where named.

    A round decodes `waves` times the batch size of requests, and not less than FEWEST, with every system in
    turn, the order reversed every second round; the first round is for warming up and is dropped. Returns a
    row per system and batch size, and hands what it has to `keep` after each batch size: tps_median, tps_min,
    tps_max, ratios of medians, kappa, theta, draft_share, and efficiency: measured speedup /
    (kappa * t(1) / t(k + 1)), with t the bare forward of the base timed in the same rounds.
    """
    machine = hardware.describe(base.dtype, base.device)
    target = Target(base, max_length + k + 1)
    rows = []
    answers = {b: max(b * waves, FEWEST) for b in batch_sizes}
    total = sum(answers.values()) * (rounds + 1)
    with Progress("bench engine", total, "answers a system") as bar:
        for batch_size in batch_sizes:
            options: dict[str, Any] = {
                "batch_size": batch_size,
                "max_length": max_length,
                "target": target,
                "attention": attention,
                "compile": compile,
            }
            systems: dict[tuple[str, int], Any] = {("specformer", 0): ours(Engine(base, **options))}
            if draft is not None:
                systems["specformer", k] = ours(Engine(base, draft, k=k, **options))
            systems["transformers", 0] = transformers_generate(base, batch_size)
            if batch_size == 1:
                systems["transformers prompt lookup", k] = transformers_generate(
                    base, 1, prompt_lookup_num_tokens=k
                )
            try:
                systems["transformers continuous", 0] = transformers_continuous(base, batch_size)
            except UserError as error:
                print(error, flush=True)
            if vllm_python is not None:
                assert folder is not None
                dtype = str(base.dtype).removeprefix("torch.")
                systems["vllm", 0] = VLLM(vllm_python, folder, dtype, max_length, batch_size)
            timings: dict[tuple[str, int], list[Timing]] = {key: [] for key in systems}
            forwards: dict[int, list[float]] = {1: [], k + 1: []}
            for r in range(rounds + 1):
                chosen = take(requests, r * answers[batch_size], answers[batch_size])
                for key, timing in in_turn(systems, chosen, r).items():
                    if r > 0:
                        timings[key].append(timing)
                for n, seconds in bare_forwards(target, chosen, batch_size, (1, k + 1)).items():
                    if r > 0:
                        forwards[n].append(seconds)
                bar.advance(answers[batch_size], f"batch {batch_size}")
            if ("vllm", 0) in systems:
                systems["vllm", 0].close()
            rows += summarise(timings, forwards, batch_size, machine)
            keep(pd.DataFrame(rows))
    return pd.DataFrame(rows)


def in_turn(systems: Mapping[Key, System], requests: Sequence[Request], r: int) -> dict[Key, Timing]:
    """Round r: every system over the same requests, in reversed order every second round."""
    keys = list(systems)
    return {key: systems[key](requests) for key in (keys if r % 2 == 0 else keys[::-1])}


def bare_forwards(
    target: Target, requests: Sequence[Request], batch_size: int, sizes: Sequence[int]
) -> dict[int, float]:
    """Median seconds of one bare forward with LM head, by tokens a row, over a mid-answer cache."""
    tokens = [t for r in requests for t in r.prompt_ids]
    context = sum(len(r.prompt_ids) for r in requests) // len(requests) + requests[0].max_new_tokens // 2
    costs = forward_costs(
        target,
        tokens,
        batch_sizes=[batch_size],
        tokens_per_request=list(sizes),
        context=context,
        rounds=5,
        quiet=True,
    )
    return {n: float(costs[costs.tokens_per_request == n].seconds.median()) for n in sizes}


def summarise(
    timings: Mapping[tuple[str, int], Sequence[Timing]],
    forwards: Mapping[int, Sequence[float]],
    batch_size: int,
    machine: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Rows of the benchmark's table from the timings of one batch size."""
    tps = {key: [t.tokens / t.seconds for t in runs] for key, runs in timings.items()}
    middle = {key: median(values) for key, values in tps.items()}
    rows = []
    for key, runs in timings.items():
        system, k = key
        row: dict[str, Any] = {
            "system": system,
            "batch_size": batch_size,
            "k": k,
            "dtype": machine["dtype"],
            "tps_median": middle[key],
            "tps_min": min(tps[key]),
            "tps_max": max(tps[key]),
            "ratio_to_transformers": middle[key] / middle["transformers", 0],
            "ratio_to_vllm": middle[key] / middle["vllm", 0] if ("vllm", 0) in middle else None,
        }
        if system == "specformer" and k > 0:
            kappa = sum(t.tokens_per_step for t in runs) / len(runs)
            speedup = middle[key] / middle["specformer", 0]
            ideal = kappa * median(forwards[1]) / median(forwards[k + 1])
            row |= {
                "kappa": kappa,
                "theta": kappa / speedup,
                "efficiency": speedup / ideal,
                "draft_share": sum(t.draft_share for t in runs) / len(runs),
            }
        rows.append(
            row | {"rounds": len(runs)} | {key: machine[key] for key in ("cpu", "threads", "kernels")}
        )
    return rows
