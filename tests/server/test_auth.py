"""API keys, rate limits and their headers, with the fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quire.engine.loop.output import CompletionUpdate
from quire.errors import OverloadedError
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.server.args import ServerArgs
from quire.server.http.usage_report import UsageReader
from quire.server.telemetry.logs import JsonFormatter, TextFormatter
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import PROMPT, assert_error, connect, run

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def requests(
    args: ServerArgs,
    *wanted: tuple[str, str, Any],
    engine: FakeClient | None = None,
    **options: Any,
) -> list[httpx.Response]:
    """Returns the answers to requests (method, path, body), sent one after the other."""

    async def go() -> list[httpx.Response]:
        async with connect(engine or FakeClient(), args, **options) as http:
            return [await http.request(m, path, json=body) for m, path, body in wanted]

    return run(go())


COMPLETE = ("POST", "/v1/completions", {**PROMPT, "max_tokens": 10})


# -- limits ----------------------------------------------------------------------------------------


def test_every_answer_reports_the_remaining_limits() -> None:
    args = ServerArgs(requests_per_minute=2, tokens_per_minute=1000)
    first, models, second, third = requests(
        args, COMPLETE, ("GET", "/v1/models", None), COMPLETE, COMPLETE
    )
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    # Three prompt tokens and ten that may be generated.
    assert first.headers["x-ratelimit-remaining-tokens"] == "987"
    assert first.headers["x-ratelimit-reset-tokens"].endswith("ms")
    assert models.headers["x-ratelimit-remaining-requests"] == "1"
    # Six tokens were used, the rest were given back, and a few were refilled.
    assert int(models.headers["x-ratelimit-remaining-tokens"]) in range(994, 1001)
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert_error(third, 429, None, "rate_limit_exceeded")
    assert third.json()["error"]["type"] == "requests"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert 1 <= int(third.headers["retry-after-ms"]) <= 30_000
    assert third.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_receives_the_tokens_used(stream: bool) -> None:
    """Six tokens, reported in a header, or in a comment after the last event."""

    async def go() -> list[httpx.Response]:
        body = {**PROMPT, "max_tokens": 10, "stream": stream}
        async with connect(FakeClient(), ServerArgs()) as http:
            return [
                await http.post("/v1/completions", json=body, headers=headers)
                for headers in ({}, {"x-quire-report-usage": "1"})
            ]

    plain, told = run(go())
    assert "quire-usage" not in plain.text
    assert "x-quire-usage" not in plain.headers
    reader = UsageReader([(name.encode(), v.encode()) for name, v in told.headers.items()])
    text = reader.pass_on(told.content) + reader.end()
    assert reader.used == 6
    assert text.endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert text.count(b"\n") == plain.content.count(b"\n")


def test_tokens_run_out() -> None:
    engine = FakeClient()
    args = ServerArgs(tokens_per_minute=20)
    big = ("POST", "/v1/completions", {**PROMPT, "max_tokens": 18})
    answers = requests(args, COMPLETE, COMPLETE, COMPLETE, big, engine=engine)
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[2].json()["error"]["type"] == "tokens"
    assert "retry-after" in answers[2].headers
    assert "21 tokens" in answers[3].json()["error"]["message"]
    assert answers[3].headers["x-should-retry"] == "false"
    assert "retry-after" not in answers[3].headers
    assert len(engine.seen) == 2


class Forking(FakeClient):
    """A fake engine with two alternatives for each next token."""

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[CompletionUpdate]:
        entry = {0: Logprob(-1.0, 1), 1: Logprob(-2.0, 2)}
        yield CompletionUpdate(0, "", [0], [entry], "length", prompt_token_ids=[1, 2, 3])


@pytest.mark.parametrize("chat", [False, True])
def test_all_beams_of_a_search_count(chat: bool) -> None:
    engine = Forking(tokenizer=PlainTokenizer() if chat else None)
    vars(engine.config).update(vocab_size=10, eos_token_ids=())
    path, prompt = "/v1/completions", PROMPT
    if chat:
        path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}
    body = {**prompt, "max_tokens": 3, "use_beam_search": True, "beam_width": 2}
    wide = {**body, "beam_width": 9}
    args, told = ServerArgs(tokens_per_minute=20), {"x-quire-report-usage": "1"}
    wanted = [("POST", path, body), ("POST", path, wide)]
    answer, refused = requests(args, *wanted, engine=engine, headers=told)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.headers["x-ratelimit-remaining-tokens"] == "11"  # of 20, 3 and 2 * 3 less
    assert answer.headers["x-quire-usage"] == "8"  # one beam at first, then twice two
    assert "30 tokens" in refused.json()["error"]["message"]


def test_anthropics_shape_and_headers() -> None:
    engine = FakeClient(tokenizer=PlainTokenizer())
    body = {**CHAT, "model": "fake"}
    args = ServerArgs(requests_per_minute=1)
    first, second = requests(args, *[("POST", "/v1/messages", body)] * 2, engine=engine)
    assert first.status_code == 200
    assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert first.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert first.headers["request-id"] == first.headers["x-request-id"]
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert second.json()["request_id"] == second.headers["request-id"]
    assert "retry-after" in second.headers


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/generate", "/v1/responses", "/tokenize", "/score"]
)
def test_all_routes_that_cost_tokens_are_limited(path: str) -> None:
    engine = FakeClient(tokenizer=PlainTokenizer())
    bodies: dict[str, Any] = {
        "/v1/embeddings": {"input": [1]},
        "/v1/responses": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
    }
    body = bodies.get(path, {"prompt": "a"})
    first, second = requests(
        ServerArgs(requests_per_minute=1), *[("POST", path, body)] * 2, engine=engine
    )
    assert (first.status_code, second.status_code) == (200, 429)


def test_a_failed_request_gives_its_tokens_back() -> None:
    wrong = ("POST", "/v1/completions", {**PROMPT, "max_tokens": 10, "temperature": -1})
    refused, then = requests(ServerArgs(tokens_per_minute=20), wrong, COMPLETE)
    assert refused.status_code == 400
    assert then.headers["x-ratelimit-remaining-tokens"] == "7"


def test_without_limits_answers_have_no_limit_headers() -> None:
    (answer,) = requests(ServerArgs(), COMPLETE)
    assert not [name for name in answer.headers if "ratelimit" in name]


# -- admission -------------------------------------------------------------------------------------


def test_a_full_queue_is_a_503_to_come_back_from() -> None:
    engine = FakeClient(words=(), error=OverloadedError("full"))
    first, second = requests(ServerArgs(), COMPLETE, COMPLETE, engine=engine)
    for answer in (first, second):
        assert_error(answer, 503, None, "overloaded")
        assert answer.headers["retry-after"] == "1"
    assert len(engine.seen) == 1, "shortly after a refusal nothing reaches the engine"


def test_a_full_queue_does_not_stay_full() -> None:
    engine = FakeClient(words=(), error=OverloadedError("full"))

    async def go() -> list[int]:
        async with connect(engine) as http:
            codes = [(await http.post("/v1/completions", json=PROMPT)).status_code]
            engine.error, engine.words = None, ("one",)
            await asyncio.sleep(0.1)
            codes.append((await http.post("/v1/completions", json=PROMPT)).status_code)
            return codes

    assert run(go()) == [503, 200]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_request_past_its_timeout_is_aborted_with_a_504(path: str) -> None:
    engine = FakeClient(free=1, tokenizer=PlainTokenizer())
    (answer,) = requests(ServerArgs(request_timeout=0.05), ("POST", path, PROMPT), engine=engine)
    assert_error(answer, 504, None, "timeout")
    assert len(engine.aborted) == 1


def test_chats_time_out_too() -> None:
    engine = FakeClient(free=0, tokenizer=PlainTokenizer())
    args = ServerArgs(request_timeout=0.05)
    paths = ["/v1/chat/completions", "/v1/messages"]
    answers = requests(
        args, *[("POST", path, {**CHAT, "model": "fake"}) for path in paths], engine=engine
    )
    assert [answer.status_code for answer in answers] == [504, 504]
    assert answers[1].json()["error"]["type"] == "timeout_error"
    assert len(engine.aborted) == 2


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    engine = FakeClient(free=2)
    body = {**PROMPT, "stream": True}
    args = ServerArgs(request_timeout=0.2)
    (answer,) = requests(args, ("POST", "/v1/completions", body), engine=engine)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "one two"
    assert json.loads(events[-1])["error"]["code"] == "timeout"
    assert len(engine.aborted) == 1


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def go() -> httpx.Response:
        async def slowly() -> Any:
            yield b"{"
            await asyncio.sleep(5)

        async with connect(FakeClient(), ServerArgs(request_timeout=0.05)) as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/completions", content=slowly(), headers=headers)

    assert_error(run(go()), 408, None, "timeout")


# -- ids and logs ----------------------------------------------------------------------------------


def test_request_ids_are_given_or_taken_over() -> None:
    async def go() -> list[str]:
        async with connect(FakeClient(), ServerArgs(api_key=("k",))) as http:
            given = ["mine-7", "no good", "x" * 200, ""]
            answers = [await http.get("/v1/models", headers={"x-request-id": g}) for g in given]
            return [answer.headers["x-request-id"] for answer in answers]

    mine, *others = run(go())
    assert mine == "mine-7"
    assert all(other.startswith("req_") and len(other) == 36 for other in others)
    assert len(set(others)) == 3


def test_unforeseen_errors_have_an_id_too() -> None:
    engine = FakeClient(words=(), error=ValueError("secret path"))  # type: ignore[arg-type]
    (answer,) = requests(ServerArgs(), COMPLETE, engine=engine)
    assert answer.status_code == 500
    assert answer.headers["x-request-id"].startswith("req_")
    assert "secret" not in answer.text


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "quire.access"]


def test_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    engine = FakeClient(tokenizer=PlainTokenizer())
    secret = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 5}
    requests(
        ServerArgs(api_key=("k",)),
        ("POST", "/v1/chat/completions", secret),
        ("GET", "/%22%0Ainjected", None),
        engine=engine,
        headers={"authorization": "Bearer k", "x-request-id": "mine"},
    )
    chat, nowhere = logged(caplog)
    line = json.loads(JsonFormatter().format(chat))
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["key"], line["request_id"], line["end"]) == ("api-key-1", "mine", "stop")
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (3, 0, 3)
    assert 0 < line["ttft"] <= line["seconds"]
    assert line["logger"] == "quire.access"
    assert "secret" not in JsonFormatter().format(chat)
    text = TextFormatter().format(chat)
    assert " status=200 " in text
    assert " key=api-key-1 " in text
    assert "secret" not in text
    assert "\n" not in TextFormatter().format(nowhere)
    assert "\n" not in JsonFormatter().format(nowhere)


def test_prompts_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    engine = FakeClient(tokenizer=PlainTokenizer())
    requests(
        ServerArgs(log_prompts=True),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", {"prompt": [104, 105]}),
        ("POST", "/v1/embeddings", {"input": ["a", "b"]}),
        engine=engine,
    )
    assert [json.loads(JsonFormatter().format(r))["prompts"] for r in logged(caplog)] == [
        ["hi"],
        ["hi"],
        ["a", "b"],
    ]


def test_how_requests_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    requests(
        ServerArgs(request_timeout=0.05),
        ("POST", "/v1/completions", PROMPT),
        engine=FakeClient(free=1),
    )
    requests(ServerArgs(), COMPLETE, engine=FakeClient(words=(), error=OverloadedError("full")))
    ends = [record.__dict__["fields"]["end"] for record in logged(caplog)]
    assert ends == ["timeout", "error"]


# -- cors, roots -----------------------------------------------------------------------------------


ASKING = {
    "origin": "https://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_pages_of_other_origins_may_ask_where_they_are_let() -> None:
    args = ServerArgs(api_key=("k",), cors_origins=("https://app.example",))
    (before,) = requests(args, ("OPTIONS", "/v1/completions", None), headers=ASKING)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == "https://app.example"
    (other,) = requests(
        args, ("OPTIONS", "/v1/completions", None), headers={**ASKING, "origin": "https://evil"}
    )
    assert "access-control-allow-origin" not in other.headers
    (refused,) = requests(args, COMPLETE, headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_by_default_they_may_not() -> None:
    (answer,) = requests(ServerArgs(), COMPLETE, headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
def test_keys_are_checked_under_a_root_path(path: str) -> None:
    args = ServerArgs(api_key=("k",), root_path="/llm", public_metrics=True)
    assert requests(args, ("GET", path, None))[0].status_code == 401
    headers = {"authorization": "Bearer k"}
    assert requests(args, ("GET", path, None), headers=headers)[0].status_code == 200
    prefix = path.removesuffix("/v1/models")
    assert requests(args, ("GET", f"{prefix}/health", None))[0].status_code == 200
    assert requests(args, ("GET", f"{prefix}/metrics", None))[0].status_code == 200


def test_metrics_need_a_key_unless_they_are_public() -> None:
    args = ServerArgs(api_key=("k",))
    assert requests(args, ("GET", "/metrics", None))[0].status_code == 401


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "The API key is missing: send it as 'Authorization: Bearer KEY'."),
        ({"authorization": "Bearer wrong"}, "The API key is incorrect."),
        (
            {"authorization": "Bearer good", "x-api-key": "wrong"},
            "The request gives several API keys",
        ),
    ],
)
def test_a_401_says_what_is_wrong_with_the_key(headers: dict[str, str], says: str) -> None:
    async def go() -> httpx.Response:
        async with connect(FakeClient(), ServerArgs(api_key=("good",))) as http:
            return await http.post("/v1/messages", json={}, headers=headers)

    response = run(go())
    assert response.status_code == 401
    assert response.json()["error"]["message"].startswith(f"invalid x-api-key: {says}")
    assert "--api-key or --api-key-file" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
