"""Every format in the cases that streams bring: one call, two, text around them, a cut."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.parsers.registry import TOOL_PARSERS
from tests.server.parsers.harness import cuts, read
from tests.server.parsers.test_grammar import CALLS

FORMATS = [name for name in CALLS if name not in ("llama3_json", "pythonic")]


def calls(name: str, text: str) -> list[Any]:
    found = [read(TOOL_PARSERS[name], pieces) for pieces in cuts(text)]
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call(name: str) -> None:
    function, arguments = calls(name, CALLS[name][0])[0]
    assert function == "weather"
    assert {"city": arguments["city"].removesuffix(" <b>")} == {"city": "Oslo"}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_with_text_around(name: str) -> None:
    first, second = calls(name, CALLS[name][1])
    assert (first[0], second) == ("weather", ("now", {}))
    assert calls(name, f"Well, 1 < 2. {CALLS[name][0]}") == [
        "Well, 1 < 2.", *calls(name, CALLS[name][0])
    ]  # fmt: skip
    assert calls(name, f"{CALLS[name][0]}\nDone.")[1:] == ["Done."]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_shows_no_markup(name: str) -> None:
    text = CALLS[name][0]
    mark = next(mark for mark in TOOL_PARSERS[name].starts if text.startswith(mark))
    for end in range(len(mark), len(text)):
        found = read(TOOL_PARSERS[name], [text[:end]])
        assert not any(isinstance(part, str) for part in found), text[:end]
        assert [part[0] for part in found] in ([], ["weather"])


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_tools_and_other_text_are_text(name: str) -> None:
    mark = TOOL_PARSERS[name].starts[0]
    unknown = CALLS[name][0].replace("weather", "nothing")
    assert "".join(calls(name, unknown)) == unknown
    for text in ("", "Hello.", f"The mark {mark} ~ is one.", "a < b [c] {d}"):
        assert "".join(calls(name, text)) == text
