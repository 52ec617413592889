"""Requests with many log-probabilities: shared entries, formatting in threads, and limits."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from quire.server.apis.openai import convert, logprobs
from quire.server.apis.openai.logprobs import CompletionLogprobWriter
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import assert_error, post
from tests.server.server_process import MODEL

HELLO = [{"role": "user", "content": "Hello"}]


def engine() -> FakeClient:
    return FakeClient(tokenizer=PlainTokenizer())


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_a_prompt_share_its_logprobs(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}

    def choices(**options: Any) -> list[tuple[str, Any]]:
        answer = client.completions.create(
            model=MODEL, prompt=["Once upon a time", "A tale"], **asked, **options
        )
        found: dict[int, tuple[str, list[Any]]] = {}
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                told = choice.logprobs
                text, entries = found.get(choice.index, ("", []))
                columns = (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)
                rows = list(zip(*columns, strict=True))
                found[choice.index] = text + choice.text, [*entries, *rows]
        return [found[index] for index in sorted(found)]

    one, three = choices(stream=stream, n=1), choices(stream=stream, n=3)
    for place in range(6):
        alone = one[place // 3]
        assert three[place][0] == alone[0]
        for own, other in zip(three[place][1], alone[1], strict=True):
            assert own[0] == other[0]
            assert own[1] == pytest.approx(other[1], abs=1e-4)
            assert own[3] == other[3]


def test_a_fork_continues_within_a_character() -> None:
    class Halves(PlainTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return "é".encode()[token : token + 1]

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return "\ufffd" * len(ids)

    writer = CompletionLogprobWriter(Halves(), 0)  # type: ignore[arg-type]
    assert writer.write([0, 1, 0], [None] * 3).text_offset == [0, 0, 1]
    for _ in range(2):
        assert writer.fork().write([1, 0], [None] * 2).text_offset == [1, 2]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_many_are_formatted_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool, many: bool
) -> None:
    seen, client = set(), engine()

    def token_bytes(token: int) -> bytes:
        seen.add(threading.current_thread() is not threading.main_thread())
        return b"x"

    monkeypatch.setattr(client.tokenizer, "token_bytes", token_bytes)
    monkeypatch.setattr(logprobs, "_MANY", 0 if many else 2000)
    response = post(path, {"model": "fake", "stream": stream, **body}, client)
    assert response.status_code == 200, response.text
    assert seen == {many}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [1] * 20, "echo": True, "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": "x" * 20, "echo": True, "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": [1] * 9, "n": 6, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 50, "logprobs": 1, "n": 1}, None),
        ("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 30, "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 26, "logprobs": 1, "n": 2}, "logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 30, "max_tokens": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "max_tokens": 34, "n": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "max_tokens": 33, "n": 3}, None),
        ("/v1/responses", {"max_output_tokens": 26, "top_logprobs": 3}, "top_logprobs"),
        ("/v1/responses", {"max_output_tokens": 25, "top_logprobs": 3}, None),
    ],
)
def test_many_are_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str | None
) -> None:
    monkeypatch.setattr(convert, "MAX_LOGPROBS", 100)
    client = engine()
    if "chat" in path:
        body = {"messages": HELLO, **body}
    if "responses" in path:
        body = {"input": "Hello", "include": ["message.output_text.logprobs"], **body}
    response = post(path, {"model": "fake", **body}, client)
    if param is None:
        assert client.seen
    else:
        assert_error(response, 400, param, "invalid_value")
        message = response.json()["error"]["message"]
        assert "at most 100 are allowed" in message
        if "max_output_tokens" in body:
            assert message.endswith("lower 'top_logprobs' or 'max_output_tokens'.")
        assert not client.seen


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({}, None),
        ({"logprobs": True}, None),
        ({"logprobs": True, "top_logprobs": 4}, 20),
        ({"logprobs": True, "top_logprobs": 4, "n": 2}, 10),
        ({"logprobs": True, "top_logprobs": 4, "max_tokens": 7}, 7),
    ],
)
def test_chats_without_a_length_keep_to_the_bound(
    monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], most: int | None
) -> None:
    monkeypatch.setattr(convert, "MAX_LOGPROBS", 100)
    client = engine()
    post("/v1/chat/completions", {"model": "fake", "messages": HELLO, **body}, client)
    assert client.seen[0][1].max_tokens == most


def test_responses_without_a_length_keep_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "MAX_LOGPROBS", 100)
    client = engine()
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 4}
    post("/v1/responses", {"model": "fake", "input": "Hello", **asked}, client)
    assert client.seen[0][1].max_tokens == 20


def test_stored_streams_keep_the_logprobs_that_were_sent(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 1, "n": 2}
    asked |= {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    sent: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**asked, store=True, stream=True):
        id = chunk.id
        for choice in chunk.choices:
            if choice.logprobs is not None:
                sent[choice.index] += choice.logprobs.content
    stored = client.chat.completions.retrieve(id)
    for choice in stored.choices:
        assert choice.logprobs.content == sent[choice.index]
        assert sent[choice.index]


def test_stored_responses_keep_the_logprobs_that_were_sent(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 12}
    asked |= {"temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    sent, done = [], []
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            sent += event.logprobs
        if event.type == "response.output_text.done":
            done = event.logprobs
        if event.type in ("response.incomplete", "response.completed"):
            id = event.response.id
    assert [entry.token for entry in sent] == [entry.token for entry in done]
    kept = client.responses.retrieve(id).output[0].content[0].logprobs
    assert kept
    for entry, short in zip(kept, sent, strict=True):
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token == short.token
        assert [top.logprob for top in entry.top_logprobs] == [
            top.logprob for top in short.top_logprobs
        ]
    again = client.responses.create(**(asked | {"previous_response_id": id}))
    assert again.output[0].content[0].logprobs
