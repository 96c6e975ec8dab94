"""A trained draft inside vLLM, through its `custom_class` speculative method.

    LLM(model, speculative_config={"method": "custom_class", "model": "specformer.vllm.Proposer",
                                   "num_speculative_tokens": 4})

The draft's folder is named by the environment variable SPECFORMER_DRAFT; without it the packaged draft that
fits the model is taken. vLLM verifies and schedules, the draft proposes. Its hidden states come out of vLLM's
own models, which can yield them for EAGLE-3. What of a token is cached for the draft lies where vLLM's
scheduler has put the token in its own cache (`PagedStore`), so that prompts read in chunks, preempted,
reordered and finished requests, and prefixes that requests share need no bookkeeping of ours: vLLM does not
tell `propose` whose row a row is.

What the interface lacks (vLLM 0.32): row boundaries, hence the look into the forward context; a place for the
draft's folder, hence the environment variable; and a call in steps where some row stands less than the draft
length before `max_model_len`: vLLM drafts for no row then, and the draft reads what it missed afterwards.
Drafts are greedy; vLLM verifies them for requests that sample, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from specformer import sampling
from specformer.base import Base
from specformer.cache import KVStore, Window, segments
from specformer.drafts import Draft, load_draft
from specformer.errors import UserError
from specformer.layers import RotaryTable
from specformer.pretrained import packaged_folder
from specformer.target import Head, Target, pack_linears

DRAFT = "SPECFORMER_DRAFT"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class PagedStore(KVStore):
    """Keys and values of some layers in blocks of `block` tokens, found through vLLM's block tables.

    Per layer one tensor (2, blocks, block, Hkv, D), which grows with the highest block that vLLM hands out.
    The first blocks are ours: `places` tokens of each row that a chain writes behind the last block vLLM has
    given the row go there.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        block: int,
        places: int,
    ):
        super().__init__(layers, rows, kv_heads, head_dim, limit, dtype, device)
        self.block, self.places = block, places
        self.spare = -(-places // block)
        self.kv = [
            torch.zeros(2, rows * self.spare, block, kv_heads, head_dim, dtype=dtype, device=device)
            for _ in range(layers)
        ]
        self.table = torch.zeros(0, 0, dtype=torch.long, device=device)

    def follow(self, table: Tensor, ends: Sequence[int]) -> None:
        """Read and write by this block table (B, blocks) int, whose row b holds ends[b] tokens."""
        held = torch.tensor([-(-end // self.block) for end in ends], device=table.device)[:, None]
        first = torch.arange(len(ends), device=table.device)[:, None] * self.spare
        columns = torch.arange(-(-(max(ends) + self.places) // self.block), device=table.device)
        ours = first + (columns - held).clamp(0, self.spare - 1)
        theirs = table[: len(ends), columns.clamp(max=table.shape[1] - 1)] + self.rows * self.spare
        self.table = torch.where(columns < held, theirs, ours).long()
        need = int(self.table.max()) + 1
        for i, old in enumerate(self.kv):
            if need > old.shape[1]:
                self.kv[i] = old.new_zeros(2, max(need, 2 * old.shape[1]), *old.shape[2:])
                self.kv[i][:, : old.shape[1]] = old

    def write(self, layer: int, window: Window, k: Tensor, v: Tensor) -> None:
        blocks = self.table[window.rows].gather(1, window.positions // self.block)
        self.kv[layer][:, blocks, window.positions % self.block] = torch.stack((k, v))

    def read(self, layer: int, window: Window) -> tuple[Tensor, Tensor]:
        blocks = self.table[window.rows, : -(-window.upto // self.block)]
        keys, values = self.kv[layer][:, blocks].flatten(2, 3)[:, :, : window.upto].transpose(2, 3)
        return keys, values


@dataclass
class Step:
    """One forward pass of the model: N tokens of B rows, one row after another.

    ids (N,) int64; taps (N, hooks, H); first: where each row begins among the N; start: the position of its
    first token; counts: its tokens; table (B, blocks): vLLM's block table, of blocks of
    `block` tokens.
    """

    ids: Tensor
    taps: Tensor
    first: list[int]
    start: list[int]
    counts: list[int]
    table: Tensor
    block: int

    def slot(self, row: int, position: int) -> int:
        """Where in vLLM's cache a token lies."""
        return int(self.table[row, position // self.block]) * self.block + position % self.block

    @property
    def ends(self) -> list[int]:
        return [s + n for s, n in zip(self.start, self.counts, strict=True)]


class Drafter:
    """A draft model fed step by step; knows nothing of vLLM but its block tables.

    draft, target: as for `Draft.propose`; k: tokens to draft. Raises UserError for a draft whose cache is not
    the target's.
    """

    def __init__(self, draft: Draft, target: Target, rows: int, k: int):
        if not 0 < k <= draft.draft_length:
            raise UserError(f"num_speculative_tokens is {k}: this draft gives 1..{draft.draft_length}")
        self.draft, self.target, self.k = draft, target, k
        self.head = draft.head(target)
        store = draft.new_store(target, rows, target.max_length, "sdpa")
        if store is not None and not isinstance(store, PagedStore):
            raise UserError(f"a draft of kind {draft.config.kind!r} keeps a cache that vLLM cannot page")
        self.store = store
        self.step: Step | None = None

    def see(self, step: Step) -> None:
        """What the model has just run. A step that nobody proposed after is read first."""
        if self.step is not None:
            self._read(self.step, self._seen_later(step), [n - 1 for n in self.step.counts])
        self.step = step

    def propose(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> list[list[int]]:
        """Drafts of each row of the step just seen: k tokens, none where a prompt goes on.

        sampled: the tokens each row has just committed, none amid a prompt; lengths (B,) and tokens
        (B, longest): how many tokens each row has with them, and which (numpy).
        """
        step, self.step = self.step, None
        if step is None or len(step.counts) != len(sampled):
            raise RuntimeError(f"vLLM asks for drafts of {len(sampled)} rows of a step that was not seen")
        spans = zip(step.start, step.ends, strict=True)
        following = [torch.from_numpy(tokens[b, s + 1 : e + 1]) for b, (s, e) in enumerate(spans)]
        last = [
            int(lengths[b]) - 2 - step.start[b] if new else step.counts[b] - 1
            for b, new in enumerate(sampled)
        ]
        drafts = self._read(step, torch.cat(following).to(step.ids), last)
        return [row if new else [] for row, new in zip(drafts.tolist(), sampled, strict=True)]

    def _seen_later(self, step: Step) -> Tensor:
        """The token after each one of the kept step (N,): the next of its row, but where a row goes on in
        `step`, what it goes on with."""
        assert self.step is not None
        old, at = self.step, {}
        for b, (first, start, count) in enumerate(zip(old.first, old.start, old.counts, strict=True)):
            at |= {old.slot(b, start + i): first + i for i in range(count)}
        following = old.ids.roll(-1)
        for b, (first, start) in enumerate(zip(step.first, step.start, strict=True)):
            place = at.get(step.slot(b, start - 1)) if start else None
            if place is not None:
                following[place] = step.ids[first]
        return following

    def _read(self, step: Step, following: Tensor, last: list[int]) -> Tensor:
        """Have the draft read the step's tokens, given the token after each (N,), and draft behind the one at
        `last` of each row: (B, k)."""
        ends, device = step.ends, step.ids.device
        drafts = step.ids.new_zeros(len(ends), self.k)
        if self.store is not None:
            self.store.follow(step.table, ends)
        # rows of similar length together; what fills a shorter one up is its last token again
        order = sorted(range(len(ends)), key=lambda b: (step.counts[b].bit_length(), ends[b]))
        for _, group in groupby(order, key=lambda b: step.counts[b].bit_length()):
            chosen = list(group)
            rows, first, start, count, at = (
                torch.tensor([values[b] for b in chosen], device=device)
                for values in (range(len(ends)), step.first, step.start, step.counts, last)
            )
            place = torch.arange(int(count.max()), device=device).minimum(count[:, None] - 1)
            longest = [ends[b] for b in chosen]
            window = Window(
                rows=rows,
                positions=start[:, None] + place,
                upto=max(longest),
                dtype=step.taps.dtype,
                fresh=False,
                runs=segments(longest),
            )
            index = first[:, None] + place
            drafts[rows] = self.draft.propose(
                step.taps[index], at, following[index], window, self.store, self.target, self.k, self._choose
            )
        return drafts

    def _choose(self, logits: Tensor, j: int) -> Tensor:
        return self.head.to_tokens(sampling.greedy(logits))


class ServedWeights:
    """The weights in a model's folder or hub repository, as `base_fingerprint` asks for them: on a CPU vLLM
    packs its own and drops the originals. Raises UserError where there are no safetensors."""

    def __init__(self, config: Any, source: str, revision: str | None):
        self.config, self.source, self.revision = config, source, revision
        index = self._file(INDEX)
        self.files = {} if index is None else json.loads(Path(index).read_text())["weight_map"]

    def _file(self, name: str) -> str | None:
        return cached_file(
            self.source, name, revision=self.revision, _raise_exceptions_for_missing_entries=False
        )

    def get_submodule(self, name: str) -> None:
        """Nothing: the weights are read one by one."""

    def get_parameter(self, name: str) -> Tensor:
        file = self._file(self.files.get(name, SINGLE))
        if file is None:
            raise UserError(
                f"{self.source} holds no {SINGLE}: a draft is checked against the base's own weights"
            )
        with safe_open(file, "pt") as weights:
            return weights.get_tensor(name)


class ServedRotary(nn.Module):
    """vLLM's table of cosines and sines, called like transformers' rotary embedding."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = table

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table[positions].chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


class ServedTarget(Target):
    """What a draft needs of a base LLM that vLLM runs: its embedding, rotary table and head.

    model: vLLM's module; config: the model's own; block: tokens of a block of vLLM's cache; places: tokens
    that a draft may write behind a row's end.
    """

    def __init__(self, model: Any, config: Any, dtype: torch.dtype, block: int, places: int):
        inner, attention, head = model.model, model.model.layers[0].self_attn, model.lm_head
        self.config, self.dtype, self.block, self.places = config, dtype, block, places
        self.embedding = inner.embed_tokens.weight[: config.vocab_size]
        self.device = self.embedding.device
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = attention.head_dim, config.rms_norm_eps
        table = attention.rotary_emb.cos_sin_cache
        self.max_length = len(table)
        self.rotary = RotaryTable(ServedRotary(table), self.max_length, dtype, self.device)

        def matmul(x: Tensor) -> Tensor:
            logits = head.quant_method.apply(head, x.flatten(0, -2))
            return logits[:, : config.vocab_size].unflatten(0, x.shape[:-1])

        weight = head.weight[: config.vocab_size]
        self.head = Head(inner.norm.weight, self.eps, weight, matmul=matmul)

    def new_store(self, rows: int, limit: int, layers: int | None = None, attention: str = "auto") -> KVStore:
        """A store of the LLM's head geometry that follows vLLM's block tables."""
        count = self.config.num_hidden_layers if layers is None else layers
        geometry = (self.kv_heads, self.head_dim, limit, self.dtype, self.device)
        return PagedStore(count, rows, *geometry, block=self.block, places=self.places)


class Proposer:
    """What vLLM's `custom_class` method makes and asks for drafts.

    Raises UserError when the model is loaded: for a draft made for another LLM, more speculative tokens than
    it gives, a model split over devices, or one that yields no hidden states.
    """

    def __init__(self, vllm_config: Any):
        self.config = vllm_config

    def load_model(self, target_model: Any) -> None:
        """Load the draft for vLLM's module and have the module yield the hidden states it reads."""
        model, parallel = self.config.model_config, self.config.parallel_config
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
            raise UserError(
                "specformer drafts for a model that lies on one device: set both parallel sizes to 1"
            )
        if not hasattr(target_model, "set_aux_hidden_state_layers"):
            raise UserError(
                f"vLLM's {type(target_model).__name__} yields no hidden states: no draft can read it"
            )
        weights: Any = ServedWeights(model.hf_config, model.model, model.revision)
        device = next(target_model.parameters()).device
        tokenizer: Any = None
        base = Base(weights, tokenizer, model.model, model.dtype, device, ())
        folder = os.environ.get(DRAFT) or packaged_folder(base)
        if folder is None:
            raise UserError(f"no packaged draft fits {model.model}: name a draft's folder in {DRAFT}")
        draft = load_draft(folder, base)
        pack_linears(draft)
        k = self.config.speculative_config.num_speculative_tokens
        self.block, rows = self.config.cache_config.block_size, self.config.scheduler_config.max_num_seqs
        target = ServedTarget(target_model, model.hf_config, model.dtype, self.block, places=k)
        self.drafter = Drafter(draft, target, rows, k)
        # in the order of the layers, whatever the draft's
        self.order = [sorted(draft.hooks).index(hook) for hook in draft.hooks]
        if draft.hooks:
            target_model.set_aux_hidden_state_layers(draft.hooks)
            # vLLM keeps compiled models by its config: this one has more outputs than without a draft
            self.config.additional_config["specformer_hooks"] = list(draft.hooks)
        target_model.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, args: Any, given: dict[str, Any], out: Any) -> Any:
        """A forward hook of the model: keep the step, and give vLLM the hidden states it expects."""
        from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]

        hidden, states = out if isinstance(out, tuple) else (out, [])
        found = get_forward_context().attn_metadata
        if found:  # none in vLLM's own trial runs
            meta = next(iter(found.values()))
            first = meta.query_start_loc.tolist()
            counts = [b - a for a, b in zip(first, first[1:], strict=False)]
            start = [end - n for end, n in zip(meta.seq_lens.tolist(), counts, strict=True)]
            # copies: vLLM writes the next step over these
            ids = given["input_ids"][: first[-1]].to(torch.long, copy=True)
            table = meta.block_table.clone()
            taps = hidden.new_empty(len(ids), 0, hidden.shape[-1])
            if states:
                taps = torch.stack([states[i][: len(ids)] for i in self.order], 1)
            step = Step(ids, taps, first[:-1], start, counts, table, self.block)
            if step.slot(0, start[0]) != int(meta.slot_mapping[0]):
                raise RuntimeError(f"vLLM's cache is not in blocks of {self.block} tokens")
            self.drafter.see(step)
        return hidden

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Drafts of the step's rows, k tokens each, none for rows amid their prompt.

        sampled_token_ids: tokens that each row has just committed; num_tokens_no_spec (rows,): tokens it has
        with them; token_ids_cpu (rows, max_model_len): which (numpy).
        """
        return self.drafter.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
