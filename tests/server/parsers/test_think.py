"""Reasoning in a block before the answer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from quire.server.parsers.registry import REASONING_FORMATS
from quire.server.parsers.think import ThinkParser
from tests.server.parsers.harness import cuts

QWEN, MISTRAL = REASONING_FORMATS["qwen3"], REASONING_FORMATS["mistral"]

# begins_open, text, reasoning, answer, and how many characters the block had
CASES: list[tuple[bool | None, str, str, str, int]] = [
    (None, "<think>\nLet me see.\n</think>\n\nHello.\n", "Let me see.", "Hello.\n", 28),
    (None, "  <think>a</think>b", "a", "b", 18),
    (None, "<think>\n\n</think>\n\nHello", "", "Hello", 17),
    (None, "Hello <think>", "", "Hello <think>", 0),
    (None, " <thin", "", " <thin", 0),
    (None, "", "", "", 0),
    (None, "<think>a </thi b", "a </thi b", "", 16),
    (None, "<think>a</think>b</think>", "a", "b</think>", 16),
    (True, "Let me see.\n</think>\n\nHello", "Let me see.", "Hello", 20),
    (True, "\n\n a  b \n", "a  b", "", 9),
    (True, "</think>Hello", "", "Hello", 8),
    (False, "<think>no</think>", "", "<think>no</think>", 0),
    (False, "\n\nHello", "", "\n\nHello", 0),
]


def read(begins_open: bool | None, pieces: Iterable[str]) -> tuple[str, str, int]:
    parser = ThinkParser(QWEN, begins_open)
    reasoning = answer = ""
    block = 0
    for piece in pieces:
        more, text, characters = parser.feed(piece)
        reasoning, answer = reasoning + more, answer + text
        block = block + characters
    undecided = parser.undecided
    more, text = parser.finish()
    return reasoning + more, answer + text, 0 if undecided else block


@pytest.mark.parametrize(("begins_open", "text", "reasoning", "answer", "block"), CASES)
def test_every_cut_gives_the_same(
    begins_open: bool | None, text: str, reasoning: str, answer: str, block: int
) -> None:
    whole = read(begins_open, [text])
    assert whole == (reasoning, answer, block)
    for pieces in cuts(text):
        assert read(begins_open, pieces)[:2] == whole[:2], pieces


@pytest.mark.parametrize(
    ("prompt", "begins_open"),
    [
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("is <think> a tag?<|im_start|>assistant\n", None),
    ],
)
def test_the_prompt_decides_whether_reasoning_begins_open(
    prompt: str, begins_open: bool | None
) -> None:
    assert QWEN.begins_open(prompt) is begins_open


@pytest.mark.parametrize(
    ("continued", "begins_open"),
    [
        ("I am", False),
        ("<think>Let me", True),
        ("<think>Let me see.</think>I", False),
        ("<think>a</think><think>", True),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_continued_message_decides_whether_reasoning_begins_open(
    name: str, continued: str, begins_open: bool
) -> None:
    assert REASONING_FORMATS[name].begins_open(f"x{continued}", continued) is begins_open


def test_deepseek_begins_within_reasoning_unless_the_prompt_closed_it() -> None:
    format = REASONING_FORMATS["deepseek_r1"]
    assert format.begins_open("<|Assistant|>") is True
    assert format.begins_open("<|Assistant|></think>\n\n") is False
    parser = ThinkParser(format, begins_open=True)
    assert parser.feed("<think>twice</think>x")[:2] == ("twice", "x")


def test_answers_that_begin_with_a_mark() -> None:
    format = REASONING_FORMATS["gpt_oss"]
    assert format.begins_open("<|end|><|start|>assistant") is None
    assert format.begins_open(format.closing) is False
    parser = ThinkParser(format, None)
    answer = "<|start|>assistant<|channel|>final<|message|>Hi"
    text = f"<|channel|>analysis<|message|>a<|end|>{answer}"
    assert parser.feed(text)[:2] == ("a", answer)


def test_other_marks() -> None:
    parser = ThinkParser(MISTRAL, None)
    assert parser.feed("[THINK]a[/THINK]b") == ("a", "b", 16)
