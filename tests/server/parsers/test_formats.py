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


END_MARKS = {
    "hermes": ("\n</tool_call>\n", "\n"),
    "qwen3_xml": ("\n</tool_call>\n", "\n"),
    "minimax_m2": ("</minimax:tool_call>", ""),
    "gemma4": ("<tool_call|>", ""),
    "functionary": ("</function>", ""),
    "kimi_k2": ("<|tool_call_end|>", ""),
    "deepseek_v31": ("<｜tool▁call▁end｜>", ""),
}


@pytest.mark.parametrize("name", END_MARKS)
def test_calls_without_end_marks(name: str) -> None:
    whole = CALLS[name][1]
    if name == "minimax_m2":
        begin, end = "<minimax:tool_call>", END_MARKS[name][0]
        inner = whole.removeprefix(begin).removesuffix(end)
        whole = begin + inner.replace("</invoke>", f"</invoke>{end}{begin}", 1) + end
    bare = whole.replace(*END_MARKS[name])
    assert bare != whole
    assert calls(name, bare) == calls(name, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_unknown_tools_and_other_text_are_text(name: str) -> None:
    mark = TOOL_PARSERS[name].starts[0]
    unknown = CALLS[name][0].replace("weather", "nothing")
    assert "".join(calls(name, unknown)) == unknown
    for text in ("", "Hello.", f"The mark {mark} ~ is one.", "a < b [c] {d}"):
        assert "".join(calls(name, text)) == text


HEADERS: list[tuple[str, list[Any]]] = [
    ("<|channel|>final<|message|>Hello.", ["Hello."]),
    ("<|start|>assistant<|channel|>final<|message|> Hello.", ["Hello."]),
    ("<|channel|>commentary<|message|>I look.<|end|>"
     "<|start|>assistant<|channel|>final<|message|>So.", ["I look.\n\nSo."]),
    ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
     ["a"]),
    ("<|channel|>analysis<|message|>cut", []),
    (' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>', [("now", {"a": 1})]),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|> {}", [("now", {})]),
    ("<|channel|>commentary to=browser.open<|message|>{}", ["{}"]),
    ("<|channel|>other<|message|>x", ["<|channel|>other<|message|>x"]),
    ("it goes to=functions. or so", ["it goes to=functions. or so"]),
    ("<|channel|>fin", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HEADERS, ids=range(len(HEADERS)))
def test_headers_of_gpt_oss(text: str, expected: list[Any]) -> None:
    assert calls("gpt_oss", text) == expected


VALUES: list[tuple[str, Any]] = [
    ('city:<|"|>a "b", {c}\n<|"|>', {"city": 'a "b", {c}\n'}),
    ('city: "a\\"b" , days : 3', {"city": 'a"b', "days": 3}),
    ('"city":<|"|><|"|>', {"city": ""}),
    ("unit:null,days:-1.5e3", {"unit": None, "days": -1500.0}),
    ('x:[1,<|"|>b<|"|>,{k:true,<|"|>l<|"|>:[]}]', {"x": [1, "b", {"k": True, "l": []}]}),
    ("", {}),
]


@pytest.mark.parametrize(("text", "arguments"), VALUES, ids=range(len(VALUES)))
def test_values_of_gemma(text: str, arguments: Any) -> None:
    assert calls("gemma4", f"<|tool_call>call:weather{{{text}}}<tool_call|>") == [
        ("weather", arguments)
    ]
