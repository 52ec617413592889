"""Tools and thinking through the official clients of both APIs, with an engine of scripted
answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.scripted import MODEL, Scripted, Speaker, serve

CALL = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'
BOTH = f'I will look.\n{CALL}\n<tool_call>{{"name": "stop", "arguments": {{}}}}</tool_call>'
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
STOP: dict[str, Any] = {"type": "object", "properties": {}}
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "name": "look", "description": "Looks.", "parameters": LOOK},
    {"type": "function", "name": "stop", "parameters": STOP, "strict": False},
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": "look", "description": "Looks.", "input_schema": LOOK},
    {"name": "stop", "input_schema": STOP, "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with serve(Speaker()) as running:
        yield running


@pytest.fixture
def engine(scripted: Scripted) -> Speaker:
    assert isinstance(scripted.engine, Speaker)
    scripted.engine.texts.clear()
    scripted.engine.aborted.clear()
    scripted.engine.seen.clear()
    scripted.engine.heard.clear()
    return scripted.engine


@pytest.fixture
def gpt(scripted: Scripted) -> openai.OpenAI:
    return scripted.openai()


@pytest.fixture
def anthropic_client(scripted: Scripted) -> anthropic.Anthropic:
    return scripted.anthropic()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "Weather?", **options})


def tell(client: anthropic.Anthropic, **options: Any) -> Any:
    messages = [{"role": "user", "content": "Weather?"}]
    return client.messages.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 400, **options}
    )


def test_responses_with_calls(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say(BOTH)
    response = ask(gpt, tools=OPENAI_TOOLS)
    assert response.status == "completed"
    assert [item.type for item in response.output] == [
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text.strip() == "I will look."
    look, stop = response.output[1:]
    assert (look.name, json.loads(look.arguments)) == ("look", {"city": "Oslo"})
    assert (stop.name, json.loads(stop.arguments)) == ("stop", {})
    assert look.call_id != stop.call_id
    assert [tool.name for tool in response.tools] == ["look", "stop"]
    assert '"look"' in engine.heard[0]
    engine.say("Fine.")
    answered = ask(
        gpt,
        tools=OPENAI_TOOLS,
        previous_response_id=response.id,
        input=[
            {"type": "function_call_output", "call_id": look.call_id, "output": "Snow."},
            {
                "type": "function_call_output",
                "call_id": stop.call_id,
                "output": [{"type": "input_text", "text": "Done."}],
            },
        ],
    )
    assert answered.output_text == "Fine."
    heard = engine.heard[1]
    assert f"{CALL}<tool_call>" in heard
    assert "<|im_start|>tool\nSnow.<|im_end|>\n<|im_start|>tool\nDone.<|im_end|>" in heard


def test_output_is_input_as_it_is(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say(f"<think>Hm.</think>I will look. {CALL}", "Fine.")
    turns: list[Any] = [{"role": "user", "content": "Weather?"}]
    response = ask(gpt, tools=OPENAI_TOOLS, input=turns, store=False)
    turns += response.output
    call_id = response.output[-1].call_id
    turns.append({"type": "function_call_output", "call_id": call_id, "output": "Snow."})
    assert ask(gpt, tools=OPENAI_TOOLS, input=turns, store=False).output_text == "Fine."
    assert f"<think>Hm.</think>I will look. {CALL}".replace(" <", "<") in engine.heard[1]


def test_responses_stream_of_calls(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say(BOTH)
    with gpt.responses.stream(model=MODEL, input="Weather?", tools=OPENAI_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    assert [json.loads(text) for text in deltas.values()] == [{"city": "Oslo"}, {}]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == list(deltas.values())


def test_responses_without_an_answer_to_a_call(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say(CALL)
    response = ask(gpt, tools=OPENAI_TOOLS)
    with pytest.raises(openai.BadRequestError, match=response.output[-1].call_id):
        ask(gpt, tools=OPENAI_TOOLS, previous_response_id=response.id, input="Go on.")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", []),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]},
         ["stop"]),
        ("auto", ["look", "stop"]),
    ],
)  # fmt: skip
def test_responses_tool_choice(
    gpt: openai.OpenAI, engine: Speaker, choice: Any, shown: list[str]
) -> None:
    engine.say("Hm.")
    response = ask(gpt, tools=OPENAI_TOOLS, tool_choice=choice)
    assert [name for name in ("look", "stop") if f'"{name}"' in engine.heard[0]] == shown
    assert response.output_text == "Hm."


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
        ({"tools": [OPENAI_TOOLS[0], OPENAI_TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{**OPENAI_TOOLS[0], "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{**OPENAI_TOOLS[0], "name": "a b"}]}, "tools[0].name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_responses_errors(gpt: openai.OpenAI, engine: Speaker, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(gpt, **{"tools": OPENAI_TOOLS, **options})
    assert error.value.param == param
    assert "function" not in str(error.value).replace("functions", "")
    assert engine.seen == []


def test_responses_reasoning(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say("<think>Let me see.</think>It snows.")
    events = list(ask(gpt, stream=True))
    thought = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    response = events[-1].response
    assert "".join(thought) == "Let me see."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Let me see."
    assert response.output_text == "It snows."
    reasoning = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < reasoning < response.usage.output_tokens
    engine.say("Yes.", "Yes.")
    ask(gpt, previous_response_id=response.id, input="Sure?")
    items = [{"role": "user", "content": "Weather?"}]
    items += [item.model_dump() for item in response.output]
    ask(gpt, input=[*items, {"role": "user", "content": "Sure?"}])
    assert engine.heard[1] == engine.heard[2]
    assert "assistant\n<think>Let me see.</think>It snows.<|im_end|>" in engine.heard[1]


LOOKED = ("look", {"city": "Oslo"})
INSIDE: list[tuple[str, str, str, list[Any]]] = [
    (f"<think>Let me see.\n{CALL}", "Let me see.", "", [LOOKED]),
    (f"<think>{BOTH}\n", "I will look.", "", [LOOKED, ("stop", {})]),
    (f"<think>{CALL}", "", "", [LOOKED]),
    # Drafts, and text that names the mark.
    (f"<think>{CALL}?</think>It snows.", f"{CALL}?", "It snows.", []),
    (f"<think>{CALL} or so, then {CALL}", f"{CALL} or so, then", "", [LOOKED]),
    (f"<think>{CALL} or so.", f"{CALL} or so.", "", []),
    (f"<think>So a <tool_call>, then\n{CALL}", "So a <tool_call>, then", "", [LOOKED]),
    ("<think>What is <tool_call> for", "What is <tool_call> for", "", []),
    ("<think>a <tool_", "a <tool_", "", []),
    ("<thi", "", "<thi", []),
]


@pytest.mark.parametrize(("said", "thought", "text", "calls"), INSIDE, ids=range(len(INSIDE)))
def test_calls_inside_reasoning(
    gpt: openai.OpenAI, engine: Speaker, said: str, thought: str, text: str, calls: list[Any]
) -> None:
    def read(output: Any) -> tuple[str, str, list[Any]]:
        parts = {"reasoning": "", "message": ""}
        found = []
        for item in output:
            if item.type == "function_call":
                found.append((item.name, json.loads(item.arguments)))
            else:
                parts[item.type] += item.content[0].text
        return parts["reasoning"], parts["message"], found

    engine.say(said, said)
    assert read(ask(gpt, tools=OPENAI_TOOLS).output) == (thought, text, calls)
    events = list(ask(gpt, tools=OPENAI_TOOLS, stream=True))
    assert read(events[-1].response.output) == (thought, text, calls)


def test_ids_that_name_tools(gpt: openai.OpenAI, engine: Speaker) -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{% for m in messages %}"
        "{{ m.role }} {{ m.tool_call_id }} {{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.id }}>{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    )
    before = engine.tokenizer.chat_templates["default"]
    engine.tokenizer.use_template(template)
    try:
        engine.say("Yes.")
        messages: list[Any] = [{"role": "user", "content": "Hello."}]
        for place, name in enumerate(("look", "stop")):
            function = {"name": name, "arguments": "{}"}
            call = {"id": f"call_{place}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{place}", "content": "done"},
            ]
        tools = [{"type": "function", "function": {"name": "look"}}]
        gpt.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    finally:
        engine.tokenizer.use_template(before)
    heard = engine.heard[0]
    assert "<functions.look:0>{}tool functions.look:0 done" in heard
    assert "<functions.stop:1>{}tool functions.stop:1 done" in heard
    assert "call_" not in heard


def test_a_call_inside_reasoning_that_is_cut(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say(f"<think>Let me see. {CALL} and on and on")
    most = len(engine.tokenizer.encode(f"<think>See. {CALL}"))
    response = ask(gpt, tools=OPENAI_TOOLS, max_output_tokens=most)
    assert response.status == "incomplete"
    assert [item.type for item in response.output] == ["reasoning"]


def test_responses_without_reasoning(gpt: openai.OpenAI, engine: Speaker) -> None:
    engine.say("It snows.")
    response = ask(gpt, reasoning={"effort": "none"})
    assert response.output_text == "It snows."
    assert response.reasoning.effort == "none"
    assert engine.heard[0].endswith("assistant\n<think>\n\n</think>\n\n")


def test_responses_parse(gpt: openai.OpenAI, engine: Speaker) -> None:
    class City(BaseModel):
        name: str

    engine.say('{"name": "Oslo"}')
    parsed = gpt.responses.parse(model=MODEL, input="Where?", text_format=City)
    assert parsed.output_parsed == City(name="Oslo")
    structured = engine.seen[0][1].structured_outputs
    assert structured is not None
    assert parsed.text.format.type == "json_schema"  # type: ignore[union-attr]


def test_messages_with_calls(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    engine.say(BOTH)
    message = tell(anthropic_client, tools=ANTHROPIC_TOOLS)
    assert message.stop_reason == "tool_use"
    text, look, stop = message.content
    assert text.text.strip() == "I will look."
    assert (look.type, look.name, look.input) == ("tool_use", "look", {"city": "Oslo"})
    assert (stop.name, stop.input) == ("stop", {})
    engine.say("Fine.")
    answered = tell(
        anthropic_client,
        tools=ANTHROPIC_TOOLS,
        messages=[
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": message.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": look.id, "content": "Snow."},
                    {"type": "tool_result", "tool_use_id": stop.id, "content": [
                        {"type": "text", "text": "Late."}], "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    )  # fmt: skip
    assert answered.content[0].text == "Fine."
    heard = engine.heard[1]
    assert CALL in heard
    assert (
        "<|im_start|>tool\nSnow.<|im_end|>\n<|im_start|>tool\nError: Late.<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>"
    ) in heard


def test_messages_stream_of_calls(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    engine.say(BOTH)
    with anthropic_client.messages.stream(
        model=MODEL,
        max_tokens=400,
        tools=ANTHROPIC_TOOLS,
        messages=[{"role": "user", "content": "Weather?"}],
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in kinds
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == {"city": "Oslo"}  # type: ignore[union-attr]
    assert final.content[2].input == {}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("choice", "shown"), [({"type": "none"}, []), ({"type": "auto"}, ["look", "stop"])]
)
def test_messages_tool_choice(
    anthropic_client: anthropic.Anthropic, engine: Speaker, choice: Any, shown: list[str]
) -> None:
    engine.say("Hm.")
    tell(anthropic_client, tools=ANTHROPIC_TOOLS, tool_choice=choice)
    assert [name for name in ("look", "stop") if f'"{name}"' in engine.heard[0]] == shown


def test_messages_one_call_at_most(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    engine.say(BOTH)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = tell(anthropic_client, tools=ANTHROPIC_TOOLS, tool_choice=choice)
    assert [block.name for block in message.content if block.type == "tool_use"] == ["look"]


def test_messages_call_cut_off(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    engine.say('<tool_call>{"name": "look", "arguments": {"city": "Oslo and all of its suburbs')
    message = tell(anthropic_client, tools=ANTHROPIC_TOOLS, max_tokens=30)
    assert message.stop_reason == "max_tokens"
    (call,) = message.content
    assert call.input["city"].startswith("Oslo")


def test_messages_thinking(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    engine.say("<think>Let me see.</think>It snows.", "<think>Let me see.</think>It snows.")
    with anthropic_client.messages.stream(
        model=MODEL,
        max_tokens=400,
        thinking={"type": "adaptive"},
        messages=[{"role": "user", "content": "Weather?"}],
    ) as stream:
        thought = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert thought == "Let me see."
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == thought  # type: ignore[union-attr]
    assert final.content[0].signature  # type: ignore[union-attr]
    assert final.usage.output_tokens_details.thinking_tokens > 0  # type: ignore[union-attr]
    hidden = tell(anthropic_client, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == ""
    engine.say("Yes.")
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": "Sure?"},
    ]
    tell(anthropic_client, messages=turns)
    assert "assistant\n<think>Let me see.</think>It snows.<|im_end|>" in engine.heard[2]


def test_messages_thinking_turned_off(
    anthropic_client: anthropic.Anthropic, engine: Speaker
) -> None:
    engine.say("It snows.")
    message = tell(anthropic_client, thinking={"type": "disabled"})
    assert [block.type for block in message.content] == ["text"]
    assert engine.heard[0].endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_thinking_ends_with_its_budget(
    anthropic_client: anthropic.Anthropic, engine: Speaker, stream: bool
) -> None:
    engine.say("<think>" + "on and " * 1100 + "on</think>Never said.", "It snows.")
    options: dict[str, Any] = {
        "max_tokens": 1900,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    if stream:
        with anthropic_client.messages.stream(
            model=MODEL, messages=[{"role": "user", "content": "Weather?"}], **options
        ) as events:
            message: Any = events.get_final_message()
    else:
        message = tell(anthropic_client, **options)
    thought, text = message.content
    assert text.text == "It snows."
    assert thought.thinking.startswith("on and on")
    assert engine.heard[1].startswith(engine.heard[0] + "<think>on and")
    assert engine.heard[1].endswith("\n</think>\n\n")
    spent = message.usage.output_tokens_details.thinking_tokens
    assert 1024 <= spent < message.usage.output_tokens < 1900
    assert engine.seen[1][1].max_tokens < 1900 - 1024
    counted = anthropic_client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "Weather?"}]
    )
    assert message.usage.input_tokens == counted.input_tokens
    assert engine.aborted == [f"{message.id}-0"]


def test_thinking_that_was_cut_counts_its_prompt_once(
    anthropic_client: anthropic.Anthropic, engine: Speaker
) -> None:
    engine.say("<think>" + "on and " * 1100 + "on</think>Never said.", "It snows.")
    answer = anthropic_client.messages.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather?"}],
        max_tokens=1900,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_headers={"x-quire-report-usage": "1"},
    )
    usage = answer.parse().usage
    assert len(engine.seen) == 2
    assert int(answer.headers["x-quire-usage"]) == usage.input_tokens + usage.output_tokens


def test_messages_thinking_within_its_budget(
    anthropic_client: anthropic.Anthropic, engine: Speaker
) -> None:
    engine.say("<think>Let me see.</think>It snows." + " Yes." * 1100)
    message = tell(
        anthropic_client, max_tokens=1900, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert len(engine.seen) == 1
    assert message.usage.output_tokens > 1024


@pytest.mark.parametrize(
    ("template", "on", "why"),
    [
        ("{{ messages[-1].content }}", True, None),
        ("{{ messages[-1].content }}", False, None),
        ("{{ messages[-1].content }}<think></think>", True, None),
        ("{{ messages[-1].content }}<think></think>", False, "no switch"),
        ("{{ messages[-1].content }}{{ thinking }}<think></think>", False, None),
    ],
)
def test_thinking_is_up_to_the_template(template: str, on: bool, why: str | None) -> None:
    engine = Speaker()
    engine.tokenizer.use_template(template)
    engine.say("Yes.", "Yes.", "Yes.")
    with serve(engine) as running:
        calls: list[Any] = [
            lambda: tell(running.anthropic(), thinking={"type": "adaptive" if on else "disabled"})
        ]
        if not on:
            calls.append(lambda: ask(running.openai(), reasoning={"effort": "none"}))
            ask_chat: Any = running.openai().chat.completions.create
            hello = [{"role": "user", "content": "Weather?"}]
            calls.append(lambda: ask_chat(model=MODEL, messages=hello, reasoning_effort="none"))
        for call in calls:
            if why is None:
                assert call().id
                assert "{{ thinking }}" not in template or str(on) in engine.heard[-1]
            else:
                refused = (anthropic.BadRequestError, openai.BadRequestError)
                with pytest.raises(refused, match=why):
                    call()


def test_messages_parse(anthropic_client: anthropic.Anthropic, engine: Speaker) -> None:
    class City(BaseModel):
        name: str

    engine.say('{"name": "Oslo"}')
    parsed = anthropic_client.messages.parse(
        model=MODEL,
        max_tokens=100,
        messages=[{"role": "user", "content": "Where?"}],
        output_format=City,
    )
    assert parsed.parsed_output == City(name="Oslo")
    assert engine.seen[0][1].structured_outputs is not None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice"),
        ({"tools": [ANTHROPIC_TOOLS[0], ANTHROPIC_TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ],
)
def test_messages_errors(
    anthropic_client: anthropic.Anthropic, engine: Speaker, options: Any, param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        tell(anthropic_client, **{"tools": ANTHROPIC_TOOLS, **options})
    assert param in str(error.value)
    assert engine.seen == []
