"""Marks values of a parameter that only `make test-all` tries."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Returns a parameter set that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
