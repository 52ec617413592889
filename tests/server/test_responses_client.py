"""`/v1/responses` through the `openai` client, against a real server process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict

from tests.server.schema import conforms, sse
from tests.server.server_process import MODEL, Server

NOT_IN_THE_TYPES = ("store", "name")
"""`Response.store` is in OpenAI's answers, and `name` of `function_call_arguments.done` in the
types of its other clients."""


def ask(client: openai.OpenAI, **options: Any) -> Any:
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    arguments = {
        "model": MODEL,
        "input": "Hello! Who are you?",
        "temperature": 0,
        "max_output_tokens": 12,
        "extra_body": extra,
        **options,
    }
    return client.responses.create(**arguments)


def post(server: Server, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "input": "Hello!", "max_output_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def test_create(server: Server, client: openai.OpenAI) -> None:
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, user="u-1")
    assert response.id.startswith("resp_")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12
    assert (response.instructions, response.metadata, response.user) == (
        "Be brief.",
        {"a": "b"},
        "u-1",
    )
    conforms(Response, post(server).json(), NOT_IN_THE_TYPES)


def test_the_same_words_as_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello!"},
        ],
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hello!"},
    ]
    for options in ({"instructions": "Be brief.", "input": "Hello!"}, {"input": items}):
        response = ask(client, **options)
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_stream(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(types[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events[4:-4])
    assert text == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[-1].response.usage.output_tokens == 12


def test_stream_events_conform(server: Server) -> None:
    answer = post(
        server,
        stream=True,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream_options={"include_obfuscation": False},
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = sse(answer.text)
    for name, data in events:
        assert name == data["type"]
        conforms(ResponseStreamEvent, data, NOT_IN_THE_TYPES)


def test_obfuscation_evens_out_sizes(server: Server) -> None:
    answer = post(server, stream=True, stream_options={"include_obfuscation": True})
    deltas = [data for name, data in sse(answer.text) if str(name).endswith(".delta")]
    assert deltas
    assert all(data["obfuscation"] for data in deltas)
    lines = [line for line in answer.text.splitlines() if ".delta" in line and "data: " in line]
    assert len({len(line) % 32 for line in lines}) == 1


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Hello!", temperature=0, max_output_tokens=8
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert deltas


def test_logprobs(client: openai.OpenAI) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    response = ask(client, **options)
    entries = response.output[0].content[0].logprobs
    assert len(entries) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token  # greedy
    streamed = [
        entry
        for event in ask(client, stream=True, **options)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert ask(client).output[0].content[0].logprobs == []


def test_fields_of_the_other_routes(client: openai.OpenAI) -> None:
    biased = ask(client, extra_body={"logit_bias": {"500": 100}, "stop_token_ids": [500]})
    assert biased.usage.output_tokens == 1
    text = ask(client).output_text
    stopped = ask(client, extra_body={"stop": text[len(text) // 2 :][:3]})
    assert stopped.status == "completed"
    assert text.startswith(stopped.output_text)
    seeded = [
        ask(client, temperature=1.2, extra_body={"seed": seed}).output_text for seed in (7, 7, 8)
    ]
    assert seeded[0] == seeded[1] != seeded[2]


class Size(BaseModel):
    # Without a limit, the tiny model would write pages of spaces.
    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})

    name: Literal["small", "large"]
    rank: Literal[1, 2, 3]


def test_structured_output(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=MODEL, input="How large?", text_format=Size, max_output_tokens=200, temperature=0
    )
    assert isinstance(parsed.output_parsed, Size)
    assert parsed.text.format.type == "json_schema"  # type: ignore[union-attr]
    with client.responses.stream(
        model=MODEL, input="How large?", text_format=Size, max_output_tokens=200, temperature=0
    ) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Size)


CHOOSE: dict[str, Any] = {
    "type": "function",
    "name": "choose",
    "parameters": {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "choose"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "input": "How large?",
        "tools": [CHOOSE],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 100,
    }
    if stream:
        with client.responses.stream(**options) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**options)
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "choose", "completed")
    assert json.loads(call.arguments)["size"] in ("small", "large")
    assert response.status == "completed"


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"background": True}])
def test_a_schema_that_cannot_be_enforced(client: openai.OpenAI, options: Any) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"if": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"text.format.schema.*#/if") as error:
        ask(client, text=text, **options)
    assert error.value.param == "text.format.schema"


def test_conversation_by_id_is_the_conversation_by_items(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="And then?", previous_response_id=first.id)
    spelled = ask(
        client,
        input=[
            {"role": "user", "content": "Hello! Who are you?"},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "And then?"},
        ],
    )
    assert second.output_text == spelled.output_text
    assert second.usage.input_tokens == spelled.usage.input_tokens
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens >= 0
    third = ask(client, input="More", previous_response_id=second.id)
    items = list(client.responses.input_items.list(third.id, order="asc"))
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]  # type: ignore[union-attr]


def test_item_reference(client: openai.OpenAI) -> None:
    first = ask(client)
    by_id = ask(
        client,
        input=[
            {"role": "user", "content": "Hello! Who are you?"},
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "And then?"},
        ],
    )
    again = ask(client, input="And then?", previous_response_id=first.id)
    assert by_id.usage.input_tokens == again.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="msg_nowhere"):
        ask(client, input=[{"type": "item_reference", "id": "msg_nowhere"}])


def test_input_items(server: Server, client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"line {i}"} for i in range(5)]
    response = ask(client, input=items)
    page = client.responses.input_items.list(response.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["line 4", "line 3"]  # type: ignore[union-attr]
    texts = [item.content[0].text for item in page]  # type: ignore[union-attr]
    assert texts == [f"line {i}" for i in (4, 3, 2, 1, 0)]
    raw = httpx.get(f"{server.url}/v1/responses/{response.id}/input_items", timeout=10).json()
    conforms(ResponseItemList, raw)


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    response = ask(client)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    for call in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.cancel(response.id),
        lambda: ask(client, previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError, match=response.id):
            call()


def test_streamed_responses_are_stored_too(client: openai.OpenAI) -> None:
    done = list(ask(client, stream=True))[-1].response
    assert client.responses.retrieve(done.id).output_text == done.output_text


def test_store_false(client: openai.OpenAI) -> None:
    response = ask(client, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_background(server: Server, client: openai.OpenAI) -> None:
    response = ask(client, background=True)
    assert response.status == "queued"
    assert response.output == []
    server.wait_for(
        lambda: client.responses.retrieve(response.id).status == "incomplete", "the response"
    )
    done = client.responses.retrieve(response.id)
    assert done.output_text == ask(client).output_text
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1].type == "response.incomplete"
    later = list(client.responses.retrieve(response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in later] == list(range(4, len(events)))
    assert client.responses.cancel(response.id).status == "incomplete"  # too late, and no error


def test_background_stream_outlives_its_reader(server: Server, client: openai.OpenAI) -> None:
    stream = ask(client, background=True, stream=True, max_output_tokens=40)
    events = [event for event, _ in zip(stream, range(5), strict=False)]
    stream.close()
    id = events[0].response.id
    rest = list(
        client.responses.retrieve(id, stream=True, starting_after=events[-1].sequence_number)
    )
    numbers = [event.sequence_number for event in [*events, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].response.usage.output_tokens == 40


def test_cancel(server: Server, client: openai.OpenAI) -> None:
    response = ask(client, background=True, max_output_tokens=2000)
    server.wait_for(lambda: bool(client.responses.retrieve(response.id).output_text), "some text")
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "its end")
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).output_text == cancelled.output_text


def test_cancel_is_for_the_background(client: openai.OpenAI) -> None:
    response = ask(client)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        list(client.responses.retrieve(response.id, stream=True))


def test_leaving_a_stream_ends_it(server: Server, client: openai.OpenAI) -> None:
    stream = ask(client, stream=True, max_output_tokens=2000)
    id = next(iter(stream)).response.id
    stream.close()
    server.wait_for(lambda: server.metric("quire_requests_running") == 0, "its end")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(id)


def test_truncation(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "system", "content": "Be brief."}]
    for _ in range(40):
        items.append({"role": "user", "content": "word " * 100})
        items.append({"role": "assistant", "content": "Yes."})
    items.append({"role": "user", "content": "Hello!"})
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, input=items)
    assert error.value.code == "context_length_exceeded"
    response = ask(client, input=items, truncation="auto")
    assert 1024 < response.usage.input_tokens <= 2048 - 12
    assert response.truncation == "auto"


def test_input_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="Hello! Who are you?")
    assert counted.input_tokens == ask(client).usage.input_tokens
    assert counted.object == "response.input_tokens"


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "gpt-x"}, openai.NotFoundError, "model"),
        ({"conversation": "conv_1"}, openai.BadRequestError, "conversation"),
        ({"max_tool_calls": 3}, openai.BadRequestError, "max_tool_calls"),
        (
            {"background_options": {"completion_window": "2h"}},
            openai.BadRequestError,
            "background_options",
        ),
        ({"prompt": {"id": "p"}}, openai.BadRequestError, "prompt"),
        ({"tool_choice": {"type": "file_search"}}, openai.BadRequestError, "tool_choice"),
        ({"include": ["file_search_call.results"]}, openai.BadRequestError, "include"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"metadata": {"k": "v" * 600}}, openai.BadRequestError, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, openai.BadRequestError, "metadata"),
        ({"background": True, "store": False}, openai.BadRequestError, "background"),
        ({"stream_options": {"include_obfuscation": True}},
         openai.BadRequestError, "stream_options"),
        ({"input": [{"type": "computer_call"}]}, openai.BadRequestError, "input[0]"),
        ({"input": []}, openai.BadRequestError, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         openai.BadRequestError, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
         openai.BadRequestError, "input[0].call_id"),
        ({"previous_response_id": "resp_nowhere"}, openai.NotFoundError, "previous_response_id"),
        ({"extra_body": {"logit_bias": {"x": 1}}}, openai.BadRequestError, "logit_bias"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}},
         openai.BadRequestError, "text.format.schema"),
    ],
)  # fmt: skip
def test_errors(client: openai.OpenAI, options: Any, kind: Any, param: str) -> None:
    with pytest.raises(kind) as error:
        ask(client, **options)
    assert error.value.param == param
    assert param.rpartition(".")[2].partition("[")[0] in str(error.value)


@pytest.mark.parametrize(
    "query", ["stream=maybe", "starting_after=1", "nonsense=1", "stream=true&starting_after=x"]
)
def test_bad_queries(server: Server, client: openai.OpenAI, query: str) -> None:
    id = ask(client, max_output_tokens=1, background=True).id
    answer = httpx.get(f"{server.url}/v1/responses/{id}?{query}", timeout=10)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


def test_a_signal_ends_background_responses(launch: Callable[..., Server]) -> None:
    server = launch("--drain-timeout", "1")
    client = server.client()
    response = ask(client, background=True, max_output_tokens=1900)
    server.wait_for(lambda: bool(client.responses.retrieve(response.id).output_text), "some text")
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output)
    assert "never" not in "".join(server.output)
