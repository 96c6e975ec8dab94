"""SpecFormer: non-autoregressive drafting for large-batch speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specformer.base import load_base
    from specformer.chat import encode_prompt
    from specformer.drafts import load_draft
    from specformer.engine import Engine, Request, Result
    from specformer.errors import UserError

__version__ = "0.1.0"
__all__ = ["Engine", "Request", "Result", "UserError", "encode_prompt", "load_base", "load_draft"]

_HOME = {
    "Engine": "engine",
    "Request": "engine",
    "Result": "engine",
    "UserError": "errors",
    "encode_prompt": "chat",
    "load_base": "base",
    "load_draft": "drafts",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds, and `specformer plan` does without."""
    if name not in _HOME:
        raise AttributeError(f"module 'specformer' has no attribute {name!r}")
    return getattr(import_module(f"specformer.{_HOME[name]}"), name)
