"""Lessons and answers to their exercises: the solutions by default, or yours with `--answers
exercises`.

The module of a test for lesson NN, `test_lesson_NN.py`, says which lesson it is.
"""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from lessons.__main__ import folders


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--answers",
        default="solutions",
        choices=("solutions", "exercises"),
        help="which answers the exercises' tests check (tests/lessons)",
    )


def _module(request: pytest.FixtureRequest, name: str) -> ModuleType:
    number = re.search(r"test_lesson_(\d+)$", request.module.__name__)
    if number is None:
        raise ValueError(f"{request.module.__name__} is not named after a lesson")
    return importlib.import_module(f"lessons.{folders()[int(number[1])]}.{name}")


@pytest.fixture
def lesson(request: pytest.FixtureRequest) -> ModuleType:
    """Returns the module of the lesson's script."""
    return _module(request, "lesson")


@pytest.fixture
def answers(request: pytest.FixtureRequest) -> ModuleType:
    """Returns the module with the answers to the lesson's exercises."""
    answers: str = request.config.getoption("--answers", default="solutions")
    return _module(request, answers)
