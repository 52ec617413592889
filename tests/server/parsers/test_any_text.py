"""For any text, a parser's result does not depend on the cuts, and no text is lost."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.args import ServerArgs
from quire.server.parsers.registry import REASONING_FORMATS, TOOL_PARSERS
from quire.server.parsers.think import ThinkParser
from tests.server.parsers.harness import read
from tests.slow import examples

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=", "weather", "now", ">", "<parameter=", "city",
    "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "{", "}", "[", "]", "(", ")", "=", ",", ";", ":", " ",
    "\n", '"', "'", "\\", "\\u00", "name", "arguments", "parameters", "function", "1", "-2.5e",
    "true", "None", "é", "😀", "text", "<", "<think>", "</think>", "<thi", "\x00",
    '{"name": "weather", "arguments": {"city": "', '{"name": "now", "parameters": {}}',
    '{"name": "now", "arguments": {', "[weather(city=", "[now()",
    "<tool_call>\n<function=weather>\n<parameter=city>\n", "[TOOL_CALLS]weather[ARGS]{",
    "```", "```json\n", "\n```", '{"name": "now", "arguments": {}}', "<|channel|>", "<|message|>",
    "<|start|>", "to=functions.now", "to=now", "<|call|>", "<|tool_call_begin|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(pieces[-1]), turn + 1
    return pieces


def normal(parts: list[object]) -> list[object]:
    """Compares the arguments of complete calls as text, so that no difference is missed."""
    return [str(part) for part in parts]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@given(text=TEXTS, sizes=CUTS)
@settings(max_examples=examples(150))
def test_cuts_do_not_matter(name: str, text: str, sizes: list[int]) -> None:
    parser = TOOL_PARSERS[name]
    whole = read(parser, [text])
    assert normal(read(parser, cut(text, sizes))) == normal(whole)
    assert normal(read(parser, list(text))) == normal(whole)
    if all(isinstance(part, str) for part in whole) and not parser.marks_text:
        shown = "".join(whole)  # type: ignore[arg-type]
        dropped = text[len(shown) :].lstrip()
        assert text.startswith(shown)
        assert not dropped or dropped.startswith((*parser.starts, *parser.lenient_starts, "```"))


@pytest.mark.parametrize("begins_open", [None, True, False])
@given(text=TEXTS, sizes=CUTS)
@settings(max_examples=examples(150))
def test_cuts_of_reasoning_do_not_matter(
    begins_open: bool | None, text: str, sizes: list[int]
) -> None:
    def split(pieces: list[str]) -> tuple[str, str]:
        parser = ThinkParser(REASONING_FORMATS["qwen3"], begins_open)
        read = [parser.feed(piece)[:2] for piece in pieces] + [parser.finish()]
        return "".join(r for r, _ in read), "".join(a for _, a in read)

    assert split(cut(text, sizes)) == split([text]) == split(list(text))


def test_flags_name_all_formats() -> None:
    hints = get_type_hints(ServerArgs)
    assert set(get_args(hints["tool_call_parser"])) == {"auto", "none", *TOOL_PARSERS}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *REASONING_FORMATS}
