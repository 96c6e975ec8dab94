"""What the engine, the trainer and the tables know of a draft model.

None of them asks which draft model it has: a draft says which hidden states it reads (`hooks`), how many
layers of keys and values it caches (`cache_layers`), proposes tokens (`propose`) and yields the hidden
states that training scores (`training_hidden`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specformer import hub
from specformer.base import Base, base_fingerprint
from specformer.cache import KVStore, Window
from specformer.errors import UserError
from specformer.target import Head, Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SWITCHES = ("draft_attention", "positional", "layers", "anchor_token", "small_llm")
"""Fields of DraftConfig that only some kinds know (`Draft.switches`)."""
Choose = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class ParameterCounts:
    """Trainable parameters as the paper counts them (Equation 3).

    shared: m_s, used by every draft position; per_position: m_p, owned by each one; base: M; passes: how
    often the shared ones run for one draft: once where one pass gives all positions, l_d times in a chain.
    """

    shared: int
    per_position: int
    draft_length: int
    base: int
    passes: int = 1

    @property
    def total(self) -> int:
        return self.shared + self.draft_length * self.per_position

    @property
    def costs(self) -> dict[str, int]:
        """m_s and m_p by what they cost: what runs anew for each position of a chain counts to m_p."""
        if self.passes == 1:
            return {"m_s": self.shared, "m_p": self.per_position}
        return {"m_s": 0, "m_p": (self.shared if self.passes else 0) + self.per_position}

    @property
    def p(self) -> float:
        """Growth of the compute per token, p = 1 + (m_s + l_d m_p) / M."""
        return 1 + (self.costs["m_s"] + self.draft_length * self.costs["m_p"]) / self.base


@dataclass(frozen=True)
class DraftConfig:
    """What a draft model is and which base LLM it fits; saved as config.json.

    kind: registered name; base_name, base_fingerprint: the LLM it was made for; hooks: indices of HS;
    the geometry fields repeat the base's; draft_attention, positional and layers are the paper's ablations.
    Beyond the paper: anchor_token, where the embedding of the base's newest token joins ("none": nowhere);
    vocabulary, how many tokens can be drafted (0: all); small_llm, hub name or folder of an LLM that drafts.
    """

    kind: str
    base_name: str
    base_fingerprint: str
    base_parameters: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attention_bias: bool
    q_k_norm: bool
    hooks: tuple[int, ...]
    draft_length: int
    draft_attention: str = "bidirectional"
    positional: str = "ffn"
    layers: int = 1
    anchor_token: str = "none"
    vocabulary: int = 0
    small_llm: str = ""
    specformer_version: str = ""

    @classmethod
    def for_base(cls, base: Base, kind: str, hooks: tuple[int, ...], **options) -> DraftConfig:
        """The config of a new draft for `base`; options are draft_length and the ablation switches."""
        config: Any = base.model.config
        layer: Any = base.model.model.layers[-1].self_attn
        return cls(
            kind=kind,
            base_name=base.name,
            base_fingerprint=base_fingerprint(base.model),
            base_parameters=sum(p.numel() for p in base.model.parameters()),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=layer.head_dim,
            eps=config.rms_norm_eps,
            attention_bias=layer.q_proj.bias is not None,
            q_k_norm=hasattr(layer, "q_norm"),
            hooks=hooks,
            specformer_version=version("specformer"),
            **options,
        )


class Draft(nn.Module):
    """A draft model.

    label: its name for people, "(chain)" where its source can draft trees; recipe: arguments of
    `training.train` that its source publishes; tapped: how many hidden states it reads, None for any;
    switches: which of SWITCHES it knows; cache_layers: layers of keys and values (of the base's head
    geometry) kept per committed token; final_norm: whether the base's final norm stands between its output
    and the LM head; head_share: weight of the LM head's cross-entropy in the loss, that of `feature_loss`
    being 1.
    Raises UserError for a config with switches or hooks that this kind would ignore.
    """

    kinds: ClassVar[dict[str, type[Draft]]] = {}
    label: ClassVar[str] = ""
    recipe: ClassVar[Mapping[str, Any]] = {}
    tapped: ClassVar[int | None] = None
    switches: ClassVar[tuple[str, ...]] = ()
    cache_layers: int = 0
    final_norm: ClassVar[bool] = True
    head_share: ClassVar[float] = 1.0

    vocabulary: Tensor | None

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        # every token of a vocabulary not chosen yet is the first one
        chosen = torch.zeros(config.vocabulary, dtype=torch.long) if config.vocabulary else None
        self.register_buffer("vocabulary", chosen)
        self._head: tuple[Target, Head] | None = None
        self._refuse_what_it_ignores()

    def _refuse_what_it_ignores(self) -> None:
        """A switch or hook that changes nothing would still be named in tables."""
        config, kind = self.config, f"a draft of kind {self.config.kind!r}"
        for f in fields(config):
            value = getattr(config, f.name)
            if f.name in SWITCHES and f.name not in self.switches and value != f.default:
                raise UserError(f"draft.{f.name}: {value!r} means nothing to {kind}")
        if self.tapped not in (None, len(config.hooks)):
            raise UserError(f"draft.hooks: {kind} reads {self.tapped} hidden states, not {config.hooks}")

    @classmethod
    def default_hooks(cls, layers: int) -> tuple[int, ...]:
        """Indices of HS that the source reads of a base of so many layers: here the last hidden state."""
        return (layers,)

    @property
    def hooks(self) -> tuple[int, ...]:
        return self.config.hooks

    @property
    def draft_length(self) -> int:
        return self.config.draft_length

    @property
    def trained_length(self) -> int:
        """Draft positions that training scores, the first ones."""
        return self.draft_length

    def passes(self, k: int) -> int:
        """Forward passes of the draft for k drafted tokens."""
        return 1

    def new_store(self, target: Target, rows: int, limit: int, attention: str) -> KVStore | None:
        """What the engine keeps of each row for the draft, None for nothing; arguments as for
        `Target.new_store`."""
        return target.new_store(rows, limit, self.cache_layers, attention) if self.cache_layers else None

    def attach(self, base: Base) -> None:
        """Load what the draft uses besides its own weights and the base's. UserError if it does not fit."""

    def begin(self, rows: Tensor, first: Tensor, store: KVStore | None) -> None:
        """Texts begin in these rows of the store (B,) int64 with the tokens first (B,) int64, which no
        `following` of `propose` holds."""

    @property
    def trainable(self) -> bool:
        """Whether there is anything to train."""
        return any(p.requires_grad for p in self.parameters())

    def start_from(self, base: Base) -> None:
        """Initialise from the base LLM's own weights; random initialisation stays where a draft has none."""

    def choose_vocabulary(self, rows: Sequence[Mapping[str, Any]], total: int) -> None:
        """Let the draft speak the `config.vocabulary` most frequent tokens of the answers.

        rows: dialogues with answer_ids; total: the base's vocabulary size. Where the answers hold fewer
        tokens, those of lowest id follow: byte-pair vocabularies number frequent tokens first. Raises
        UserError for more tokens than the base has.
        """
        if self.vocabulary is None:
            return
        if len(self.vocabulary) > total:
            raise UserError(
                f"draft.vocabulary = {len(self.vocabulary)}: the base has {total} tokens; 0 is all of them"
            )
        counts = torch.zeros(total, dtype=torch.long)
        for row in rows:
            counts += torch.bincount(torch.as_tensor(row["answer_ids"], dtype=torch.long), minlength=total)
        ranked = torch.argsort(counts, descending=True, stable=True)
        self.vocabulary.copy_(ranked[: self.config.vocabulary].sort().values)
        self._head = None

    def head(self, target: Target) -> Head:
        """The LM head that the draft is scored and drafts with, made once for a target."""
        if self._head is None or self._head[0] is not target:
            self._head = (target, self.make_head(target))
        return self._head[1]

    def make_head(self, target: Target) -> Head:
        """The base's LM head, cut to the vocabulary, behind its final norm or bare (`final_norm`)."""
        if self.vocabulary is None and self.final_norm:
            return target.head
        return target.cut_head(self.vocabulary, self.final_norm)

    def coverage(self, rows: Sequence[Mapping[str, Any]]) -> float:
        """Share of the answers' tokens that the draft can propose."""
        tokens = torch.cat([torch.as_tensor(row["answer_ids"], dtype=torch.long) for row in rows])
        if self.vocabulary is None or not len(tokens):
            return 1.0
        return float(torch.isin(tokens, self.vocabulary.cpu()).double().mean())

    def propose(
        self,
        taps: Tensor,
        last: Tensor,
        following: Tensor,
        window: Window,
        store: KVStore | None,
        target: Target,
        k: int,
        choose: Choose,
    ) -> Tensor:
        """Draft k tokens per row after the base's own next token.

        taps (B, n, hooks, H): hidden states of the n tokens just verified; what is kept of them goes to the
        window's positions of `store` (see `new_store`), which has room for k + 1 more tokens; what lies
        behind `last` the next window overwrites. last (B,) int64: each row's last accepted one among them,
        the only position that is drafted from. following (B, n) int64: the token after each of the n; at
        `last` it is the one that the base has just produced. choose(logits (B, m, V'), j), the logits of
        `head`, gives the tokens (B, m) of draft positions j .. j + m - 1. Returns (B, k).
        """
        raise NotImplementedError

    def training_hidden(
        self, taps: Tensor, following: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor:
        """What the head reads at the anchors, for every draft position; true tokens stand for drafted ones.

        taps (B, T, hooks, H); following (B, T) int64, the token after each position; rows and columns (N,)
        int64 name the anchors t; -> (N, draft_length, H), in training mode (N, trained_length, H), where
        position j is scored against token t + 2 + j.
        """
        raise NotImplementedError

    def feature_loss(
        self, hidden: Tensor, taps: Tensor, rows: Tensor, columns: Tensor, target: Target
    ) -> Tensor | None:
        """A loss besides the LM head's, for each label that `hidden` (N, trained_length, H) is scored by:
        (N, trained_length), or None.

        hidden: of `training_hidden`, whose other arguments these are.
        """
        return None

    def position_parameters(self) -> int:
        """m_p: parameters owned by a single draft position."""
        return 0

    def parameter_counts(self) -> ParameterCounts:
        """m_s, m_p and, through `.p`, the paper's p."""
        own = self.position_parameters()
        total = sum(p.numel() for p in self.parameters())
        return ParameterCounts(
            total - own * self.draft_length,
            own,
            self.draft_length,
            self.config.base_parameters,
            self.passes(self.draft_length),
        )

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write config.json and model.safetensors (weights in `dtype`), each replaced atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            k: v.detach().to("cpu", dtype if v.is_floating_point() else v.dtype).contiguous()
            for k, v in self.state_dict().items()
        }
        save_file(state, folder / (WEIGHTS + ".tmp"), metadata={"format": "pt"})
        (folder / (CONFIG + ".tmp")).write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):  # the config last: a folder with one is whole
            (folder / (name + ".tmp")).replace(folder / name)

    @classmethod
    def from_pretrained(cls, source: str | Path, base: Base, revision: str | None = None) -> Draft:
        """Load a draft in the base's dtype on its device, in eval mode.

        source: a folder, or a hub name OWNER/NAME; revision: a branch, tag or commit of the latter.
        Raises UserError when files are missing or corrupt or can't be fetched, when this version does not
        know the draft's kind or settings, and when the base is another one.
        """
        folder = hub.locate(source, (CONFIG, WEIGHTS), revision)
        config = read_config(folder / CONFIG, source)
        check_fits(config, base, source)
        draft = cls.kinds[config.kind](config)
        draft.attach(base)
        try:
            draft.load_state_dict(load_file(folder / WEIGHTS))
        except Exception as error:  # safetensors raises its own types for truncated files
            raise UserError(
                f"{source}: {WEIGHTS} is missing, corrupt or half-written ({error}): train the draft again"
            ) from error
        return draft.to(base.device, base.dtype).eval()


