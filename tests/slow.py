"""Values of parameters, and examples of Hypothesis, that only `make test-all` tries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

WHOLE = "QUIRE_TESTS_WHOLE"
"""Set in the environment, while the tests that are marked slow run too."""


def slow(*values: Any) -> Any:
    """Returns a parameter set that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> int:
    """Returns how many examples Hypothesis tries: `count` with the slow tests, else a third."""
    return count if WHOLE in os.environ else count // 3


def some(values: Sequence[T]) -> Sequence[T]:
    """Returns all values with the slow tests, else every third."""
    return values if WHOLE in os.environ else values[::3]
