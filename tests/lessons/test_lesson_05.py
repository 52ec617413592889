"""Lesson 5: its script, and the answers to its exercises."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    lesson.main(["--rows", "2"])
    assert "for the same kernels" in capsys.readouterr().out


def test_without_triton_the_lesson_says_so(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson.importlib.util, "find_spec", lambda name: None)
    lesson.main([])
    assert "triton is not installed" in capsys.readouterr().out


def test_merge(answers: ModuleType) -> None:
    scores, values = torch.randn(4, 8), torch.randn(4, 8, 5)
    largest = scores.amax(1)
    weights = (scores - largest[:, None]).exp()
    found = answers.merge(largest, weights.sum(1), torch.einsum("pk,pkd->pd", weights, values))
    torch.testing.assert_close(found, scores.flatten().softmax(0) @ values.flatten(0, 1))


def test_add_norm_bytes(answers: ModuleType) -> None:
    assert answers.add_norm_bytes(4, 1024, 2, True) == 2 * (4 * 4096 + 1024)
    assert answers.add_norm_bytes(4, 1024, 2, False) == 2 * (5 * 4096 + 1024)


def test_bucket(answers: ModuleType) -> None:
    assert answers.bucket(8, [1, 16, 8]) == (8, 0.0)
    assert answers.bucket(9, [16, 1, 8]) == (16, 0.4375)
    assert answers.bucket(17, [16, 1, 8]) is None
