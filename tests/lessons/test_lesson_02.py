"""Lesson 2: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--tokens", "256"])
    assert "256 tokens take 1/" in capsys.readouterr().out


def test_cache_bytes(answers: ModuleType) -> None:
    config = {"num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128}
    assert answers.cache_bytes(config, 1, 2) == 114688
    assert answers.cache_bytes(config, 1000, 1) == 57344000


def test_positions_saved(answers: ModuleType) -> None:
    assert answers.positions_saved(1, 1000) == pytest.approx(500.5)
    assert answers.positions_saved(100, 1) == 1.0


def test_window_slots(answers: ModuleType) -> None:
    assert answers.window_slots(2, 4) == [0, 1, 2]
    assert answers.window_slots(9, 4) == [2, 3, 0, 1]
