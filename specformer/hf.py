"""The engine behind transformers' own call: `model.generate(..., custom_generate=CustomGenerate(folder))`.

For a shared draft also `model.generate(..., custom_generate="OWNER/NAME", trust_remote_code=True)`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specformer.base import Base
from specformer.drafts.interface import load_draft
from specformer.engine import Engine, Request
from specformer.errors import UserError

# What the engine does itself; anything else in these lists would change the text, so it is refused by name.
PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class CustomGenerate:
    """A decoding method for `generate`: batched inputs, left or right padded, greedy or sampled.

    draft: folder or hub name of a draft model made for the model that generates, or None for plain decoding;
    k: draft tokens per step, by default 4 or all that the draft has; seed: of sampled rows, row i draws with
    seed + i; revision: of a draft on the hub. Honours max_length / max_new_tokens, do_sample, temperature,
    top_k, top_p, eos_token_id, pad_token_id, stop_strings and num_return_sequences of the GenerationConfig;
    raises UserError naming what it cannot honour.
    """

    def __init__(
        self,
        draft: str | Path | None = None,
        k: int | None = None,
        seed: int = 0,
        revision: str | None = None,
    ):
        self.source, self.k, self.seed, self.revision = draft, k, seed, revision
        self._engine: tuple[int, Engine] | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """input_ids (B, T) -> (B, T + longest answer), answers padded on the right, as `generate` gives."""
        _refuse(logits_processor, stopping_criteria, generation_config, model_kwargs)
        config = generation_config
        new_tokens = config.max_length - input_ids.shape[1]
        ends = config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        stop = tuple(
            [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or ()
        )
        # not a parameter of its own: `generate` would take it out of its own preparation
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        requests = [
            Request(
                id=str(i),
                prompt_ids=row[keep.bool()].tolist(),
                max_new_tokens=new_tokens,
                temperature=(1.0 if config.temperature is None else config.temperature)
                if config.do_sample
                else 0.0,
                top_k=config.top_k or 0,
                top_p=1.0 if config.top_p is None else config.top_p,
                seed=self.seed + i,
                stop=stop,
            )
            for i, (row, keep) in enumerate(zip(input_ids, mask, strict=True))
        ]
        engine = self._prepare(model, tokenizer, tuple(ends), len(requests))
        answers = {r.id: r.ids for r in engine.run(requests)}
        rows = [torch.tensor(answers[r.id], dtype=torch.long) for r in requests]
        padding = config.pad_token_id if config.pad_token_id is not None else (ends or [0])[0]
        out = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        return torch.cat((input_ids, out.to(input_ids.device)), 1)

    def _prepare(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        ends: tuple[int, ...],
        rows: int,
    ) -> Engine:
        """The engine for this model and batch size, kept for the next call."""
        if self._engine is None or self._engine[0] != id(model) or self._engine[1].batch_size < rows:
            base = Base(model, tokenizer, model.name_or_path, model.dtype, model.device, ends)  # type: ignore[arg-type]
            draft = None if self.source is None else load_draft(self.source, base, self.revision)
            usual = 0 if draft is None else min(4, draft.draft_length)
            k, length = usual if draft is None or self.k is None else self.k, base.max_positions
            self._engine = (id(model), Engine(base, draft, k=k, batch_size=rows, max_length=length))
        engine = self._engine[1]
        engine.base.stop_token_ids = ends
        if tokenizer is not None:
            engine.base.tokenizer = tokenizer
        return engine


def generate(
    model: Any,
    draft: str | Path | None = None,
    k: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    **arguments: Any,
) -> Tensor:
    """What `custom_generate/generate.py` of a shared draft runs (`specformer.sharing`).

    draft: by default the repository or folder that `custom_generate` named; k, seed, revision: as for
    `CustomGenerate`; arguments: all the others of transformers' `generate`. Returns what that returns.
    """
    if draft is None:
        # transformers runs a copy of generate.py in a cache and does not pass on where it is from
        call = inspect.currentframe()
        draft = call.f_back.f_locals.get("custom_generate") if call and call.f_back else None
    if not isinstance(draft, str | Path):
        raise UserError("generate does not know which draft to use: give draft=, a folder or a hub name")
    made_for = (str(draft), k, seed, revision)
    kept = model.__dict__.get("_specformer")  # with the model, so that neither outlives the other
    if kept is None or kept[0] != made_for:
        kept = model.__dict__["_specformer"] = (made_for, CustomGenerate(draft, k, seed, revision))
    return model.generate(**arguments, custom_generate=kept[1])


def _refuse(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise UserError for anything that would change the answer and that the engine does not do."""
    foreign = [type(p).__name__ for p in processors if not isinstance(p, PROCESSORS)]
    foreign += [type(c).__name__ for c in criteria if not isinstance(c, CRITERIA)]
    foreign += [
        name
        for name, plain in {
            "num_beams": (None, 1),
            "return_dict_in_generate": (None, False),
            "penalty_alpha": (None, 0.0),
            "dola_layers": (None,),
            "prompt_lookup_num_tokens": (None,),
            "max_time": (None,),
        }.items()
        if getattr(config, name, None) not in plain
    ]
    foreign += [name for name in ("inputs_embeds", "assistant_model") if model_kwargs.get(name) is not None]
    if foreign:
        raise UserError(f"specformer's generate does not support {', '.join(foreign)}: leave it out")
