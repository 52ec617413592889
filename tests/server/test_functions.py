"""`functions` and `function_call` through the `openai` client, with an engine of scripted
answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.scripted import MODEL, Scripted, Speaker, scripted_engine, serve

WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


def ask(server: Scripted, **options: Any) -> Any:
    arguments = {"model": MODEL, "messages": ASK, "functions": [WEATHER], **options}
    return server.openai().chat.completions.create(**arguments)


def test_calls_whole_and_streamed() -> None:
    words = [OSLO[at : at + 3] for at in range(0, len(OSLO), 3)]
    with serve(scripted_engine(*words)) as server:
        choice = ask(server).choices[0]
        chunks = [chunk.choices[0] for chunk in ask(server, stream=True)]
    assert choice.finish_reason == "function_call"
    assert choice.message.content is None
    assert choice.message.tool_calls is None
    call = choice.message.function_call
    assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [delta.name for delta in deltas if delta.name] == ["weather"]
    assert "".join(delta.arguments or "" for delta in deltas) == call.arguments
    assert all(chunk.delta.tool_calls is None for chunk in chunks)
    assert chunks[-1].finish_reason == "function_call"


def test_a_conversation_with_results() -> None:
    engine = Speaker()
    engine.say("It rains.")
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        },
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    with serve(engine) as server:
        choice = ask(server, messages=messages).choices[0]
    assert choice.message.content == "It rains."
    (heard,) = engine.heard
    assert '"name": "weather"' in heard
    assert "tool\nrain" in heard


def test_choices() -> None:
    engine = scripted_engine("Hello")
    with serve(engine) as server:
        plain = ask(server, function_call="none").choices[0]
        assert plain.message.function_call is None
        assert engine.seen[-1][1].structured_outputs is None
        ask(server, function_call={"name": "weather"})
        assert engine.seen[-1][1].structured_outputs is not None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [WEATHER, WEATHER]}, "functions[1].name"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"function_call": {"name": "other"}}, "function_call"),
        ({"functions": [], "function_call": {"name": "weather"}}, "function_call"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].name"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call.arguments",
        ),
    ],
)
def test_errors(options: dict[str, Any], param: str) -> None:
    with serve(scripted_engine("x")) as server, pytest.raises(openai.BadRequestError) as error:
        ask(server, **options)
    assert error.value.param == param
