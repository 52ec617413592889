"""The application in this process, with the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import httpx
import pytest

from quire.errors import BrokenLogitsError, EngineDeadError, QuireError
from quire.server.app import build_app
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import PROMPT, assert_error, connect, post, run


def test_routes_and_methods() -> None:
    async def go() -> list[httpx.Response]:
        async with connect(FakeClient()) as http:
            return [
                await http.get("/nowhere"),
                await http.get("/v1/completions"),
                await http.get("/v1/models/fake"),
                await http.get("/v1/models/else"),
                await http.get("/v1/models"),
                await http.get("/docs"),
            ]

    responses = run(go())
    assert [r.status_code for r in responses] == [404, 405, 200, 404, 200, 404]
    assert all("error" in r.json() for r in responses if r.status_code != 200)
    assert responses[4].json()["data"][0]["id"] == "fake"


@pytest.mark.parametrize(
    ("method", "path", "says"),
    [
        ("POST", "/api/chat", "Ollama's API, which this server does not have. Use POST /v1/chat/"),
        ("GET", "/api/tags", "Use GET /v1/models."),
        ("POST", "/api/pull", "This server has OpenAI's API (/v1/chat/completions"),
        ("POST", "/v1/audio/transcriptions", "OpenAI's API of speech, which this server does not"),
        ("POST", "/v1/images/generations", "OpenAI's API of images"),
        ("POST", "/v1/threads/a/runs", "Use POST /v1/responses."),
        ("POST", "/v1beta/models/a:generateContent", "Gemini's API"),
        ("GET", "/nowhere", "There is no route 'GET /nowhere'. This server has OpenAI's API"),
        ("POST", "/chat/completions", "there is POST /v1/chat/completions."),
        ("POST", "/v1/v1/chat/completions", "there is POST /v1/chat/completions."),
        ("POST", "/api/v1/chat/completions", "there is POST /v1/chat/completions."),
        ("POST", "/v1/chat/completions/", "there is POST /v1/chat/completions."),
        ("POST", "/v1/tokenize", "there is POST /tokenize."),
        ("POST", "/v1/apis", "There is no route 'POST /v1/apis'."),
    ],
)
def test_a_404_lists_the_routes(method: str, path: str, says: str) -> None:
    async def go() -> httpx.Response:
        async with connect(FakeClient()) as http:
            return await http.request(method, path)

    response = run(go())
    assert_error(response, 404, None, "no_such_route")
    assert says in response.json()["error"]["message"]


def test_errors_of_routes_are_in_the_shape_of_their_api() -> None:
    async def go() -> list[httpx.Response]:
        async with connect(FakeClient()) as http:
            return [
                await http.post("/v1/messages/batches", json={}),
                await http.get("/v1/messages"),
                await http.get("/v1/chat/completions/a/b"),
                await http.put("/v1/completions"),
                await http.post("/" + "é" * 3000),
            ]

    batches, messages, below, put, long = run(go())
    assert batches.json()["type"] == "error"
    assert "Use POST /v1/batches." in batches.json()["error"]["message"]
    assert (messages.status_code, messages.headers["allow"]) == (405, "POST")
    assert "GET is not possible at '/v1/messages'; POST is." in messages.text
    assert below.status_code == 404
    assert_error(put, 405, None, "method_not_allowed")
    assert_error(long, 404, None, "no_such_route")
    assert len(long.text) < 2000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic good"}, 401),
        ({"authorization": "good"}, 401),
        ({"authorization": "Bearer good"}, 200),
        ({"authorization": "bearer other"}, 200),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    async def go() -> list[httpx.Response]:
        args = ServerArgs(api_key=("good", "other"))
        async with connect(FakeClient(), args, headers=headers) as http:
            return [
                await http.get("/v1/models"),
                await http.post("/v1/completions", json=PROMPT),
                await http.get("/metrics"),
            ]

    for response in run(go()):
        assert response.status_code == status
        if status == 401:
            assert_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health/../v1/models", "/%68ealth/", "/HEALTH", "/nowhere"]
)
def test_only_health_itself_is_open(path: str) -> None:
    async def go() -> tuple[int, int]:
        async with connect(FakeClient(), ServerArgs(api_key=("k",))) as http:
            return (
                (await http.get(f"http://quire{path}")).status_code,
                (await http.get("/health")).status_code,
            )

    assert run(go()) == (401, 200)


def test_dead_engine_is_a_503_at_once() -> None:
    async def go() -> list[httpx.Response]:
        async with connect(FakeClient(alive=False)) as http:
            return [
                await http.post("/v1/completions", json=PROMPT),
                await http.get("/health"),
                await http.post("/generate", json=PROMPT),
            ]

    for response in run(go()):
        assert_error(response, 503, None, "engine_dead")


def test_death_before_the_first_token_is_a_status() -> None:
    client = FakeClient(words=(), error=EngineDeadError("at /secret/path"))
    for stream in (False, True):
        response = post("/v1/completions", {**PROMPT, "stream": stream}, client)
        assert_error(response, 503, None, "engine_dead")
        assert "secret" not in response.text


def test_death_in_mid_stream_is_an_event() -> None:
    client = FakeClient(error=EngineDeadError("gone"))
    response = post("/v1/completions", {**PROMPT, "stream": True}, client)
    assert response.status_code == 200
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    assert "[DONE]" not in events
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "one two three"


def test_unexpected_errors_tell_nothing() -> None:
    client = FakeClient(words=(), error=ValueError("at /secret/path"))  # type: ignore[arg-type]
    response = post("/v1/completions", PROMPT, client)
    assert_error(response, 500, None, "internal_error")
    assert "secret" not in response.text


async def call_slowly(client: FakeClient, writes: list[bytes], gate: asyncio.Event) -> None:
    """Calls the application by ASGI, with a fake socket whose first write waits for `gate`."""
    app = build_app(client, ServerArgs())  # type: ignore[arg-type]
    body = json.dumps({**PROMPT, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            writes.append(message["body"])
            if len(writes) == 1:
                await gate.wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "client": ("test", 1),
        "server": ("test", 80),
        "root_path": "",
    }
    await app(scope, receive, send)


def test_tokens_waiting_for_a_slow_socket_leave_together() -> None:
    async def go() -> list[bytes]:
        client, writes, gate = FakeClient(words=tuple("abcdefghij")), [], asyncio.Event()
        task = asyncio.create_task(call_slowly(client, writes, gate))
        while not writes:
            await asyncio.sleep(0)
        for _ in range(100):  # the engine runs on while the socket does not
            await asyncio.sleep(0)
        assert len(writes) == 1
        gate.set()
        await task
        return writes

    writes = run(go())
    events = [json.loads(e[6:]) for e in b"".join(writes).split(b"\n\n") if e and b"DONE" not in e]
    assert "".join(event["choices"][0]["text"] for event in events) == "abcdefghij"
    assert len(events) == 2
    assert len(writes) == 3  # first token, the rest, [DONE]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("free", [0, 1])
def test_disconnect_aborts(stream: bool, free: int) -> None:
    async def go() -> list[str]:
        client = FakeClient(free=free)
        app = build_app(client, ServerArgs())  # type: ignore[arg-type]
        body = json.dumps({**PROMPT, "stream": stream}).encode()
        left = asyncio.Event()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        task = asyncio.create_task(app(scope, receive, send))
        while not client.seen:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.aborted == []
        left.set()
        await task
        return client.aborted

    assert len(run(go())) == 1


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    response = post("/v1/completions", {**PROMPT, "return_token_ids": True})
    choice = response.json()["choices"][0]
    assert choice["token_ids"] == [0, 1, 2]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert_error(post("/v1/completions", {"prompt": "text"}), 400, "prompt", "no_tokenizer")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert_error(post("/v1/chat/completions", chat), 400, "messages", "no_tokenizer")


def test_generate_is_plain() -> None:
    answer = post("/generate", PROMPT).json()
    assert answer["text"] == "one two three"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3
    client = FakeClient(tokenizer=PlainTokenizer())
    response = post("/generate", {**PROMPT, "stream": True}, client)
    assert response.text == "one two three"
    assert response.headers["content-type"].startswith("text/plain")


def test_metrics_count() -> None:
    async def go() -> str:
        async with connect(FakeClient()) as http:
            await http.post("/v1/completions", json=PROMPT)
            await http.post("/v1/completions", json={"prompt": []})
            await http.get("/a/path/of/the/clients")
            return (await http.get("/metrics")).text

    text = run(go())
    for line in (
        "quire_prompt_tokens_total 3.0",
        "quire_generation_tokens_total 3.0",
        'quire_requests_finished_total{reason="stop"} 1.0',
        'quire_errors_total{kind="invalid_value",status="400"} 1.0',
        'quire_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        'quire_http_requests_total{method="GET",route="other",status="404"} 1.0',
        'quire_http_request_seconds_count{method="POST",route="/v1/completions"} 2.0',
        "quire_time_to_first_token_seconds_count 1.0",
        "quire_inter_token_latency_seconds_count 2.0",
        "quire_request_seconds_count 1.0",
        "quire_open_requests 0.0",
        "quire_engine_up 0.0",
    ):
        assert line in text, line


def test_every_started_completion_ends_for_a_reason() -> None:
    """For each cause: the client leaves, a timeout, a failed engine, or a normal end."""

    async def go() -> str:
        engine = FakeClient(free=1)
        async with connect(engine, ServerArgs(request_timeout=0.3)) as http:
            ask = dict(PROMPT)
            assert (await http.post("/v1/completions", json=ask)).status_code == 504
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(0.1):
                    await http.post("/v1/completions", json=ask)
            engine.gate.set()
            assert (await http.post("/v1/completions", json=ask)).status_code == 200
            engine.error = QuireError("broken")
            assert (await http.post("/v1/completions", json=ask)).status_code == 500
            assert (await http.post("/v1/embeddings", json={"input": [1]})).status_code == 200
            return (await http.get("/metrics")).text

    text = run(go())
    found = dict(re.findall(r'^quire_requests_finished_total{reason="(.*?)"} (\S+)$', text, re.M))
    (started,) = re.findall(r"^quire_requests_started_total (\S+)$", text, re.M)
    assert set(found) == {"stop", "abort", "timeout", "error"}
    assert sum(map(float, found.values())) == float(started) == 5.0


@pytest.mark.parametrize("stream", [False, True])
def test_nan_logits_are_an_error_that_names_them(stream: bool) -> None:
    engine = FakeClient(error=BrokenLogitsError())
    response = post("/v1/completions", {**PROMPT, "stream": stream}, engine)
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        error = json.loads(next(event for event in events if '"error"' in event))["error"]
    else:
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        error = response.json()["error"]
    assert error["code"] == "broken_logits"
    assert "NaN" in error["message"]
