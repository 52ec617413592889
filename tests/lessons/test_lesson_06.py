"""Lesson 6: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--prompt", "64"])
    out = capsys.readouterr().out
    assert "FLOPs are predicted within" in out
    assert "figures are predicted within" in out


def test_ridge_rows(answers: ModuleType) -> None:
    assert answers.ridge_rows(4.25e12, 700e12, 2) == pytest.approx(164.7, abs=0.1)
    assert answers.ridge_rows(1e12, 100e12, 1) == 50.0


def test_decode_seconds(answers: ModuleType) -> None:
    assert answers.decode_seconds(16e9, 147456, [], 4e12) == pytest.approx(4e-3)
    assert answers.decode_seconds(0, 100, [10, 30], 1000) == pytest.approx(4.0)


def test_most_rows(answers: ModuleType) -> None:
    # Memory for 64 bytes of KV with 10 per row fits 6 rows. Half a second moves 30 bytes of KV: 3
    # rows.
    assert answers.most_rows(100, 36, 1, 10, 132, 10.0) == 6
    assert answers.most_rows(100, 36, 1, 10, 132, 0.5) == 3
    assert answers.most_rows(100, 136, 1, 10, 132, 10.0) == 0
