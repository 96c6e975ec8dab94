"""Draft models: one file each, one small interface, found by name."""

from __future__ import annotations

from specformer.drafts.dflash import DFlash
from specformer.drafts.eagle import Eagle
from specformer.drafts.eagle3 import Eagle3
from specformer.drafts.hass import Hass
from specformer.drafts.interface import Draft, DraftConfig, ParameterCounts, load_draft, new_draft, register
from specformer.drafts.medusa import Medusa
from specformer.drafts.mtp import MTP
from specformer.drafts.ngram import NGram
from specformer.drafts.p_eagle import PEagle
from specformer.drafts.small_llm import SmallLLM
from specformer.drafts.specformer import SpecFormer

__all__ = [
    "DFlash",
    "Draft",
    "DraftConfig",
    "Eagle",
    "Eagle3",
    "Hass",
    "MTP",
    "Medusa",
    "NGram",
    "PEagle",
    "ParameterCounts",
    "SmallLLM",
    "SpecFormer",
    "load_draft",
    "new_draft",
    "register",
]