def read_config(file: Path, source: str | Path) -> DraftConfig:
    """The config of the draft in `source`; settings younger than the draft get the defaults, which mean what
    its version did.

    Raises UserError for a file that is missing or damaged, and for a kind or settings that this version does
    not know or that the draft's did not write.
    """
    try:
        raw: dict[str, Any] = dict(json.loads(file.read_text()))
        if "hooks" in raw:
            raw["hooks"] = tuple(raw["hooks"])
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{source} holds no readable draft model ({CONFIG}: {error}): train one or give its folder"
        ) from error
    known = {f.name: f.default is MISSING for f in fields(DraftConfig)}
    writer, own = raw.get("specformer_version") or "an unnamed version", version("specformer")
    wrote = f"{source} was written by specformer {writer}, this is {own}"
    if unknown := sorted(set(raw) - set(known)):
        raise UserError(f"{wrote}: unknown settings {unknown}; load it with that version or a later one")
    if missing := [name for name, required in known.items() if required and name not in raw]:
        raise UserError(f"{wrote}: it lacks the settings {missing}; train it again")
    if raw["kind"] not in Draft.kinds:
        raise UserError(
            f"unknown draft kind {raw['kind']!r}; known: {sorted(Draft.kinds)}. {wrote}: load it with the "
            "version and the modules that made it"
        )
    return DraftConfig(**raw)


