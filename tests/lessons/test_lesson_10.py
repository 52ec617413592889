"""Lesson 10: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main([])
    assert "0123012301 .012301230" in capsys.readouterr().out


def test_bounds(answers: ModuleType) -> None:
    assert answers.bounds(512, 64, 1, 4) == (128, 256)
    assert [answers.bounds(6, 1, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]
    with pytest.raises(ValueError, match=r"\d"):
        answers.bounds(512, 64, 0, 3)


def test_likeliest(answers: ModuleType) -> None:
    logits = torch.randint(0, 9, (200, 24), generator=torch.Generator().manual_seed(1)).float()
    for world in (1, 2, 4):
        found = answers.likeliest(list(logits.chunk(world, dim=1)))
        assert found.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("stages", "groups", "steps", "share"),
    [(1, 1, 9, 1.0), (4, 1, 5, 0.25), (4, 4, 1, 4 / 7), (4, 8, 2, 16 / 19), (4, 2, 3, 6 / 13)],
)
def test_busy_share(
    answers: ModuleType, stages: int, groups: int, steps: int, share: float
) -> None:
    assert answers.busy_share(stages, groups, steps) == pytest.approx(share)
