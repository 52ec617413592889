"""Events and answers of both APIs, against their published types."""

from __future__ import annotations

import anthropic
import msgspec
import pytest
from openai.types.responses import Response as PublishedResponse
from openai.types.responses import ResponseStreamEvent

from quire.server.apis.anthropic.events import (
    Message,
    MessageUsage,
    MessageWriter,
    ThinkingTokensDetails,
)
from quire.server.apis.responses.events import ResponseWriter
from quire.server.apis.responses.items import OutputTokenLogprob, OutputTopLogprob
from quire.server.errors import ApiError
from tests.server.schema import conforms, sse
from tests.server.test_response_store import USAGE, response
from tests.server.test_responses_client import NOT_IN_THE_TYPES

SCRIPT: list[tuple[str, tuple[str, ...]]] = [
    ("reasoning", ("Let me", " see.")),
    ("text", ("It is", " so: ")),
    ("call", ("call_1", "look")),
    ("arguments", ('{"city": "Os',)),
    ("arguments", ("", 'lo"}')),
    ("call", ("call_2", "stop")),
    ("arguments", ("{}",)),
]


def speak_to_response(writer: ResponseWriter) -> None:
    for kind, parts in SCRIPT:
        if kind == "call":
            writer.call(*parts)
            continue
        for part in parts:
            if kind == "text":
                top = [OutputTopLogprob(part, -0.5, list(part.encode()))]
                writer.text(part, [OutputTokenLogprob(part, -0.5, list(part.encode()), top)])
            elif kind == "reasoning":
                writer.reasoning(part)
            else:
                writer.arguments(part)


def speak_to_message(writer: MessageWriter) -> None:
    says = {
        "reasoning": writer.thinking,
        "text": writer.text,
        "arguments": writer.input_json,
    }
    for kind, parts in SCRIPT:
        if kind == "call":
            writer.tool_use(*parts)
        else:
            for part in parts:
                says[kind](part)


@pytest.mark.parametrize("end", ["completed", "incomplete", "failed"])
def test_response_events(end: str) -> None:
    writer = ResponseWriter(response("resp_1", "queued"))
    writer.begin()
    writer.progress()
    speak_to_response(writer)
    if end == "failed":
        writer.fail(ApiError(503, "The engine has stopped.", code="engine_dead"))
    else:
        writer.finish(USAGE, incomplete="max_output_tokens" if end == "incomplete" else None)
    events = [msgspec.json.decode(event.data) for event in writer.take()]
    for event in events:
        conforms(ResponseStreamEvent, event, NOT_IN_THE_TYPES)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    types = [event["type"].removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added"]
    ends = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta"]
    called = ["function_call_arguments.done", "output_item.done"]
    error = ["error"] if end == "failed" else []
    assert types == [
        *["created", "queued", "in_progress"],
        *[*part, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *ends],
        *[*part, "output_text.delta", "output_text.delta", "output_text.done", *ends],
        *[*call, "function_call_arguments.delta", *called],
        *[*call, *called],
        *[*error, end],
    ]
    final = conforms(PublishedResponse, events[-1]["response"], NOT_IN_THE_TYPES)
    assert final.status == end
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    last = "completed" if end == "completed" else "incomplete"
    assert [item.status for item in final.output] == ["completed"] * 3 + [last]
    assert final.output[0].content[0].text == "Let me see."
    assert final.output_text == "It is so: "
    assert final.output[2].arguments == '{"city": "Oslo"}'
    assert len(final.output[1].content[0].logprobs) == 2
    if end == "failed":
        assert (final.error.code, events[-2]["code"]) == ("server_error", "engine_dead")


def test_an_open_response_is_valid_to_read() -> None:
    writer = ResponseWriter(response("resp_1"))
    writer.progress()
    writer.text("so ", [])
    writer.text("far", [])
    writer.flush()
    seen = conforms(
        PublishedResponse,
        msgspec.json.decode(msgspec.json.encode(writer.response)),
        NOT_IN_THE_TYPES,
    )
    assert seen.output_text == "so far"
    assert seen.output[0].status == "in_progress"
    writer.text(", so good", [])
    writer.finish(USAGE)
    assert writer.response.output[0].content[0].text == "so far, so good"  # type: ignore[union-attr]


def message_writer(*, show_thinking: bool = True) -> MessageWriter:
    usage = MessageUsage(3, 0, 0, ThinkingTokensDetails())
    message = Message(id="msg_1", model="m", content=[], usage=usage)
    return MessageWriter(message, streams=True, show_thinking=show_thinking)


@pytest.mark.parametrize("show", [True, False])
def test_message_events(show: bool) -> None:
    writer = message_writer(show_thinking=show)
    writer.begin()
    speak_to_message(writer)
    writer.finish(MessageUsage(3, 0, 9, ThinkingTokensDetails(2)), "tool_use", None)
    events = sse(writer.take().decode())
    said = [
        data["delta"]["type"] if name == "content_block_delta" else name for name, data in events
    ]
    block = ("content_block_start", "content_block_stop")
    thinking = ["thinking_delta"] * 2 if show else []
    assert said == [
        *["message_start", block[0], "ping", *thinking, "signature_delta", block[1]],
        *[block[0], "text_delta", "text_delta", block[1]],
        *[block[0], "input_json_delta", "input_json_delta", block[1]],
        *[block[0], "input_json_delta", block[1]],
        *["message_delta", "message_stop"],
    ]
    places = [data["index"] for name, data in events if name == "content_block_start"]
    assert places == [0, 1, 2, 3]
    for name, data in events:
        assert name == data["type"]
        if name != "ping":
            conforms(anthropic.types.RawMessageStreamEvent, data)
    whole = conforms(
        anthropic.types.Message, msgspec.json.decode(msgspec.json.encode(writer.message))
    )
    assert whole.content[0].thinking == ("Let me see." if show else "")
    assert whole.content[0].signature
    assert whole.content[2].input == {"city": "Oslo"}
    assert whole.usage.output_tokens == events[-2][1]["usage"]["output_tokens"] == 9


def test_cut_off_tool_input_keeps_its_complete_part() -> None:
    for text, value in (('{"a": "b', {"a": "b"}), ("", {}), ("[1]", {}), ("nonsense", {})):
        writer = message_writer()
        writer.tool_use("t", "f")
        writer.input_json(text)
        writer.finish(MessageUsage(3, 0, 9, ThinkingTokensDetails()), "max_tokens", None)
        assert writer.message.content[0].input == value  # type: ignore[union-attr]


def test_an_empty_answer_has_an_empty_text() -> None:
    writer = ResponseWriter(response("resp_1"))
    writer.text("", [OutputTokenLogprob("<eos>", -0.1, [], [])])
    writer.finish(USAGE)
    assert writer.response.output[0].content[0].text == ""  # type: ignore[union-attr]
    other = message_writer()
    other.finish(MessageUsage(3, 0, 0, ThinkingTokensDetails()), "end_turn", None)
    assert other.message.content[0].text == ""  # type: ignore[union-attr]
