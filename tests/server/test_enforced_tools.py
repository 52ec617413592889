"""Calls forced by grammars, because the embedded model is too small to write them by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.server_process import MODEL, Server

CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": CITY,
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    arguments = {
        "model": MODEL,
        "messages": ASK,
        "tools": [WEATHER, NOW],
        "temperature": 0,
        "max_tokens": 200,
        **options,
    }
    return client.chat.completions.create(**arguments)


def check(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert set(arguments) == {"city", "days"}
            assert arguments["city"] in CITY["enum"]
            assert 1 <= arguments["days"] <= 9
        else:
            assert arguments == {}


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1
    check(choice.message.tool_calls, {"weather"})


def test_some_tool_is_called(client: openai.OpenAI) -> None:
    for seed in range(3):
        options = {"temperature": 1.5, "seed": seed, "parallel_tool_calls": False}
        message = ask(client, tool_choice="required", **options).choices[0].message
        assert len(message.tool_calls) == 1
        check(message.tool_calls, {"weather", "now"})


def test_streamed_calls_are_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice=NAMED).choices[0].message.tool_calls[0].function
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=NAMED, temperature=0, max_tokens=200
    ) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    call = final.message.tool_calls[0].function
    assert (call.name, call.arguments) == (whole.name, whole.arguments)
    assert len(deltas) > 3
    assert final.finish_reason == "tool_calls"


def test_n_choices_call_each(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice=NAMED, n=3, temperature=1.2, seed=1)
    assert len(answer.choices) == 3
    for choice in answer.choices:
        check(choice.message.tool_calls, {"weather"})
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_calls_cut_short(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice=NAMED, max_tokens=14).choices[0]
    assert choice.finish_reason == "length"


def test_custom_tools(client: openai.OpenAI) -> None:
    def tool(definition: str) -> dict[str, Any]:
        grammar = {"syntax": "lark", "definition": definition}
        format = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": {"name": "edit", "format": format}}

    lines = 'start: line line? "\\"end\\""\nline: "+" /[^\\n]{1,3}/ "\\n"'
    choice = {"type": "custom", "custom": {"name": "edit"}}
    options = {"temperature": 1.5, "seed": 1, "max_tokens": 400}
    answer = ask(client, tools=[tool(lines)], tool_choice=choice, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.type, call.custom.name, answer.finish_reason) == ("custom", "edit", "tool_calls")
    assert re.fullmatch(r'(\+[^\n]{1,3}\n){1,2}"end"', call.custom.input)
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, tools=[tool("start: (")])


def test_strict_tools_in_auto_mode(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    choice = ask(client, tools=[tool], max_tokens=20).choices[0]
    assert choice.message.content or choice.message.tool_calls
    broken = {**tool["function"]["parameters"], "if": {}}
    refused = {"type": "function", "function": {**tool["function"], "parameters": broken}}
    with pytest.raises(openai.BadRequestError, match="'if' cannot be enforced"):
        ask(client, tools=[refused])


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools }}<|im_start|>assistant\n<think>\n{# </think> TEACHES #}"
)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("llama3_json", "mistral", "pythonic", "qwen3_xml")
]


@pytest.mark.parametrize("parser", ["hermes", *SLOW])
def test_every_format_after_reasoning(
    launch: Callable[..., Server], tmp_path: Path, parser: str
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(TEMPLATE)
    server = launch("--chat-template", str(template), "--tool-call-parser", parser)
    client = server.client()
    bias = {"6141": 100}  # the end of reasoning, which the model would never write by itself
    for choice in (NAMED, "required"):
        answer = ask(
            client,
            tool_choice=choice,
            logit_bias=bias,
            max_tokens=400,
            parallel_tool_calls=False,
            temperature=1,
            seed=1,
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        check(message.tool_calls, {"weather"} if choice == NAMED else {"weather", "now"})
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0
