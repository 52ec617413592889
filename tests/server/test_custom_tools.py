"""Custom tools and tool search over a scripted model, in both of OpenAI's APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.schema import conforms, sse
from tests.server.scripted import MODEL, Scripted, Speaker, serve

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" /[^x]*/'}
EDIT: dict[str, Any] = {
    "type": "custom",
    "name": "edit",
    "description": "Edits.",
    "format": GRAMMAR,
}
NOTE: dict[str, Any] = {"type": "custom", "name": "note"}
SAY = '<tool_call>{"name": "%s", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
NOT_IN_THE_TYPES = ("store", "name", "status")


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with serve(Speaker()) as running:
        yield running


def speaker(server: Scripted) -> Speaker:
    assert isinstance(server.engine, Speaker)
    return server.engine


def post(server: Scripted, path: str, say: str = "Yes.", **fields: Any) -> httpx.Response:
    speaker(server).texts[:] = [say]
    body = {"model": MODEL, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=30)


def respond(server: Scripted, say: str = "Yes.", **fields: Any) -> httpx.Response:
    return post(server, "responses", say, **{"input": "Hello.", **fields})


def chat(server: Scripted, say: str = "Yes.", **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello."}]
    return post(server, "chat/completions", say, **{"messages": messages, **fields})


def test_a_response_calls_a_custom_tool(scripted: Scripted) -> None:
    answer = respond(scripted, SAY % "edit", tools=[EDIT, NOTE])
    conforms(Response, answer.json(), NOT_IN_THE_TYPES)
    (call,) = answer.json()["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "edit", 'a\n"b"')
    assert answer.json()["tools"] == [EDIT, {**NOTE, "format": {"type": "text"}}]
    assert 'start: \\"a\\"' in speaker(scripted).heard[-1]
    _, params = speaker(scripted).seen[-1]
    assert params.structured_outputs is not None  # the grammar is enforced
    assert respond(scripted, SAY % "note", tools=[NOTE]).status_code == 200
    assert speaker(scripted).seen[-1][1].structured_outputs is None


def test_events_of_a_custom_tool_call(scripted: Scripted) -> None:
    answer = respond(scripted, SAY % "edit", tools=[EDIT], stream=True)
    events = [event for _, event in sse(answer.text)]
    for event in events:
        conforms(ResponseStreamEvent, event, NOT_IN_THE_TYPES)
    kinds = [event["type"] for event in events]
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == 'a\n"b"'
    assert len(deltas) > 2
    assert kinds[-3:] == [
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-3]["input"] == 'a\n"b"'


def test_custom_tools_in_the_history(scripted: Scripted) -> None:
    first = respond(scripted, SAY % "edit", tools=[EDIT]).json()
    (call,) = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    user = {"role": "user", "content": "Hello."}
    for more in (
        {"input": [user, call, result]},
        {"input": [result], "previous_response_id": first["id"]},
        {"input": [user, {"type": "item_reference", "id": call["id"]}, result]},
    ):
        answer = respond(scripted, tools=[EDIT], **more)
        assert answer.status_code == 200, answer.text
        heard = speaker(scripted).heard[-1]
        assert '{"name": "edit", "arguments": {"input": "a\\n\\"b\\""}}' in heard
        assert "tool\ndone" in heard
    items = httpx.get(f"{scripted.url}/v1/responses/{answer.json()['id']}/input_items").json()
    assert {"custom_tool_call", "custom_tool_call_output"} <= {i["type"] for i in items["data"]}


def test_custom_tools_in_namespaces(scripted: Scripted) -> None:
    space = {"type": "namespace", "name": "files", "tools": [EDIT]}
    (call,) = respond(scripted, SAY % "files__edit", tools=[space]).json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "files", "edit")


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "custom", "name": "edit"}, True),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "custom", "name": "edit"}]}, True),
        ({"type": "custom", "name": "other"}, False),
    ],
)  # fmt: skip
def test_a_chosen_custom_tool(scripted: Scripted, choice: Any, chosen: bool) -> None:
    answer = respond(scripted, SAY % "edit", tools=[EDIT, NOTE], tool_choice=choice)
    assert answer.status_code == (200 if chosen else 400)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**EDIT, "format": {**GRAMMAR, "definition": "a" * 70_000}}, "tools[0].format.definition"),
        ({**EDIT, "format": {**GRAMMAR, "syntax": "regex", "definition": "(a{0,99}){0,99}"}},
         "tools[0].format.definition"),
        ({**EDIT, "format": {"type": "grammar", "syntax": "lark"}}, "tools[0].format.definition"),
        ({**EDIT, "format": {"type": "text", "syntax": "lark"}}, "tools[0].format.syntax"),
        ({**EDIT, "format": {**GRAMMAR, "syntax": "gbnf"}}, "tools[0].format.syntax"),
        ({**EDIT, "name": "a b"}, "tools[0].name"),
        ({**EDIT, "parameters": {}}, "tools[0].parameters"),
        ({**EDIT, "format": {**GRAMMAR, "definition": 'start: "a" <|im_end|>'}}, "tools"),
        ({"type": "nonsense"}, "tools[0]"),
    ],
)  # fmt: skip
def test_refused_custom_tools(scripted: Scripted, tool: Any, param: str) -> None:
    answer = respond(scripted, tools=[tool])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_chat_calls_a_custom_tool(scripted: Scripted) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a[^x]*"}}
    tool = {"type": "custom", "custom": {"name": "edit", "format": grammar}}
    client = scripted.openai()
    speaker(scripted).texts[:] = [SAY % "edit"]
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]}
    answer = client.chat.completions.create(tools=[tool], **ask)  # type: ignore[list-item]
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("edit", 'a\n"b"')
    assert answer.choices[0].finish_reason == "tool_calls"
    ask["messages"] += [
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    choice = {"type": "custom", "custom": {"name": "edit"}}
    for chosen in ("auto", choice):
        speaker(scripted).texts[:] = [SAY % "edit"]
        chunks = client.chat.completions.create(
            tools=[tool], tool_choice=chosen, stream=True, **ask
        )
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert (deltas[0].type, deltas[0].custom["name"]) == ("custom", "edit")
        assert "".join(delta.custom["input"] for delta in deltas) == 'a\n"b"'
        assert all(delta.function is None for delta in deltas)
    assert '"arguments": {"input": "a\\n\\"b\\""}' in speaker(scripted).heard[-1]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom"},
        {"type": "custom", "custom": {"name": "a"}, "function": {"name": "a"}},
        {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}},
        {"type": "function", "custom": {"name": "a"}},
        {"type": "other", "other": {}},
    ],
)
def test_refused_custom_tools_of_chats(scripted: Scripted, tool: Any) -> None:
    assert chat(scripted, tools=[tool]).status_code == 400


# -- tool search -------------------------------------------------------------------------------


SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
CLOCK = {
    "type": "namespace",
    "name": "clock",
    "tools": [{"type": "function", "name": "now", "parameters": {"type": "object"}}],
}


def test_tool_search(scripted: Scripted) -> None:
    say = '<tool_call>{"name": "tool_search", "arguments": {"query": "time"}}</tool_call>'
    fields: dict[str, Any] = {"tools": [SEARCH]}
    answer = respond(scripted, say, **fields)
    (call,) = answer.json()["output"]
    assert (call["type"], call["execution"]) == ("tool_search_call", "client")
    assert call["arguments"] == {"query": "time"}
    conforms(Response, answer.json(), NOT_IN_THE_TYPES)
    before = speaker(scripted).heard[-1].removesuffix("<|im_start|>assistant\n")
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "execution": "client",
        "status": "completed",
        "tools": [CLOCK],
    }
    fields["input"] = [{"role": "user", "content": "Hello."}, call, found]
    now = '<tool_call>{"name": "clock__now", "arguments": {}}</tool_call>'
    answer = respond(scripted, now, **fields)
    (call,) = answer.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "clock", "now")
    heard = speaker(scripted).heard[-1]
    assert heard.startswith(before)  # found tools do not change the beginning of the prompt
    assert '"name":"clock__now"' in heard
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    fields["input"] += [call, result]
    assert respond(scripted, **fields).status_code == 200


def test_events_of_a_tool_search(scripted: Scripted) -> None:
    say = '<tool_call>{"name": "tool_search", "arguments": {"query": "time"}}</tool_call>'
    answer = respond(scripted, say, tools=[SEARCH], stream=True)
    events = [event for _, event in sse(answer.text)]
    assert [event["type"] for event in events[2:]] == [
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[3]["item"]["arguments"] == {"query": "time"}


def test_searches_of_the_server_are_hints(scripted: Scripted) -> None:
    answer = respond(scripted, tools=[{"type": "tool_search"}, NOTE])
    assert answer.headers["quire-ignored"] == "tools.tool_search"
    choice = {"type": "custom", "name": "tool_search"}
    assert respond(scripted, tools=[{"type": "tool_search"}], tool_choice=choice).status_code == 400


# -- reasoning of clients that keep their own history ---------------------------------------------


THINKS = "{%- for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>\n\
{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def thinking() -> Iterator[Scripted]:
    engine = Speaker()
    engine.tokenizer.use_template(THINKS)
    with serve(engine) as running:
        yield running


def test_reasoning_survives_stateless_turns(thinking: Scripted) -> None:
    include = ["reasoning.encrypted_content"]
    say = "<think>\nHm, é.\n</think>\n\nYes."
    fields: dict[str, Any] = {"include": include, "store": False}
    first = respond(thinking, say, **fields).json()
    reasoning, message = first["output"]
    conforms(Response, first, NOT_IN_THE_TYPES)
    sealed = reasoning["encrypted_content"]
    user = {"role": "user", "content": "Hello."}
    bare = {"type": "reasoning", "id": reasoning["id"], "summary": [], "encrypted_content": sealed}
    for item in (bare, {**bare, "content": None}, reasoning):
        answer = respond(thinking, say, input=[user, item, message, user], **fields)
        assert answer.status_code == 200, answer.text
        assert "<think>\nHm, é.\n</think>" in speaker(thinking).heard[-1]
    tampered = {**bare, "encrypted_content": sealed[:-6] + "AAAA=="}
    answer = respond(thinking, say, input=[user, tampered, message, user])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_encrypted_content"
    assert answer.json()["error"]["param"] == "input[1].encrypted_content"
    foreign = {**bare, "encrypted_content": "gAAAAABn"}
    answer = respond(thinking, say, input=[user, foreign, message, user])
    assert answer.headers["quire-ignored"] == "input.encrypted_content"
    assert "encrypted_content" not in respond(thinking, say).json()["output"][0]
    with serve(Speaker()) as other:  # another process, without a common key
        assert respond(other, input=[user, bare, message, user]).status_code == 200


def test_omitted_thinking_is_in_the_signature(thinking: Scripted) -> None:
    def ask(messages: list[Any], say: str) -> httpx.Response:
        speaker(thinking).texts[:] = [say]
        body = {
            "model": MODEL,
            "max_tokens": 100,
            "messages": messages,
            "thinking": {"type": "adaptive", "display": "omitted"},
        }
        return httpx.post(f"{thinking.url}/v1/messages", json=body, timeout=30)

    user = {"role": "user", "content": "Hello."}
    content = ask([user], "<think>\nHm.\n</think>\n\nYes.").json()["content"]
    assert content[0]["thinking"] == ""
    assert ask([user, {"role": "assistant", "content": content}, user], "a").status_code == 200
    assert "<think>\nHm.\n</think>" in speaker(thinking).heard[-1]
    sealed = content[0]["signature"]
    content[0]["signature"] = f"{sealed[:12]}{'AB'[sealed[12] == 'A']}{sealed[13:]}"
    refused = ask([user, {"role": "assistant", "content": content}, user], "a")
    assert refused.status_code == 400
    assert "signature" in refused.json()["error"]["message"]
    content[0]["signature"] = "another server's"
    assert ask([user, {"role": "assistant", "content": content}, user], "a").status_code == 200


def test_compaction(scripted: Scripted) -> None:
    first = respond(scripted, SAY % "edit", tools=[EDIT]).json()
    (call,) = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    fields: dict[str, Any] = {"input": [result], "previous_response_id": first["id"]}
    speaker(scripted).texts[:] = [SAY % "edit", "We edited."]  # first no summary, then one
    compact = f"{scripted.url}/v1/responses/compact"
    answer = httpx.post(compact, json={"model": MODEL, "tools": [EDIT], **fields}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "response.compaction"
    user, summary = answer.json()["output"]
    assert (user["role"], user["content"][0]["text"]) == ("user", "Hello.")
    assert summary["type"] == "compaction"
    assert answer.json()["usage"]["output_tokens"] > 0
    more = {"role": "user", "content": "Go on."}
    answer = respond(scripted, input=[user, summary, more])
    assert answer.status_code == 200, answer.text
    assert "summarized:\n\nWe edited." in speaker(scripted).heard[-1]
    sealed = summary["encrypted_content"]
    summary["encrypted_content"] = f"{sealed[:12]}{'AB'[sealed[12] == 'A']}{sealed[13:]}"
    refused = respond(scripted, input=[user, summary, more])
    assert refused.json()["error"]["param"] == "input[1].encrypted_content"


def test_sealed_reasoning_in_events(thinking: Scripted) -> None:
    client: openai.OpenAI = thinking.openai()
    speaker(thinking).texts[:] = ["<think>\nHm.\n</think>\n\nYes."]
    stream = client.responses.create(
        model=MODEL, input="Hello.", include=["reasoning.encrypted_content"], stream=True
    )
    done = [event.item for event in stream if event.type == "response.output_item.done"]
    assert done[0].type == "reasoning"
    assert done[0].encrypted_content
    assert json.loads(done[0].model_dump_json())["content"][0]["text"].strip() == "Hm."
