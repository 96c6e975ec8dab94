"""What `pytest --nbval notebooks/` needs, wherever pytest is started."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("nbval", False):
        return
    # Set here because a path in addopts counts from where pytest starts.
    config.option.nbval_sanitize_with = str(ROOT / "notebooks" / "sanitize.cfg")
    config.option.nbval_current_env = True
    if not (ROOT / "data" / "smoke" / "corpus").exists():
        from specformer.pipeline import run_stage

        for stage in ("fetch", "base", "corpus"):
            run_stage(stage, "smoke", ROOT)
