"""Lesson 3: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--requests", "80"])
    assert "room for the longest" in capsys.readouterr().out


def test_slots(answers: ModuleType) -> None:
    assert answers.slots([7, 2, 5], 4, 2, 7) == [30, 31, 8, 9, 10, 11, 20]


def test_append_copies_a_block_that_others_hold(answers: ModuleType) -> None:
    table, holders, free = [3, 4], {3: 2, 4: 2}, [8, 9]
    assert answers.append(table, holders, free, 6, 4) == (4, 9)
    assert (table, holders, free) == ([3, 9], {3: 2, 4: 1, 9: 1}, [8])
    assert answers.append(table, holders, free, 7, 4) is None
    assert answers.append(table, holders, free, 8, 4) is None
    assert (table, holders, free) == ([3, 9, 8], {3: 2, 4: 1, 9: 1, 8: 1}, [])


def test_best_block_size(answers: ModuleType) -> None:
    sizes = [1, 16, 256]
    assert answers.best_block_size([100, 250], sizes, 1000, 4) == 1
    assert answers.best_block_size([100, 250], sizes, 1000, 4000) == 16
    assert answers.best_block_size([256], sizes, 1000, 4) == 256
