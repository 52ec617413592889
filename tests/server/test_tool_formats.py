"""Tool calls and reasoning in the formats of several models, from the template to the client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.parsers.test_grammar import (
    kimi_k3,
    kimi_k3_argument,
    minicpm5,
    minimax_m3,
    minimax_m3_argument,
)
from tests.server.parsers.test_registry import WRITTEN, template_of
from tests.server.scripted import MODEL, Speaker, serve

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": "7", "days": 3}
JSON = json.dumps(ARGUMENTS)


def _tagged(calls: Any, argument: Any, *kinds: str) -> str:
    string, number = (kinds[:1], kinds[1:])
    inner = argument("city", "7", *string) + argument("days", "3", *number)
    return str(calls(("weather", inner), ("now", "")))


FORMATS: dict[str, tuple[str, str]] = {
    # text that a template has for reasoning, and an answer with reasoning, text and two calls
    "minicpm5": (
        "<think></think>",
        "<think>Hm.</think>\n\nI look.\n"
        + _tagged(minicpm5, lambda key, value: f'<param name="{key}">{value}</param>'),
    ),
    "minimax_m3": (
        "<mm:think></mm:think>",
        "<mm:think>Hm.</mm:think>I look." + _tagged(minimax_m3, minimax_m3_argument),
    ),
    "kimi_k3": (
        "<|end_of_msg|>",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>I look."
        "<|close|>response<|sep|>"
        + _tagged(kimi_k3, kimi_k3_argument, "string", "number")
        + "<|close|>message<|sep|>",
    ),
    "apriel": (
        "[BEGIN FINAL RESPONSE]",
        "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nI look.\n<tool_calls>"
        f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
        "</tool_calls>\n[END FINAL RESPONSE]",
    ),
    "solar": (
        "<|begin|>assistant<|think|>",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>I look.<|end|><|begin|>assistant"
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather"
        f"<|tool_call:args|>{JSON}<|tool_call:end|><|tool_call:begin|>a1b2c3d4e6"
        "<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    ),
    "functionary_v32": ("", f"all\nI look.>>>weather\n{JSON}>>>now\n{{}}"),
}


def _speaker(template: str) -> Speaker:
    engine = Speaker()
    engine.tokenizer.use_template(template)
    return engine


@pytest.mark.parametrize("name", FORMATS)
def test_reasoning_text_and_calls(name: str) -> None:
    hint, said = FORMATS[name]
    engine = _speaker(template_of(WRITTEN[name]) + f"{{# {hint} #}}")
    engine.say(said, said)
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with serve(engine) as running:
        ask: Any = running.openai().chat.completions.create
        answer = ask(model=MODEL, messages=messages, tools=TOOLS).choices[0]
        deltas = [
            chunk.choices[0].delta
            for chunk in ask(model=MODEL, messages=messages, tools=TOOLS, stream=True)
            if chunk.choices
        ]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "I look."
    assert answer.message.model_extra.get("reasoning_content") == ("Hm." if hint else None)
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert [(called, json.loads(text)) for called, text in calls] == [
        ("weather", ARGUMENTS), ("now", {})
    ]  # fmt: skip
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    streamed = ["", ""]
    for delta in deltas:
        for call in delta.tool_calls or ():
            streamed[call.index] += call.function.arguments or ""
    assert streamed == [text for _, text in calls]


SHOWS_NO_CALLS = {
    "lfm2": (
        "{% set ns = namespace(system_prompt='') %}"
        "{% if tools %}{% set ns.system_prompt = 'List of tools: [' + tools | tojson + ']' %}"
        "{% endif %}{{ ns.system_prompt }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        "I look.<|tool_call_start|>[weather(city='7', days=3)]<|tool_call_end|>",
    ),
    "granite": (
        "{% if tools %}respond only with <|tool_call|> followed by a JSON list {{ tools }}"
        "{% endif %}"
        "{% for m in messages %}<|start_of_role|>{{ m.role }} {{ m.content }}\n{% endfor %}",
        f'I look.<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]',
    ),
}


@pytest.mark.parametrize("name", SHOWS_NO_CALLS)
def test_a_template_that_shows_no_calls(name: str) -> None:
    template, shown = SHOWS_NO_CALLS[name]
    engine = _speaker(template)
    engine.say(shown, "Rain.")
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with serve(engine) as running:
        ask: Any = running.openai().chat.completions.create
        message = ask(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
        messages.append(message.model_dump(exclude_none=True))
        call = message.tool_calls[0].id
        messages.append({"role": "tool", "tool_call_id": call, "content": "rain"})
        ask(model=MODEL, messages=messages, tools=TOOLS)
    assert shown in engine.heard[1]


def test_an_unknown_template_that_shows_no_calls_is_refused() -> None:
    engine = _speaker("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve(engine) as running, pytest.raises(openai.BadRequestError, match="is not known"):
        running.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Weather?"}], tools=TOOLS
        )
