"""Compares the public interfaces with files written by `golden.py`."""

from __future__ import annotations

import pytest

from tests.repository.golden import FOLDER, GOLDEN, text_of


@pytest.mark.parametrize("name", GOLDEN)
def test_public_interfaces_have_not_changed(name: str) -> None:
    assert text_of(name) == (FOLDER / f"{name}.json").read_text("utf-8")
