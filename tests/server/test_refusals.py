"""Refused requests cost little: sizes are counted and limited before any other work."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quire.errors import RequestError
from quire.server.apis.openai.protocol import ChatRequest
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.errors import ApiError
from quire.server.http import bodies
from quire.server.http.bodies import MAX_MEMBERS, MAX_STRINGS, MAX_VALUES, check_json_size
from quire.text.tokenizer import check_length
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import PROMPT, assert_error, connect, post, run

USER = {"role": "user", "content": "hi"}


def _counts(value: Any) -> tuple[int, int, int]:
    """Returns the members, strings and commas of a value."""
    parts = [value] if not isinstance(value, (list, dict)) else []
    members = 0
    if isinstance(value, (list, dict)):
        members = 1
        parts = list(value)
        if isinstance(value, dict):
            members += len(value)
            parts += value.values()
    counts = [members, int(isinstance(value, str)), 0]
    if isinstance(value, (list, dict)):
        counts[2] = max(0, len(value) - 1)
        for part in parts:
            counts = [a + b for a, b in zip(counts, _counts(part), strict=True)]
    return counts[0], counts[1], counts[2]


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[]{}:,\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\:'), inner),
)


@given(value=JSON, slice_bytes=st.integers(1, 20))
def test_counts_are_exact(value: Any, slice_bytes: int) -> None:
    members, strings, values = _counts(value)
    data = msgspec.json.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_SLICE", slice_bytes)
        for name, count in (
            ("MAX_MEMBERS", members),
            ("MAX_STRINGS", strings),
            ("MAX_VALUES", values),
        ):
            patch.setattr(bodies, name, count)
        check_json_size(data)
        for name, count in (
            ("MAX_MEMBERS", members),
            ("MAX_STRINGS", strings),
            ("MAX_VALUES", values),
        ):
            patch.setattr(bodies, name, count - 1)
            with pytest.raises(ApiError) as caught:
                check_json_size(data)
            assert caught.value.status == 413
            patch.setattr(bodies, name, count)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b"[]," * MAX_MEMBERS + b"[]]}",
        b"{" + b",".join(b'"k%d":0' % i for i in range(MAX_MEMBERS)) + b"}",
        b'{"stop":[' + b'"",' * MAX_STRINGS + b'""]}',
        b'{"prompt":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
    ],
    ids=["lists", "members", "strings", "values"],
)
def test_bodies_of_many_values_are_not_decoded(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "parse", lambda *_: pytest.fail("it was decoded"))

    async def go() -> Any:
        async with connect(FakeClient()) as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/chat/completions", content=body, headers=headers)

    assert_error(run(go()), 413, None, "body_too_large")


def test_large_bodies_are_parsed_one_at_a_time_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    parse = bodies.parse

    def parsing(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(bodies, "parse", parsing)

    async def go() -> None:
        async with connect(FakeClient()) as http:
            body = {**PROMPT, "user": "x" * 100_000}
            await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(4)))

    run(go())
    assert threads == ["parse_0"] * 4


@pytest.mark.parametrize(
    "body", [{**PROMPT, "user": "x" * 100_000}, {**PROMPT, "x": "x" * 100_000}]
)
def test_no_collector_runs_while_a_large_body_is_parsed(
    body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled: list[bool] = []
    parse = bodies.parse

    def parsing(*given: Any) -> Any:
        enabled.append(gc.isenabled())
        return parse(*given)

    monkeypatch.setattr(bodies, "parse", parsing)
    assert post("/v1/completions", body).status_code == 400
    assert (enabled, gc.isenabled()) == ([False], True)


PART = {"type": "x", "text": ""}
IDS = [1] * 300_000
UNUSUAL: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": [*IDS, ""]}),
    ("/v1/completions", {"prompt": [IDS, [""]]}),
    ("/v1/completions", {"prompt": IDS, "n": 0}),
    ("/v1/embeddings", {"input": [*IDS, -1]}),
    ("/v1/embeddings", {"input": ["x"] * 99_000}),
    ("/detokenize", {"tokens": [*IDS, -1]}),
    ("/detokenize", {"tokens": [*([65] * 30_000), 2**30]}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": IDS}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(30_000)}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 1000}] * 15}),
    ("/v1/chat/completions", {"messages": [*([USER] * 4000), {"role": "x"}]}),
    ("/v1/chat/completions", {"messages": [USER], **{f"k{i}": 0 for i in range(40_000)}}),
    ("/v1/chat/completions", {"messages": [USER], "guided_choice": ["x"] * 40_000}),
    ("/v1/responses", {"input": [{"role": "user", "content": [PART] * 1000}] * 15}),
    (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": [PART] * 999}] * 9},
    ),
]


@pytest.mark.parametrize(("path", "body"), UNUSUAL, ids=range(len(UNUSUAL)))
def test_the_loop_does_little_for_a_refused_body(path: str, body: Any) -> None:
    """Counts calls, because times vary on a busy machine."""
    data = msgspec.json.encode(body)

    async def go() -> tuple[int, int]:
        async with connect(FakeClient(tokenizer=PlainTokenizer())) as http:
            await http.get("/health")
            calls = 0

            def count(*_: Any) -> None:
                nonlocal calls
                calls += 1

            sys.setprofile(count)
            try:
                headers = {"content-type": "application/json"}
                answer = await http.post(path, content=data, headers=headers)
            finally:
                sys.setprofile(None)
            return answer.status_code, calls

    status, calls = run(go())
    assert status == 400
    assert calls < 20_000


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "x", "text": ""}] * 1000}] * 15},
            "messages[0].content[0]",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "x"}] * 4000}, "messages[0].role", "invalid_value"),
        ({"messages": [USER], **{f"k{i}": 0 for i in range(9000)}}, "k0", "unknown_parameter"),
        (
            {"messages": [USER], "logit_bias": {str(i): "" for i in range(9000)}},
            "logit_bias",
            "invalid_value",
        ),
        (
            {
                "messages": [USER],
                "response_format": {"type": "text"} | {f"k{i}": 0 for i in range(999)},
            },
            "response_format.k0",
            "unknown_parameter",
        ),
    ],
)
def test_validation_stops_at_the_first_error(body: Any, param: str, code: str) -> None:
    assert_error(post("/v1/chat/completions", body), 400, param, code)
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    assert caught.value.error_count() < 8


def test_bodies_that_drip_in_run_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "BODY_BYTES_PER_SECOND", 1e9)

    async def call() -> list[dict[str, Any]]:
        app = build_app(FakeClient(), ServerArgs())  # type: ignore[arg-type]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        }
        await app(scope, receive, send)  # type: ignore[arg-type]
        return sent

    messages = run(call())
    assert messages[0]["status"] == 408
    assert json.loads(messages[1]["body"])["error"]["code"] == "timeout"


def test_long_texts_are_tokenized_off_the_loop() -> None:
    threads: set[str] = set()

    class Watched(PlainTokenizer):
        def encode(self, text: str, *given: Any, **named: Any) -> Any:
            threads.add(threading.current_thread().name)
            return super().encode(text, *given, **named)

        def piece(self, id: int) -> str | None:
            threads.add(threading.current_thread().name)
            return super().piece(id)

    client = FakeClient(tokenizer=Watched())
    body = {"prompt": "x" * 5000, "return_token_strs": True}
    assert post("/tokenize", body, client).json()["count"] == 5000
    assert post("/detokenize", {"tokens": [65] * 5000}, client).json()["prompt"] == "A" * 5000
    # The thread pool for answers is not used, either.
    assert {name.partition("_")[0] for name in threads} == {"count"}


@pytest.mark.parametrize(
    ("length", "chars", "seen", "refused"),
    [
        (40_001, 4, 0, True),  # longer than 1000 of the longest tokens
        (40_000, 4, 6000, True),
        (40_000, 5, 6000, False),  # 1200 tokens, which may be fewer in the whole
        (12_000, 4, 0, False),
    ],
)
def test_a_long_text_is_refused_by_its_beginning(
    length: int, chars: int, seen: int, refused: bool
) -> None:
    tokenized = 0

    def encode(text: str) -> list[int]:
        nonlocal tokenized
        tokenized += len(text)
        return [1] * (len(text) // chars)

    caught = None
    try:
        check_length("x" * length, 1000, 40, encode)
    except RequestError as error:
        caught = error
    assert tokenized == seen
    assert (caught is not None) == refused
    if caught is not None:
        assert (caught.param, caught.code) == ("prompt", "context_length_exceeded")
