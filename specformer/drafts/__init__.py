"""Draft models: one file each, one small interface, found by name."""

from __future__ import annotations

from specformer.drafts.interface import Draft, DraftConfig, ParameterCounts, load_draft, new_draft, register
from specformer.drafts.specformer import SpecFormer

__all__ = ["Draft", "DraftConfig", "ParameterCounts", "SpecFormer", "load_draft", "new_draft", "register"]
