"""Every format with one call, two calls, text around them, and text that ends early."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.parsers.registry import TOOL_PARSERS
from quire.server.parsers.stream import CallEnd, Text
from tests.server.parsers.harness import TOOLS, cuts, read
from tests.server.parsers.test_grammar import (
    CALLS,
    DS2,
    DS3,
    DS4,
    DS5,
    M3,
    OSLO,
    dsml,
    dsml_argument,
    kimi_k3,
    kimi_k3_argument,
    minicpm5,
    minimax_m3,
    minimax_m3_argument,
)

FORMATS = [name for name in CALLS if name not in ("llama3_json", "pythonic", "functionary_v32")]


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
    starts = TOOL_PARSERS[name].starts
    begin = next(at + len(mark) for mark in starts if (at := text.find(mark)) >= 0)
    for end in range(begin, len(text)):
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
    marked = name == "gpt_oss"  # its marks never appear as text
    shown = unknown
    for dropped in TOOL_PARSERS[name].text_marks:
        shown = shown.replace(dropped, "").lstrip()
    assert "".join(calls(name, unknown)) == (OSLO if marked else shown)
    for text in ("", "Hello.", f"The mark {mark} ~ is one.", "a < b [c] {d}"):
        assert "".join(calls(name, text)) == (text.replace(mark, "") if marked else text)


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
    ("<|channel|>other<|message|>x", ["x"]),
    # A call without arguments, with an empty body.
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", [("now", {})]),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", [("now", {})]),
    ("<|channel|>commentary to=functions.now<|message|>\n<|end|><|start|>assistant<|channel|>final"
     "<|message|>So.", [("now", {}), "So."]),
    # Tools by their bare names, and unknown tools.
    ('<|channel|>commentary to=weather json<|message|>{"city": "Oslo"}<|call|>',
     [("weather", {"city": "Oslo"})]),
    (' to=now<|channel|>commentary<|message|>{}<|call|>', [("now", {})]),
    ("to=now<|message|><|call|>", [("now", {})]),
    ('<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>{"a": 1}<|call|>',
     ['{"a": 1}']),
    ("to=nobody<|channel|>commentary code<|message|>print(1)<|call|>", ["print(1)"]),
    ("<|channel|>commentary to=functions.now code<|message|>print(1)<|call|>", ["print(1)"]),
    # Marks in wrong places.
    ("a<|constrain|>b<|message|>c<|return|>", ["abc"]),
    ("<|start|>user<|message|>b", ["b"]),
    ("<|channel|>final, <b>", ["final, <b>"]),
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", ["b"]),
    ("<|channel|>analysis<|message|>a<|channel|>commentary to=functions.now<|message|>{}",
     [("now", {})]),
    ("to=day I go", ["to=day I go"]),
    ("the end", ["the end"]),
    ("to", ["to"]),
    ("it goes to=functions. or so", ["it goes to=functions. or so"]),
    ("<|channel|>fin", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HEADERS, ids=range(len(HEADERS)))
def test_headers_of_gpt_oss(text: str, expected: list[Any]) -> None:
    assert calls("gpt_oss", text) == expected


LOOSE: list[tuple[str, str, list[Any]]] = [
    # Without the mark that begins a call, or the one that ends it.
    ("qwen3_xml", "Sure.\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
     "</tool_call>", ["Sure.", ("weather", {"city": "Oslo"})]),
    ("qwen3_xml", "<function=now>\n</function>\n<function=now>\n</function>", [("now", {})] * 2),
    ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
     "</tool_call>\n<tool_call>\n<function=now>\n</tool_call>",
     [("weather", {"city": "Oslo"}), ("now", {})]),
    ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n",
     [("weather", {"city": "Oslo"})]),
    ("qwen3_xml", "It is <function=f> in HTML.", ["It is <function=f> in HTML."]),
    ("seed_oss", "<function=weather><parameter=city>Oslo</parameter></seed:tool_call>",
     [("weather", {"city": "Oslo"})]),
    ("minimax_m2", '<invoke name="now">\n</invoke>\n<invoke name="now">\n</minimax:tool_call>.',
     [("now", {}), ("now", {}), "."]),
    ("kimi_k2", "<|tool_call_section_begin|><|tool_call_begin|>functions.now:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>", [("now", {})]),
    ("kimi_k2", "So: <|tool_call_begin|>now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", ["So:", ("now", {})]),
    ("deepseek_v31", f"{DS2}now{DS3}{{}}{DS4}{DS5}", [("now", {})]),
    ("deepseek_v3", f"{DS2}function{DS3}now\n```json\n{{}}\n```{DS4}{DS5}", [("now", {})]),
    # A list in a format with single calls.
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "weather", "arguments": {"city": "Oslo"}}]\n'
     "</tool_call>", [("now", {}), ("weather", {"city": "Oslo"})]),
    # Blocks of code: around calls, inside of marks, and instead of marks.
    ("hermes", 'Sure:\n```json\n<tool_call>{"name": "now"}</tool_call>\n```\nDone.',
     ["Sure:", ("now", {}), "Done."]),
    ("hermes", '<tool_call>\n```json\n{"name": "now"}\n```\n</tool_call>', [("now", {})]),
    ("hermes", '```\n{"name": "now", "arguments": {}}\n```', [("now", {})]),
    ("hermes", '```json\n[{"name": "now", "arguments": {}}]', [("now", {})]),
    ("hermes", '```json\n{"name": "now"}\n```', ['```json\n{"name": "now"}\n```']),
    ("hermes", '```json\n{"a": 1}\n```\n<tool_call>{"name": "now"}</tool_call>',
     ['```json\n{"a": 1}\n```', ("now", {})]),
    ("hermes", '```py\nx\n```\n```\n<tool_call>{"name": "now"}</tool_call>\n```',
     ["```py\nx\n```", ("now", {})]),
    ("hermes", "```", ["```"]),
    ("hermes", "Use ```code``` ``here``.", ["Use ```code``` ``here``."]),
    ("qwen3_xml", "```xml\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n```",
     [("now", {})]),
    ("qwen3_xml", "<tool_call>\n```\n<function=now>\n</function>\n```\n</tool_call>",
     [("now", {})]),
    ("mistral", '```json\n[TOOL_CALLS][{"name": "now"}]\n```', [("now", {})]),
    ("mistral", '[TOOL_CALLS]```json\n[{"name": "now"}]\n```', [("now", {})]),
    ("granite", '<|tool_call|>```json\n[{"name": "now"}]\n```', [("now", {})]),
    ("pythonic", "```python\n[now()]\n```", [("now", {})]),
    ("llama3_json", '```json\n{"name": "now", "parameters": {}}\n```', [("now", {})]),
    ("llama3_json", 'Sure:\n\n```json\n{"name": "now", "parameters": {}}\n```\nOne moment.',
     ["Sure:", ("now", {}), "One moment."]),
    ("llama3_json", '<|python_tag|>```\n{"name": "now", "parameters": {}}\n```', [("now", {})]),
    ("llama3_json", 'f = {"a": {"b": 1}}; g = {}', ['f = {"a": {"b": 1}}; g = {}']),
    ("llama3_json", '{{"name": "now", "parameters": {}}', ["{", ("now", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), LOOSE, ids=range(len(LOOSE)))
def test_calls_of_models_that_depart_from_their_format(
    name: str, text: str, expected: list[Any]
) -> None:
    assert calls(name, text) == expected


def test_a_limit_may_cut_a_call_between_two_parameters() -> None:
    parser = TOOL_PARSERS["qwen3_xml"](TOOLS)
    parts = parser.feed("<tool_call><function=weather><parameter=city>Oslo</parameter>")
    parts += parser.finish(stopped=False)
    assert not any(isinstance(part, CallEnd) for part in parts)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_xml", "kimi_k2"])
def test_only_the_format_begins_calls_that_a_grammar_writes(name: str) -> None:
    own = [text for parser, text, want in LOOSE if parser == name and "<tool_call>" not in text]
    for text in own:
        parser = TOOL_PARSERS[name](TOOLS, enforced=True)
        if text.startswith(parser.starts):
            continue
        parts = parser.feed(text) + parser.finish()
        assert "".join(part.text for part in parts if isinstance(part, Text)) == text


MARKED: list[tuple[str, str, list[Any]]] = [
    # Text between marks, alone and before calls.
    ("functionary_v32", "all\nHello.", ["Hello."]),
    ("functionary_v32", "all\n  I look.>>>now\n{}", ["I look.", ("now", {})]),
    ("functionary_v32", 'weather\n{"city": "Oslo"}>>>now\n{}',
     [("weather", {"city": "Oslo"}), ("now", {})]),
    ("functionary_v32", "al", []),
    ("functionary_v32", "allo\n{}", ["allo\n{}"]),
    ("functionary_v32", "Hello >>> there.", ["Hello >>> there."]),
    ("functionary_v32", "now {}", ["now {}"]),
    ("functionary_v32", "weather\nIt rains.", ["weather\nIt rains."]),
    ("kimi_k3", "<|open|>response<|sep|>Hello.<|close|>response<|sep|><|close|>message<|sep|>",
     ["Hello."]),
    ("kimi_k3", "<|open|>response<|sep|>I look.<|close|>response<|sep|>"
     + kimi_k3(("now", "")) + "<|close|>message<|sep|>", ["I look.", ("now", {})]),
    ("kimi_k3", "<|open|>response<|sep|><|close|>response<|sep|>" + kimi_k3(("now", "")),
     [("now", {})]),
    ("solar", "<|begin|>assistant<|content|>Hello.<|end|>", ["Hello."]),
    ("apriel", "Hello.\n[END FINAL RESPONSE]", ["Hello."]),
    ("gigachat3", "Hello.<|message_sep|>\n\n", ["Hello."]),
    # A tag's type decides where the schema does not.
    ("deepseek_v32", dsml("function_calls", ("now", dsml_argument("a", "7", "true")
     + dsml_argument("b", "7", "false") + dsml_argument("c", '["x"]', "false"))),
     [("now", {"a": "7", "b": 7, "c": ["x"]})]),
    ("deepseek_v32", dsml("function_calls", ("weather", dsml_argument("city", "7", "false"))),
     [("weather", {"city": "7"})]),
    ("kimi_k3", kimi_k3(("now", kimi_k3_argument("a&quot;b", "7", "string")
     + kimi_k3_argument("n", "null", "null"))), [("now", {'a"b': "7", "n": None})]),
    # Values in CDATA sections, and values with tags.
    ("minicpm5", minicpm5(("weather", '<param name="city"><![CDATA[a </param> <b>]]></param>')),
     [("weather", {"city": "a </param> <b>"})]),
    ("minicpm5", minicpm5(("weather", '<param name="city"><b>]]> <![CDATA[</param>')),
     [("weather", {"city": "<b>]]> <![CDATA["})]),
    ("minicpm5", minicpm5(("now", """<param name="a">{'b': [True]}</param>""")),
     [("now", {"a": "{'b': [True]}"})]),
    # Elements inside of elements.
    ("minimax_m3", minimax_m3(("now", minimax_m3_argument("a", minimax_m3_argument("item", "1")
     + minimax_m3_argument("item", minimax_m3_argument("b", "x <c>"))))),
     [("now", {"a": [1, {"b": "x <c>"}]})]),
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"now\">{M3}<a>1{M3}</b>",
     [("now", ""), f"{M3}<a>1{M3}</b>"]),
    # JSON lists in the place of lines, and calls without their end.
    ("minimax_m1", '<tool_calls>{"name": "now", "arguments": {}}\n\n{"name": "now"}',
     [("now", {}), ("now", {})]),
    ("command_r", 'Plan: look.\nAction: ```json\n[{"tool_name": "now", "parameters": {}}]\n```',
     ["Plan: look.", ("now", {})]),
    ("command_r", "Action: I look.", ["Action: I look."]),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "now", "arguments": {}}', [("now", {})]),
    ("solar", "<|tool_call:begin|>x<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
     [("now", {})]),
    ("lfm2", "<|tool_call_start|>[weather(city='a\nb')]<|tool_call_end|>",
     [("weather", {"city": "a\nb"})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), MARKED, ids=range(len(MARKED)))
def test_marked_text_and_tagged_values(name: str, text: str, expected: list[Any]) -> None:
    assert calls(name, text) == expected


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
