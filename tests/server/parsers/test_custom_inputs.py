"""Custom tools: every format enforces their grammars, and gives the input back."""

from __future__ import annotations

import json
import random
import re

import pytest

from quire.errors import RequestError
from quire.sampling_params import SamplingParams
from quire.server.chat.custom_tools import InputReader, custom_tool, input_arguments
from quire.server.chat.dialogue import Dialogue, ToolChoice
from quire.server.chat.tools import constrain_params
from quire.server.parsers.chat_format import ChatFormat
from quire.server.parsers.registry import TOOL_PARSERS
from quire.server.parsers.stream import CallArguments
from tests.server.parsers.test_grammar import BARE, CALLS, accepts, added_tokens

PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex's `apply_patch`."""
GOOD = '*** Begin Patch\n*** Add File: a "b".txt\n+print("a\\n")\t\n+\n*** End Patch'
WRONG = "*** Begin Patch\n*** Add File: a.txt\nprint()\n*** End Patch"
JSON_CALLS = {
    parser: re.sub(r'\{"city"[^{}]*\}', "ARGS", calls[0]).replace("weather", "edit")
    for parser, calls in CALLS.items()
}


def written(parser: str, text: str) -> str:
    """The call of `edit` with this input, as the format writes it."""
    if parser in BARE:
        call = BARE[parser].replace("=f>", "=edit>").replace("=n>", "=input>")
        call = call.replace('"f"', '"edit"').replace('"n"', '"input"')
        call = call.replace("call>f\n", "call>edit\n").replace("key>n<", "key>input<")
        call = call.replace("opensource>f<", "opensource>edit<")
        call = call.replace("key:opensource>n<", "key:opensource>input<")
        call = call.replace("<n>", "<input>").replace("</n>", "</input>")
        return call.replace("call:f{n:", "call:edit{input:") % text
    if parser == "pythonic":
        return f"[edit(input={json.dumps(text)})]"
    if parser == "lfm2":
        return f"<|tool_call_start|>[edit(input={json.dumps(text)})]<|tool_call_end|>"
    assert "ARGS" in JSON_CALLS[parser]
    return JSON_CALLS[parser].replace("ARGS", input_arguments(text))


def params_for(parser: str, choice: ToolChoice, syntax: str, definition: str) -> SamplingParams:
    tool = custom_tool("edit", "Edits files.", syntax, definition)  # type: ignore[arg-type]
    dialogue = Dialogue(
        messages=[], params=SamplingParams(), tools=[tool], tool_choice=choice, request_id="r"
    )
    format = ChatFormat(TOOL_PARSERS[parser], None, "", frozenset())
    return constrain_params(dialogue, format, added_tokens(), None)


@pytest.mark.parametrize("parser", CALLS)
def test_a_patch(parser: str) -> None:
    for choice in (ToolChoice(), ToolChoice.named("edit")):
        params = params_for(parser, choice, "lark", PATCH)
        assert accepts(params, written(parser, GOOD))
        assert not accepts(params, written(parser, WRONG))
    tools = {"edit": custom_tool("edit", None, "lark", PATCH)["function"]["parameters"]}
    reader = TOOL_PARSERS[parser](tools, enforced=True)
    parts = reader.feed(written(parser, GOOD)) + reader.finish()
    arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
    assert read(arguments) == GOOD


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "pythonic"])
def test_a_regular_expression(parser: str) -> None:
    params = params_for(parser, ToolChoice("required"), "regex", r'[a-z]+/"\d{2}"\n[^x]')
    assert accepts(params, written(parser, 'ab/"42"\n"'))
    assert not accepts(params, written(parser, 'ab/"42"\nx'))
    assert not accepts(params, written(parser, 'ab/"4"\n"'))


def read(arguments: str, seed: int | None = None) -> str:
    """The input in the arguments, which come in random pieces."""
    reader, pieces, at = InputReader(), [], 0
    chance = random.Random(seed)
    while at < len(arguments):
        size = len(arguments) if seed is None else chance.randint(1, 4)
        pieces.append(reader.feed(arguments[at : at + size]))
        at += size
    return "".join([*pieces, reader.finish()])


@pytest.mark.parametrize("text", ['a"b\\c\n\té😀\\u0041 "" \\\\', "", "\\", '"', "x" * 50])
@pytest.mark.parametrize("ascii", [False, True])
def test_the_input_in_pieces(text: str, ascii: bool) -> None:
    for seed in range(20):
        assert read(json.dumps({"input": text}, ensure_ascii=ascii), seed) == text


def test_arguments_of_models_without_a_grammar() -> None:
    assert read('{"patch": "a\\n"}') == "a\n"
    assert read('{"input": {"a": 1}}') == '{"a": 1}'
    assert read('{"a": 1, "b": 2}') == '{"a": 1, "b": 2}'
    assert read('{"input": "cut sh', 1) == "cut sh"
    assert read('{"input": "\\ud83d"}', 1) == "?"


def test_the_model_reads_the_grammar() -> None:
    function = custom_tool("edit", "Edits.", "lark", 'start: "a"')["function"]
    assert function["description"].startswith("Edits.\n\n")
    assert 'start: "a"' in function["description"]
    assert json.loads(json.dumps(function["parameters"]))["properties"] == {
        "input": {"type": "string"}
    }
    assert "description" not in custom_tool("edit", None)["function"]


def test_grammars_that_are_too_large() -> None:
    with pytest.raises(RequestError, match="bytes"):
        custom_tool("edit", None, "lark", "a" * 600_000)
    with pytest.raises(RequestError, match="more than"):
        custom_tool("edit", None, "regex", "(a{0,100}){0,100}")