def check_fits(config: DraftConfig, base: Base, source: str | Path) -> None:
    """Raise UserError unless the draft was made for exactly this base LLM."""
    found = base_fingerprint(base.model)
    if config.base_fingerprint != found:
        raise UserError(
            f"the draft in {source} was made for {config.base_name} (fingerprint {config.base_fingerprint}), "
            f"not for {base.name} ({found}): load that base, or train a draft for this one"
        )


def new_draft(
    base: Base,
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    init: str,
    seed: int,
    hooks: tuple[int, ...] | None = None,
    **options: Any,
) -> Draft:
    """An untrained draft of a registered kind for `base`, its vocabulary taken from the answers of `rows`.

    init: "base" begins from the base LLM's own weights, "random" from nothing; seed: of the random part;
    hooks: indices of HS, the kind's own by default; options: further fields of DraftConfig. float32, on the
    CPU. Raises UserError for an unknown kind, and for options that this kind cannot do without.
    """
    if kind not in Draft.kinds:
        raise UserError(f"unknown draft kind {kind!r}; known: {sorted(Draft.kinds)}")
    cls = Draft.kinds[kind]
    hooks = cls.default_hooks(base.num_layers) if hooks is None else hooks
    torch.manual_seed(seed)
    draft = cls(DraftConfig.for_base(base, kind, hooks, **options))
    draft.attach(base)
    draft.choose_vocabulary(rows, base.model.config.vocab_size)
    if init == "base":
        draft.start_from(base)
    return draft


D = TypeVar("D", bound=Draft)


def register(kind: str) -> Callable[[type[D]], type[D]]:
    """Class decorator: make a draft model loadable under `kind`."""

    def add(cls: type[D]) -> type[D]:
        Draft.kinds[kind] = cls
        return cls

    return add


def load_draft(source: str | Path, base: Base, revision: str | None = None) -> Draft:
    """Load any registered draft model from a folder or the hub; see `Draft.from_pretrained`."""
    return Draft.from_pretrained(source, base, revision)
