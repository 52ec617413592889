"""`/v1/messages` through the `anthropic` client, against a real server process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

from tests.server.schema import conforms, sse
from tests.server.server_process import MODEL, Server

HELLO: list[Any] = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture
def anthropic_client(server: Server) -> anthropic.Anthropic:
    return connect(server)


def connect(server: Server, **options: Any) -> anthropic.Anthropic:
    options.setdefault("api_key", "none")
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=60, **options)


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    arguments = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "extra_body": extra, **options}
    return client.messages.create(**arguments)


def post(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=60)


def test_create(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    message = ask(anthropic_client)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    (block,) = message.content
    assert block.type == "text"
    assert block.text
    assert message.stop_reason == "max_tokens"
    assert message.stop_sequence is None
    assert message.usage.output_tokens == 8
    assert message.usage.service_tier == "standard"
    assert message._request_id.startswith("req_")
    conforms(Message, post(server).json())


def test_the_same_words_as_chat(
    anthropic_client: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "Hello!\n\nWho are you?"},
        ],
        temperature=0,
        max_tokens=8,
    )
    system: list[Any] = [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    blocks = [{"type": "text", "text": text} for text in ("Hello!", "Who are you?")]
    turns = [{"role": "user", "content": text} for text in ("Hello!", "Who are you?")]
    for messages in ([{"role": "user", "content": blocks}], turns):
        message = ask(anthropic_client, system=system, messages=messages)
        assert message.content[0].text == chat.choices[0].message.content
        usage = message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_stream(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    whole = ask(anthropic_client)
    events = list(ask(anthropic_client, stream=True))
    assert [event.type for event in events[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert {event.type for event in events[2:-3]} == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == whole.content[0].text
    start = events[0].message
    assert start.content == []
    assert start.stop_reason is None
    usage = start.usage.input_tokens + start.usage.cache_read_input_tokens
    assert usage == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert events[-2].delta.stop_reason == "max_tokens"
    assert events[-2].usage.output_tokens == 8


def test_stream_helper(anthropic_client: anthropic.Anthropic) -> None:
    with anthropic_client.messages.stream(
        model=MODEL, messages=HELLO, max_tokens=8, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ask(anthropic_client).content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == 8


def test_events_conform(server: Server) -> None:
    answer = post(server, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"].startswith("req_")
    events = sse(answer.text)
    assert [name for name, _ in events][:3] == ["message_start", "content_block_start", "ping"]
    for name, data in events:
        assert name == data["type"]
        if name != "ping":
            conforms(RawMessageStreamEvent, data)


def test_count_tokens(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(
        model=MODEL, messages=HELLO, system="Be brief."
    )
    usage = ask(anthropic_client, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    answer = httpx.post(
        f"{server.url}/v1/messages/count_tokens", json={"model": MODEL, "messages": HELLO}
    )
    conforms(MessageTokensCount, answer.json())


def test_cached_tokens(anthropic_client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "A tale that nobody told yet. " * 20}]
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    first, second = (ask(anthropic_client, messages=messages).usage for _ in range(2))
    assert first.input_tokens + first.cache_read_input_tokens == counted
    assert second.cache_read_input_tokens == counted - 1
    assert second.input_tokens + second.cache_read_input_tokens == counted


def test_stop_sequence(anthropic_client: anthropic.Anthropic) -> None:
    text = ask(anthropic_client).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = ask(anthropic_client, stop_sequences=[stop])
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == stop
    assert message.content[0].text == text[: text.index(stop)]


def test_prefill(anthropic_client: anthropic.Anthropic, client: openai.OpenAI) -> None:
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "I am"}]
    chat = client.chat.completions.create(
        model=MODEL,
        messages=begun,
        temperature=0,
        max_tokens=8,
        extra_body={"continue_final_message": True},
    )
    assert ask(anthropic_client, messages=begun).content[0].text == chat.choices[0].message.content


def test_structured_output(anthropic_client: anthropic.Anthropic) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"enum": ["small", "large"]}, "rank": {"enum": [1, 2, 3]}},
        "required": ["name", "rank"],
        "additionalProperties": False,
        # Without a limit, the tiny model would write pages of spaces.
        "x-guidance": {"whitespace_flexible": False},
    }
    format: Any = {"type": "json_schema", "schema": schema}
    message = ask(anthropic_client, output_config={"format": format}, max_tokens=60)
    assert message.stop_reason == "end_turn"
    assert json.loads(message.content[0].text).keys() == {"name", "rank"}
    config: Any = {"format": {"type": "json_schema", "schema": {"if": {}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.format.schema.*#/if"):
        ask(anthropic_client, output_config=config)


CHOOSE: dict[str, Any] = {
    "name": "choose",
    "input_schema": {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "choose"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_used(
    anthropic_client: anthropic.Anthropic, choice: Any, stream: bool
) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": HELLO,
        "tools": [CHOOSE],
        "tool_choice": choice,
    }
    if stream:
        with anthropic_client.messages.stream(**options) as events:
            message: Any = events.get_final_message()
    else:
        message = anthropic_client.messages.create(**options)
    (use,) = message.content
    assert (use.type, use.name) == ("tool_use", "choose")
    assert use.input["size"] in ("small", "large")
    assert message.stop_reason == "tool_use"


def test_full_context_is_its_own_reason(anthropic_client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "word " * 1980}]
    message = ask(anthropic_client, messages=messages, max_tokens=4000, extra_body={"top_k": 1})
    if message.stop_reason != "end_turn":
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.output_tokens < 4000


def test_keys(launch: Callable[..., Server]) -> None:
    server = launch("--api-key", "good")
    for options in ({"api_key": "good"}, {"api_key": None, "auth_token": "good"}):
        assert ask(connect(server, **options)).content
    assert post(server, {"x-api-key": "good"}).status_code == 200
    assert post(server, {"x-api-key": "good", "authorization": "Bearer good"}).status_code == 200
    for headers in (
        {},
        {"x-api-key": "bad"},
        {"x-api-key": "good", "authorization": "Bearer bad"},
        {"x-api-key": "good, good"},
    ):
        answer = post(server, headers)
        assert answer.status_code == 401
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        ask(connect(server, api_key="bad"))
    elsewhere = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "good"})
    assert elsewhere.status_code == 401
    assert elsewhere.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"model": "anthropic_client-x"}, anthropic.NotFoundError, "anthropic_client-x"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         anthropic.BadRequestError, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         anthropic.BadRequestError, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
         anthropic.BadRequestError, "thinking"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]},
         anthropic.BadRequestError, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}, *HELLO]},
         anthropic.BadRequestError, "'t' has no result"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         anthropic.BadRequestError, "web_search_20250305"),
        ({"tool_choice": {"type": "tool"}}, anthropic.BadRequestError, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, anthropic.BadRequestError, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}},
         anthropic.BadRequestError, "budget_tokens"),
        ({"extra_body": {"container": "c"}}, anthropic.BadRequestError, "container"),
        ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "nonsense"),
        ({"extra_headers": {"anthropic-version": "2023-01-01"}},
         anthropic.BadRequestError, "anthropic-version"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]},
         anthropic.BadRequestError, "system[0].cache_control.type"),
        ({"extra_body": {"temperature": -1.0}}, anthropic.BadRequestError, "temperature"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop"),
    ],
)  # fmt: skip
def test_errors(anthropic_client: anthropic.Anthropic, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind) as error:
        ask(anthropic_client, **options)
    assert text in str(error.value)
    body = error.value.body
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"].startswith("req_")
