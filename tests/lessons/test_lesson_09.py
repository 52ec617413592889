"""Lesson 9: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

NUMBER = {(0, "-"): 1, (0, "4"): 2, (1, "4"): 2, (2, "4"): 2}
"""Reads -?4+."""


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main([])
    assert "| Quire, a schema " in capsys.readouterr().out


def test_matches(answers: ModuleType) -> None:
    found = [answers.matches(NUMBER, {2}, text) for text in ("4", "-44", "-", "", "4-", "5")]
    assert found == [True, True, False, False, False, False]


def test_allowed_tokens(answers: ModuleType) -> None:
    vocabulary = ["-", "4", "44", "-4", "4-", "", "x"]
    found = answers.allowed_tokens(NUMBER, 0, vocabulary)
    assert found.tolist() == [True, True, True, True, False, False, False]
    assert answers.allowed_tokens(NUMBER, 2, vocabulary).tolist()[:4] == [False, True, True, False]


def test_pack(answers: ModuleType) -> None:
    allowed = np.zeros(40, dtype=bool)
    allowed[[0, 5, 31, 33]] = True
    words = answers.pack(allowed)
    assert words.dtype == np.int32
    assert words.view(np.uint32).tolist() == [1 | 1 << 5 | 1 << 31, 2]
