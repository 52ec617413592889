"""Lesson 12: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main([])
    assert "| Quire, checkpoints kept " in capsys.readouterr().out


def test_short_convolution(answers: ModuleType) -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(20, 6, generator=rng), torch.randn(6, 4, generator=rng)
    whole, last = answers.short_convolution(x, weight, torch.zeros(3, 6))
    padded = torch.nn.functional.pad(x.t(), (3, 0)).unsqueeze(0)
    wanted = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6)[0].t()
    torch.testing.assert_close(whole, wanted)
    torch.testing.assert_close(last, x[-3:])
    parts, before = [], torch.zeros(3, 6)
    for part in x.split([1, 2, 9, 8]):
        out, before = answers.short_convolution(part, weight, before)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), wanted)


@pytest.mark.parametrize(
    ("checkpoints", "kv_tokens", "prompt", "found"),
    [
        ([16, 64, 32], 40, 100, 32),
        ([16, 64, 32], 64, 100, 64),
        ([64], 64, 64, 0),
        ([], 64, 100, 0),
        ([16], 8, 100, 0),
    ],
)
def test_longest_resumable(
    answers: ModuleType, checkpoints: list[int], kv_tokens: int, prompt: int, found: int
) -> None:
    assert answers.longest_resumable(checkpoints, kv_tokens, prompt) == found


def test_break_even(answers: ModuleType) -> None:
    assert answers.break_even(1000, 100) == 11
    assert answers.break_even(1001, 100) == 11
    assert answers.break_even(99, 100) == 1
