"""What users hold is what it was; see `golden.py` for how a change is written down."""

from __future__ import annotations

import pytest

from tests.repository.golden import FOLDER, GOLDEN, text_of


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_that_users_hold_has_changed(name: str) -> None:
    assert text_of(name) == (FOLDER / f"{name}.json").read_text("utf-8")
