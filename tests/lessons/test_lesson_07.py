"""Lesson 7: its script, and the answers to its exercises."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.arrays import int32

radix = importlib.import_module("lessons.07_prefix_caching.radix")


def test_the_lesson_prints_its_claims(
    lesson: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.main(["--longest", "4096"])
    assert "both trees find every token" in capsys.readouterr().out


# A busy machine may draw slowly.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=8))
def test_tree_finds_the_longest_prefix(prompts: list[list[int]]) -> None:
    tree, known = radix.RadixTree(), [int32(prompt) for prompt in prompts[:-1]]
    for prompt in known:
        tree.insert(prompt)
    asked = int32(prompts[-1])
    assert tree.match(asked) == max(radix.common(prompt, asked) for prompt in known)


def test_shared_and_copied(answers: ModuleType) -> None:
    assert answers.shared_and_copied(35, 16) == (2, 3)
    assert answers.shared_and_copied(32, 16) == (2, 0)


def test_next_to_evict(answers: ModuleType) -> None:
    parents = {"root": None, "a": "root", "b": "a", "c": "a", "d": "root"}
    users = {"root": 1, "a": 1, "b": 0, "c": 1, "d": 0}
    last_used = {"root": 0.0, "a": 1.0, "b": 5.0, "c": 2.0, "d": 7.0}
    assert answers.next_to_evict(parents, users, last_used) == "b"
    assert answers.next_to_evict(parents, users | {"b": 1, "d": 2}, last_used) is None


def test_block_keys(answers: ModuleType) -> None:
    text = list(range(1000, 1040))
    keys = answers.block_keys(text, 16, "")
    assert len(keys) == 2
    assert {len(key) for key in keys} == {16}
    assert answers.block_keys([*text[:20], 7, *text[21:]], 16, "")[0] == keys[0]
    assert answers.block_keys([7, *text[1:]], 16, "")[1] != keys[1]
    assert not set(answers.block_keys(text, 16, "mine")) & set(keys)
