"""`/v1/responses` and `/v1/messages` with the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse
from openai.types.responses import Response, ResponseStreamEvent

from quire.errors import EngineDeadError
from quire.server.args import ServerArgs
from tests.server.inprocess import assert_error, connect, post, run
from tests.server.schema import conforms, sse
from tests.server.scripted import MODEL, scripted_engine
from tests.server.test_responses_client import NOT_IN_THE_TYPES

ASK: dict[str, Any] = {"model": MODEL, "input": "Hello!"}
TELL: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "Hello!"}],
}


def assert_anthropic_error(answer: httpx.Response, status: int, kind: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]


def test_errors_before_the_first_token() -> None:
    engine = scripted_engine(error=EngineDeadError("at /secret/path"))
    for stream in (False, True):
        answer = post("/v1/responses", {**ASK, "stream": stream}, engine)
        assert_error(answer, 503, None, "engine_dead")
        answer = post("/v1/messages", {**TELL, "stream": stream}, engine)
        assert_anthropic_error(answer, 503, "overloaded_error")
        assert "secret" not in answer.text


def test_errors_in_mid_stream() -> None:
    engine = scripted_engine("one", " two", error=EngineDeadError("at /secret/path"))
    answer = post("/v1/responses", {**ASK, "stream": True}, engine)
    events = [conforms(ResponseStreamEvent, data, NOT_IN_THE_TYPES) for _, data in sse(answer.text)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "engine_dead"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert events[-1].response.output_text == "one two"
    assert "secret" not in answer.text
    answer = post("/v1/messages", {**TELL, "stream": True}, engine)
    name, data = sse(answer.text)[-1]
    assert name == "error"
    conforms(ErrorResponse, data)
    assert data["error"]["type"] == "overloaded_error"
    assert "secret" not in answer.text


def test_other_errors_of_messages_have_the_same_shape() -> None:
    async def go() -> list[httpx.Response]:
        args = ServerArgs(max_body_mb=0.0001)
        async with connect(scripted_engine("hi"), args) as http:
            return [
                await http.post("/v1/messages", json=TELL | {"system": "x" * 1000}),
                await http.post("/v1/messages", content=b"{", headers={"content-type": "text/x"}),
                await http.post(
                    "/v1/messages", content=b"{", headers={"content-type": "application/json"}
                ),
                await http.get("/v1/messages"),
                await http.get("/v1/messages/nowhere"),
                await http.post("/v1/messages", json={"model": "m"}),
            ]

    answers = run(go())
    assert_anthropic_error(answers[0], 413, "request_too_large")
    assert_anthropic_error(answers[1], 415, "invalid_request_error")
    assert_anthropic_error(answers[2], 400, "invalid_request_error")
    assert_anthropic_error(answers[3], 405, "invalid_request_error")
    assert_anthropic_error(answers[4], 404, "not_found_error")
    assert_anthropic_error(answers[5], 400, "invalid_request_error")


def test_dead_engine() -> None:
    engine = scripted_engine("hi", alive=False)
    assert_error(post("/v1/responses", ASK, engine), 503, None, "engine_dead")
    assert_anthropic_error(post("/v1/messages", TELL, engine), 503, "overloaded_error")
    counted = post("/v1/messages/count_tokens", {**TELL}, scripted_engine("hi"))
    assert_anthropic_error(counted, 400, "invalid_request_error")
    assert "max_tokens" in counted.text


async def until(http: httpx.AsyncClient, id: str, status: str) -> dict[str, Any]:
    while True:
        body = (await http.get(f"/v1/responses/{id}")).json()
        conforms(Response, body, NOT_IN_THE_TYPES)
        if body["status"] == status:
            return body
        await asyncio.sleep(0)


def test_background_as_it_goes() -> None:
    async def go() -> None:
        engine = scripted_engine("one", " two", " three", free=2)
        async with connect(engine) as http:
            body = (await http.post("/v1/responses", json={**ASK, "background": True})).json()
            assert body["status"] == "queued"
            id = body["id"]
            while not (body := await until(http, id, "in_progress"))["output"]:
                pass
            assert body["output"][0]["content"][0]["text"].startswith("one")
            early = await http.post("/v1/responses", json={**ASK, "previous_response_id": id})
            assert_error(early, 400, "previous_response_id", None)  # type: ignore[arg-type]
            engine.gate.set()
            body = await until(http, id, "completed")
            assert body["output"][0]["content"][0]["text"] == "one two three"
            assert body["usage"]["output_tokens"] == 3

    run(go())


def test_deleting_a_running_response_ends_it() -> None:
    async def go() -> None:
        engine = scripted_engine("one", " two", free=1)
        async with connect(engine) as http:
            id = (await http.post("/v1/responses", json={**ASK, "background": True})).json()["id"]
            await until(http, id, "in_progress")
            assert (await http.delete(f"/v1/responses/{id}")).json() == {
                "id": id,
                "object": "response",
                "deleted": True,
            }
            while not engine.aborted:
                await asyncio.sleep(0)
            assert (await http.get(f"/v1/responses/{id}")).status_code == 404

    run(go())


def test_background_failure() -> None:
    async def go() -> None:
        engine = scripted_engine("one", error=EngineDeadError("gone"))
        async with connect(engine) as http:
            id = (await http.post("/v1/responses", json={**ASK, "background": True})).json()["id"]
            body = await until(http, id, "failed")
            assert body["error"]["code"] == "server_error"
            events = sse((await http.get(f"/v1/responses/{id}?stream=true")).text)
            assert [name for name, _ in events[-2:]] == ["error", "response.failed"]

    run(go())


def test_a_server_that_stores_nothing() -> None:
    async def go() -> None:
        async with connect(scripted_engine("hi"), ServerArgs(response_store_size=0)) as http:
            body = (await http.post("/v1/responses", json=ASK)).json()
            assert body["store"] is False
            assert (await http.get(f"/v1/responses/{body['id']}")).status_code == 404
            refused = await http.post("/v1/responses", json={**ASK, "background": True})
            assert_error(refused, 400, "background", None)  # type: ignore[arg-type]

    run(go())


@pytest.mark.parametrize("flag", ["response_store_mb", "response_store_hours"])
def test_bad_settings(flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        ServerArgs(**{flag: 0.0})  # type: ignore[arg-type]
