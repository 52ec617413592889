"""Lesson 11: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main([])
    assert "| w8a8 " in capsys.readouterr().out


def test_pack(answers: ModuleType) -> None:
    values = torch.tensor([[1, 2, 15, 0], [0, 15, 7, 8]])
    found = answers.pack(values)
    assert found.dtype == torch.uint8
    assert found.tolist() == [[0x21, 0x0F], [0xF0, 0x87]]


def test_with_zero(answers: ModuleType) -> None:
    x = torch.rand(5, 64, generator=torch.Generator().manual_seed(0)) + 3
    x[4] = 2.5
    found = answers.with_zero(x, 4)
    assert float((found - x).abs().max()) <= 1 / 15 / 2 + 1e-6
    torch.testing.assert_close(found.amin(1), x.amin(1))
    torch.testing.assert_close(found.amax(1), x.amax(1))
    assert len(found[0].unique()) <= 16


def test_smoothing(answers: ModuleType) -> None:
    inputs = torch.tensor([100.0, 4.0, 0.0, 9.0])
    weight = torch.tensor([[1.0, -0.5, 1.0, 0.0], [-4.0, 0.25, 2.0, 0.0]])
    found = answers.smoothing(inputs, weight, 0.5)
    torch.testing.assert_close(found, torch.tensor([5.0, 8**0.5, 1.0, 1.0]))
    whole = answers.smoothing(inputs, weight, 1.0)
    torch.testing.assert_close(whole, torch.tensor([100.0, 4.0, 1.0, 1.0]))
