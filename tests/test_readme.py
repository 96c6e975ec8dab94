"""Every number in the README is what the committed results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from specformer.errors import UserError
from specformer.readme import render

ROOT = Path(__file__).parent.parent


def test_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text()
    assert text == render(text, ROOT / "results" / "cpu"), "run `specformer readme`"


def test_unknown_block_and_missing_results(tmp_path):
    with pytest.raises(UserError, match="unknown block 'nothing'"):
        render("<!-- specformer:nothing -->\n<!-- /specformer -->", tmp_path)
    with pytest.raises(UserError, match="dvc repro"):
        render("<!-- specformer:costs -->\n<!-- /specformer -->", tmp_path)
