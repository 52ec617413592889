"""The application in this process, over an engine whose pace and death the test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fakes import FakeClient

from quire.errors import EngineDeadError
from quire.server.app import build_app
from quire.server.args import ServerArgs

PROMPT = {"prompt": [1, 2, 3]}


@asynccontextmanager
async def connect(
    client: FakeClient, args: ServerArgs | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(client, args or ServerArgs())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://quire", **options) as http:
        yield http


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def post(path: str, body: Any, client: FakeClient | None = None, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with connect(client or FakeClient(), **options) as http:
            return await http.post(path, json=body)

    return run(go())


def assert_error(response: httpx.Response, status: int, param: str | None, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    if param:
        assert param.split(".")[-1] in error["message"].lower()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("nonsense", 1, "unknown_parameter"),
        ("temprature", 0.1, "unknown_parameter"),
        ("tools", [{"type": "function"}], "unsupported_parameter"),
        ("response_format", {"type": "json_object"}, "unsupported_parameter"),
        ("audio", {"voice": "x"}, "unsupported_parameter"),
        ("modalities", ["text", "audio"], "unsupported_parameter"),
        ("store", True, "unsupported_parameter"),
        ("metadata", {"a": "b"}, "unsupported_parameter"),
        ("reasoning_effort", "high", "unsupported_parameter"),
        ("temperature", "hot", "invalid_value"),
        ("temperature", True, "invalid_value"),
        ("max_tokens", 1.5, "invalid_value"),
        ("max_tokens", -1, "invalid_value"),
        ("max_tokens", 10**400, "invalid_value"),
        ("temperature", 10**400, "invalid_value"),
        ("seed", 2**63, "invalid_value"),
        ("n", 0, "invalid_value"),
        ("n", 10**6, "invalid_value"),
        ("stop", [1], "invalid_value"),
        ("stop", ["x"] * 65, "invalid_value"),
        ("logit_bias", {"x": 1}, None),
        ("logit_bias", {"1": 1000}, None),
        ("logit_bias", {"9999999999": 1}, None),
        ("temperature", -0.1, None),
        ("top_p", 0, None),
        ("min_p", 1.1, None),
        ("priority", 10**12, "invalid_value"),
        ("cache_salt", "x" * 1000, "invalid_value"),
        ("model", "other", "model_not_found"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_bad_fields_are_named(path: str, field: str, value: Any, code: str | None) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    body = {**(chat if "chat" in path else PROMPT), field: value}
    client = FakeClient(tokenizer=object())
    response = post(path, body, client)
    assert response.status_code == (404 if code == "model_not_found" else 400), response.text
    error = response.json()["error"]
    assert error["param"].partition("[")[0] == field
    assert field in error["message"] or str(value) in error["message"]
    assert "Error" not in error["message"]
    if code and not (field == "n" and path == "/generate"):
        assert error["code"] == code
    assert client.seen == []


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u-1", "safety_identifier": "s"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"store": False, "metadata": None, "audio": None, "service_tier": "auto"},
        {"temperature": None, "n": None, "stop": None, "seed": None, "stream": None},
        {"temperature": 0, "top_k": -1, "stop": [], "logit_bias": {"5": -1.5}},
    ],
)
def test_neutral_fields_are_fine(fields: dict[str, Any]) -> None:
    assert post("/v1/completions", {**PROMPT, **fields}).status_code == 200


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], [[1], [2.0]], [-1], [2**31], 5, None, {"a": 1}, [True], [["a"]]]
)
def test_bad_prompts(prompt: Any) -> None:
    assert_error(post("/v1/completions", {"prompt": prompt}), 400, "prompt", "invalid_value")


def test_prompt_is_required() -> None:
    response = post("/v1/completions", {})
    assert_error(response, 400, "prompt", "missing_required_parameter")


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ("hi", "messages", "invalid_value"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "user", "content": "x", "foo": 1}], "messages[0].foo", "unknown_parameter"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "tool_calls",
            "unsupported_parameter",
        ),
    ],
)
def test_bad_messages(messages: Any, param: str, code: str) -> None:
    client = FakeClient(tokenizer=object())
    assert_error(post("/v1/chat/completions", {"messages": messages}, client), 400, param, code)


def test_only_text_parts() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    response = post("/v1/chat/completions", body, FakeClient(tokenizer=object()))
    assert response.status_code == 400
    assert_error(response, 400, "messages[0].content[0]", "unsupported_parameter")
    assert "image_url" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {"content-type": "application/json"}, 400),
        (b"", {"content-type": "application/json"}, 400),
        (b"[]", {"content-type": "application/json"}, 400),
        (b"null", {"content-type": "application/json"}, 400),
        (b'{"prompt": NaN}', {"content-type": "application/json"}, 400),
        (b'{"prompt": [1], "temperature": Infinity}', {"content-type": "application/json"}, 400),
        (b'{"prompt": [1], "temperature": 1e999}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b'{"prompt": [1]}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": [1]}', {}, 415),
        (b'{"prompt": [1]}', {"content-type": "application/json; charset=utf-8"}, 200),
        (b'{"prompt": "' + b"x" * 200_000, {"content-type": "application/json"}, 413),
    ],
)
def test_bodies(content: bytes, headers: dict[str, str], status: int) -> None:
    async def go() -> httpx.Response:
        async with connect(FakeClient(), ServerArgs(max_body_mb=0.15)) as http:
            return await http.post("/v1/completions", content=content, headers=headers)

    response = run(go())
    assert response.status_code == status, response.text
    if status != 200:
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_large_bodies_are_refused_while_they_come() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    async def go() -> httpx.Response:
        async with connect(FakeClient(), ServerArgs(max_body_mb=0.15)) as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/completions", content=chunks(), headers=headers)

    assert_error(run(go()), 413, None, "body_too_large")


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
            return (await http.get(path)).status_code, (await http.get("/health")).status_code

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
    """Speaks ASGI itself, with a socket whose first write waits for `gate`."""
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
    client = FakeClient(tokenizer=object())
    response = post("/generate", {**PROMPT, "stream": True}, client)
    assert response.text == "one two three"
    assert response.headers["content-type"].startswith("text/plain")


def test_metrics_count() -> None:
    async def go() -> str:
        async with connect(FakeClient()) as http:
            await http.post("/v1/completions", json=PROMPT)
            await http.post("/v1/completions", json={"prompt": []})
            return (await http.get("/metrics")).text

    text = run(go())
    for line in (
        "quire_prompt_tokens_total 3.0",
        "quire_generation_tokens_total 3.0",
        'quire_requests_finished_total{reason="stop"} 1.0',
        'quire_http_errors_total{code="400"} 1.0',
        "quire_time_to_first_token_seconds_count 1.0",
        "quire_inter_token_latency_seconds_count 2.0",
        "quire_request_seconds_count 1.0",
        "quire_open_requests 0.0",
        "quire_engine_up 0.0",
    ):
        assert line in text, line
