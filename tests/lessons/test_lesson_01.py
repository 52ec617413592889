"""Lesson 1: its script, and the answers to its exercises."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--tokens", "12"])
    assert "12 of 12 greedy tokens are the engine's" in capsys.readouterr().out


@pytest.mark.parametrize(("p", "kept"), [(0.4, [2]), (0.5, [2]), (0.6, [0, 2]), (1.0, [0, 1, 2])])
def test_top_p(answers: ModuleType, p: float, kept: list[int]) -> None:
    logits = torch.tensor([0.3, 0.2, 0.5]).log()
    found = answers.top_p(logits, p)
    assert found.isfinite().nonzero().flatten().tolist() == kept
    torch.testing.assert_close(found[kept], logits[kept])


def test_penalize(answers: ModuleType) -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0])
    found = answers.penalize(logits, [0, 1, 1, 0], 2.0)
    assert found.tolist() == [1.0, -4.0, 4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0]


def test_perplexity(answers: ModuleType) -> None:
    even = torch.zeros(5, 8)
    assert answers.perplexity(even, torch.tensor([1, 2, 3, 4, 5])) == pytest.approx(8)
    sure = torch.full((3, 4), -math.inf)
    sure[0, 2] = sure[1, 3] = 0.0
    assert answers.perplexity(sure, torch.tensor([0, 2, 3])) == pytest.approx(1)
