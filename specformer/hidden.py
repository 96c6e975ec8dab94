"""What the frozen base LLM says of each dialogue, computed once and reused over epochs.

Hidden states take hooks x H x dtype bytes a token, so they go to disk: one safetensors file a dialogue,
checksummed, written whole or not at all. With `top` the base's own most probable next tokens lie beside them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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

    top: how many next tokens are kept; folder: where all is kept, or None to compute it every time.
    """

    def __init__(self, target: Target, hooks: tuple[int, ...], folder: Path | None, top: int = 0):
        self.target, self.hooks, self.folder, self.top = target, hooks, folder, top
        self.owner = {
            "base": base_fingerprint(target.base.model),
            "dtype": str(target.dtype),
            "hooks": str(hooks),
        }
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def bytes_per_token(self) -> int:
        """Disk taken by one token."""
        states = len(self.hooks) * self.target.config.hidden_size * self.target.dtype.itemsize
        return states + self.top * (torch.int64.itemsize + torch.float32.itemsize)

    def __call__(self, batch: Sequence[HasIds]) -> Teaching:
        """Raises UserError for a stored file of another base, dtype or hook set, and for a corrupt one."""
        kept = {s.id: self._load(s) for s in batch} if self.folder else {}
        missing = [s for s in batch if kept.get(s.id) is None]
        if missing:
            ids = pad_sequence([s.ids for s in missing], batch_first=True).to(self.target.device)
            hidden, taps = self.target.encode(ids, self.hooks)
            assert taps is not None
            for s, states, row in zip(missing, hidden, taps, strict=True):
                tokens, logprobs = self._top(states[: len(s.ids)])
                made = {"taps": row[: len(s.ids)], "tokens": tokens, "logprobs": logprobs}
                kept[s.id] = made
                if self.folder is not None:
                    self._save(s, made)
        rows = [row for s in batch if (row := kept[s.id]) is not None]
        return Teaching(
            *(
                pad_sequence([row[part] for row in rows], batch_first=True).to(self.target.device)
                for part in ("taps", "tokens", "logprobs")
            )
        )

    def fill(self, sequences: Sequence[HasIds], tokens: int = 4096, name: str = "hidden states") -> None:
        """Compute what is not stored yet, sequences of similar length together, about `tokens` at a time."""
        if self.folder is None:
            return
        missing = sorted(
            (s for s in sequences if not self._path(s).exists()), key=lambda s: (-len(s.ids), s.id)
        )
        with Progress(name, len(sequences), "dialogues", done=len(sequences) - len(missing)) as bar:
            while missing:
                count = max(1, tokens // len(missing[0].ids))
                batch, missing = missing[:count], missing[count:]
                self(batch)
                bar.advance(len(batch))

    def _top(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Pre-norm hidden states (T, H) -> the most probable next tokens and their log-probabilities."""
        if not self.top:
            none = torch.zeros(len(hidden), 0, device=hidden.device)
            return none.long(), none
        tokens, logprobs = [], []
        for part in hidden.split(CHUNK):
            logits = self.target.logits(part)
            best = logits.topk(self.top, -1)
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

    def _save(self, sequence: HasIds, made: dict[str, Tensor]) -> None:
        made = {name: tensor.cpu().contiguous() for name, tensor in made.items()}
        path = self._path(sequence)
        save_file(made, path.with_suffix(".tmp"), self.owner | {"sha256": _digest(made)})
        path.with_suffix(".tmp").replace(path)

    def _load(self, sequence: HasIds) -> dict[str, Tensor] | None:
        path = self._path(sequence)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                made = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                found = file.metadata()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is corrupt ({error}): delete that file, it is computed again") from error
        other = {k: found.get(k) for k, v in self.owner.items() if found.get(k) != v}
        if other:
            raise UserError(
                f"the hidden states in {path.parent} are of {other}, not of "
                f"{ {k: self.owner[k] for k in other} }: delete that folder, they are computed again"
            )
        if found.get("sha256") != _digest(made):
            raise UserError(f"{path} does not match its checksum: delete that file, it is computed again")
        if made["tokens"].shape[1] < self.top:  # an earlier run wanted fewer
            return None
        return made | {part: made[part][:, : self.top] for part in ("tokens", "logprobs")}


def _digest(made: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(made.items()):
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
