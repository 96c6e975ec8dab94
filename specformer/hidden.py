"""What the frozen base LLM says of each dialogue, computed once and reused over epochs.

Hidden states take hooks x H x dtype bytes a token, so they go to disk: one safetensors file a dialogue,
checksummed, written whole or not at all. With `top` the base's own most probable next tokens lie beside them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specformer.base import base_fingerprint
from specformer.errors import UserError
from specformer.losses import CHUNK
from specformer.progress import Progress
from specformer.target import Target

GIB = 2**30


class HasIds(Protocol):
    """A training sequence: a unique id and its token ids (T,)."""

    id: str
    ids: Tensor


@dataclass
class Teaching:
    """What the base says of a right-padded batch, zero beyond each sequence's end.

    taps (B, T, hooks, H) in the base's dtype; top_tokens (B, T, n) int64 and top_logprobs (B, T, n) float32:
    the n most probable next tokens at each position; n is 0 unless asked for.
    """

    taps: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class HiddenStates:
    """Hands out what the base says of batches, from disk where it was computed before.

    hooks: indices of HS; folder: where all is kept, or None to compute it every time; top: how many next
    tokens; others: hooks and top of further drafts that will read the same folder, kept beside one's own.
    """

    def __init__(
        self,
        target: Target,
        hooks: tuple[int, ...],
        folder: Path | None,
        top: int = 0,
        others: Sequence[tuple[tuple[int, ...], int]] = (),
    ):
        self.target, self.hooks, self.folder, self.top = target, hooks, folder, top
        shared = [(hooks, top), *others] if folder is not None else [(hooks, top)]
        self.all_hooks = tuple(sorted({hook for wanted, _ in shared for hook in wanted}))
        self.all_top = max(wanted for _, wanted in shared)
        self.owner = {"base": base_fingerprint(target.base.model), "dtype": str(target.dtype)}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def bytes_per_token(self) -> int:
        """Disk taken by one token."""
        states = len(self.all_hooks) * self.target.config.hidden_size * self.target.dtype.itemsize
        return states + self.all_top * (torch.int64.itemsize + torch.float32.itemsize)

    def __call__(self, batch: Sequence[HasIds]) -> Teaching:
        """Raises UserError for a stored file of another base or dtype, and for a corrupt one."""
        kept = {s.id: self._load(s) for s in batch} if self.folder else {}
        missing = [s for s in batch if kept.get(s.id) is None]
        if missing:
            ids = pad_sequence([s.ids for s in missing], batch_first=True).to(self.target.device)
            hidden, taps = self.target.encode(ids, self.all_hooks)
            assert taps is not None
            for b, s in enumerate(missing):
                n = len(s.ids)
                made = dict(zip(("tokens", "logprobs"), self._top(hidden[b, :n]), strict=True))
                made |= {_tap(hook): taps[b, :n, i] for i, hook in enumerate(self.all_hooks)}
                kept[s.id] = made
                if self.folder is not None:
                    self._save(s, made)
        rows = [row for s in batch if (row := kept[s.id]) is not None]
        states = [torch.stack([row[_tap(hook)] for hook in self.hooks], 1) for row in rows]
        top = [[row[part][:, : self.top] for row in rows] for part in ("tokens", "logprobs")]
        return Teaching(
            *(pad_sequence(part, batch_first=True).to(self.target.device) for part in (states, *top))
        )

    def fill(self, sequences: Sequence[HasIds], tokens: int = 4096, name: str = "hidden states") -> None:
        """Compute what is not stored yet, sequences of similar length together, about `tokens` at a time."""
        if self.folder is None:
            return
        missing = sorted((s for s in sequences if not self._holds(s)), key=lambda s: (-len(s.ids), s.id))
        with Progress(name, len(sequences), "dialogues", done=len(sequences) - len(missing)) as bar:
            while missing:
                count = max(1, tokens // len(missing[0].ids))
                batch, missing = missing[:count], missing[count:]
                self(batch)
                bar.advance(len(batch))

    def _top(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-norm hidden states (T, H) -> the most probable next tokens and their log-probabilities."""
        if not self.all_top:
            none = torch.zeros(len(hidden), 0, device=hidden.device)
            return none.long(), none
        tokens, logprobs = [], []
        for part in hidden.split(CHUNK):
            logits = self.target.logits(part)
            best = logits.topk(self.all_top, -1)
            tokens.append(best.indices)
            logprobs.append(best.values.float() - logits.float().logsumexp(-1, keepdim=True))
        return torch.cat(tokens), torch.cat(logprobs)

    def clear(self) -> None:
        """Delete what is stored."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, sequence: HasIds) -> Path:
        assert self.folder is not None
        tokens = hashlib.sha256(sequence.ids.numpy().tobytes()).hexdigest()[:12]
        return self.folder / f"{hashlib.sha256(sequence.id.encode()).hexdigest()[:16]}-{tokens}.safetensors"

    def _holds(self, sequence: HasIds) -> bool:
        """Whether all that is asked for is stored, by the names alone."""
        path = self._path(sequence)
        if not path.exists():
            return False
        with _opened(path) as file:
            return self._enough(file)

    def _enough(self, file: Any) -> bool:
        """An earlier run may have wanted fewer next tokens, or other hooks."""
        names = set(file.keys())
        held = "tokens" in names and file.get_slice("tokens").get_shape()[1] >= self.top
        return held and all(_tap(hook) in names for hook in self.hooks)

    def _save(self, sequence: HasIds, made: dict[str, Tensor]) -> None:
        made = {name: tensor.cpu().contiguous() for name, tensor in made.items()}
        path = self._path(sequence)
        sums = {_sum(name): _digest(tensor) for name, tensor in made.items()}
        save_file(made, path.with_suffix(".tmp"), self.owner | sums)
        path.with_suffix(".tmp").replace(path)

    def _load(self, sequence: HasIds) -> dict[str, Tensor] | None:
        """What is stored of a sequence, only the parts asked for; None where some of them are not."""
        path = self._path(sequence)
        if not path.exists():
            return None
        with _opened(path) as file:
            found = file.metadata() or {}
            other = {k: found.get(k) for k, v in self.owner.items() if found.get(k) != v}
            if other:
                raise UserError(
                    f"the hidden states in {path.parent} are of {other}, not of "
                    f"{ {k: self.owner[k] for k in other} }: delete that folder, they are computed again"
                )
            if not self._enough(file):
                return None
            made = {name: file.get_tensor(name) for name in ("tokens", "logprobs", *map(_tap, self.hooks))}
        if any(found.get(_sum(name)) != _digest(tensor) for name, tensor in made.items()):
            raise UserError(f"{path} does not match its checksum: delete that file, it is computed again")
        return made


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Raises UserError for a file that is no safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is corrupt ({error}): delete that file, it is computed again") from error


def _tap(hook: int) -> str:
    return f"tap.{hook}"


def _sum(name: str) -> str:
    return f"sha256.{name}"


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
