"""Hidden states of the base LLM, computed once and reused over epochs.

They take hooks x H x dtype bytes a token, so they go to disk: one safetensors file a dialogue, checksummed,
written whole or not at all.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specformer.base import base_fingerprint
from specformer.errors import UserError
from specformer.target import Target

GIB = 2**30


class HasIds(Protocol):
    """A training sequence: a unique id and its token ids (T,)."""

    id: str
    ids: Tensor


class HiddenStates:
    """Hands out tapped hidden states of right-padded batches, from disk where they were computed before.

    folder: where they are kept, or None to compute them every time.
    """

    def __init__(self, target: Target, hooks: tuple[int, ...], folder: Path | None):
        self.target, self.hooks, self.folder = target, hooks, folder
        self.owner = {
            "base": base_fingerprint(target.base.model),
            "dtype": str(target.dtype),
            "hooks": str(hooks),
        }
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def bytes_per_token(self) -> int:
        """Disk taken by one token."""
        return len(self.hooks) * self.target.config.hidden_size * self.target.dtype.itemsize

    def __call__(self, batch: Sequence[HasIds]) -> Tensor:
        """-> (B, T, hooks, H) in the base's dtype, zero beyond each sequence's end.

        Raises UserError for a stored file of another base, dtype or hook set, and for a corrupt one.
        """
        kept = {s.id: self._load(s) for s in batch} if self.folder else {}
        missing = [s for s in batch if kept.get(s.id) is None]
        if missing:
            ids = pad_sequence([s.ids for s in missing], batch_first=True).to(self.target.device)
            _, taps = self.target.encode(ids, self.hooks)
            assert taps is not None
            for s, row in zip(missing, taps, strict=True):
                kept[s.id] = row[: len(s.ids)]
                if self.folder is not None:
                    self._save(s, row[: len(s.ids)])
        rows = [kept[s.id] for s in batch]
        return pad_sequence([row for row in rows if row is not None], batch_first=True).to(self.target.device)

    def clear(self) -> None:
        """Delete what is stored."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, sequence: HasIds) -> Path:
        assert self.folder is not None
        tokens = hashlib.sha256(sequence.ids.numpy().tobytes()).hexdigest()[:12]
        return self.folder / f"{hashlib.sha256(sequence.id.encode()).hexdigest()[:16]}-{tokens}.safetensors"

    def _save(self, sequence: HasIds, taps: Tensor) -> None:
        taps = taps.cpu().contiguous()
        path = self._path(sequence)
        save_file({"taps": taps}, path.with_suffix(".tmp"), self.owner | {"sha256": _digest(taps)})
        path.with_suffix(".tmp").replace(path)

    def _load(self, sequence: HasIds) -> Tensor | None:
        path = self._path(sequence)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                taps, found = file.get_tensor("taps"), file.metadata()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is corrupt ({error}): delete that file, it is computed again") from error
        other = {k: found.get(k) for k, v in self.owner.items() if found.get(k) != v}
        if other:
            raise UserError(
                f"the hidden states in {path.parent} are of {other}, not of "
                f"{ {k: self.owner[k] for k in other} }: delete that folder, they are computed again"
            )
        if found.get("sha256") != _digest(taps):
            raise UserError(f"{path} does not match its checksum: delete that file, it is computed again")
        return taps


def _digest(taps: Tensor) -> str:
    return hashlib.sha256(taps.view(torch.uint8).numpy().tobytes()).hexdigest()
