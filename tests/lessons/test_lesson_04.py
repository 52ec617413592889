"""Lesson 4: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--prompt", "300", "--budget", "64"])
    assert "the others wait for 64 tokens, not 306" in capsys.readouterr().out


def test_padding(answers: ModuleType) -> None:
    assert answers.padding([10, 10, 10], 2) == 0.0
    assert answers.padding([10, 30, 20], 2) == pytest.approx(0.25)
    assert answers.padding([10, 30, 20], 1) == 0.0


def test_steps_to_first_token(answers: ModuleType) -> None:
    assert answers.steps_to_first_token(1200, 128, 6) == 10
    assert answers.steps_to_first_token(122, 128, 6) == 1
    assert answers.steps_to_first_token(123, 128, 6) == 2


def test_victims(answers: ModuleType) -> None:
    running = [("a", 5), ("b", 3), ("c", 2)]
    assert answers.victims(running, 1) == ["c"]
    assert answers.victims(running, 4) == ["c", "b"]
    assert answers.victims(running, 9) == ["c", "b"]
    assert answers.victims(running, 0) == []
