"""Requests that the server refuses, and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire
from quire.server.args import ServerArgs
from quire.text.tokenizer import Tokenizer
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import PROMPT, assert_error, connect, post, run


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("nonsense", 1, "unknown_parameter"),
        ("temprature", 0.1, "unknown_parameter"),
        ("tools", [{"type": "function"}], None),
        ("audio", {"voice": "x"}, "unsupported_parameter"),
        ("modalities", ["text", "audio"], "unsupported_parameter"),
        ("store", 5, None),
        ("metadata", {"a": 5}, None),
        ("reasoning_effort", 3, None),
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
    client = FakeClient(tokenizer=PlainTokenizer())
    response = post(path, body, client)
    assert response.status_code == (404 if code == "model_not_found" else 400), response.text
    error = response.json()["error"]
    assert error["param"].partition("[")[0].partition(".")[0] == field
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
        ([{"role": "bot", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "user", "content": "x", "foo": 1}], "messages[0].foo", "unknown_parameter"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "messages[0].tool_calls[0]",
            "invalid_value",
        ),
    ],
)
def test_bad_messages(messages: Any, param: str, code: str) -> None:
    client = FakeClient(tokenizer=PlainTokenizer())
    assert_error(post("/v1/chat/completions", {"messages": messages}, client), 400, param, code)


@pytest.mark.parametrize("kind", ["video", "input_audio", "audio_url", "file"])
def test_only_text_images_and_videos(kind: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]}
    response = post("/v1/chat/completions", body, FakeClient(tokenizer=PlainTokenizer()))
    assert response.status_code == 400
    assert_error(response, 400, "messages[0].content[0]", "unsupported_parameter")
    assert kind in response.json()["error"]["message"]


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
        (b"[" * 50_000, {"content-type": "application/json"}, 400),
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


def test_a_broken_chat_template_is_reported_at_the_start_and_to_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Path(quire.__file__).parent / "embedded" / "quire-tiny"
    tokenizer = Tokenizer.from_path(folder)
    tokenizer.chat_templates = {"default": "{% if %}"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = post("/v1/chat/completions", chat, FakeClient(tokenizer=tokenizer))
    assert answer.status_code == 400
    assert "the chat template is not valid" in answer.json()["error"]["message"]
    assert "chats will be refused: the chat template is not valid" in caplog.text
