"""Lesson 8: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--length", "24"])
    assert "| shared_noise " in capsys.readouterr().out


def test_residual_completes_the_target(answers: ModuleType) -> None:
    target = torch.tensor([0.5, 0.3, 0.2])
    draft = torch.tensor([0.2, 0.2, 0.6])
    kept = torch.minimum(target, draft)
    found = kept + (1 - kept.sum()) * answers.residual(target, draft)
    torch.testing.assert_close(found, target)
    torch.testing.assert_close(answers.residual(target, target), target)


@pytest.mark.parametrize(
    ("drafts", "drawn", "expected"),
    [
        ([7, 8, 9], [7, 8, 9, 4], [7, 8, 9, 4]),
        ([7, 8, 9], [7, 5, 9, 4], [7, 5]),
        ([7, 8, 9], [1, 8, 9, 4], [1]),
        ([], [3], [3]),
    ],
)
def test_tokens_of_a_pass(
    answers: ModuleType, drafts: list[int], drawn: list[int], expected: list[int]
) -> None:
    assert answers.tokens_of_pass(drafts, drawn) == expected


def test_best_draft_count(answers: ModuleType) -> None:
    free = [1.0] * 8
    assert answers.best_draft_count(0.9, 0.0, free) == 7
    assert answers.best_draft_count(0.6, 0.1, free) == 3
    # If every token costs as much as a step, no draft is worthwhile.
    assert answers.best_draft_count(0.9, 0.0, [float(k + 1) for k in range(8)]) == 0
