"""Traces of requests, as received by a collector."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.args import ServerArgs
from quire.server.context.request_trace import PromptPhases
from quire.server.telemetry.tracing import _spans
from tests.server.fakes import FakeClient, PlainTokenizer
from tests.server.inprocess import PROMPT, run
from tests.server.server_process import MODEL, start_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A minimal OTLP collector over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, message: ExportTraceServiceRequest) -> None:
        self.paths.append(path)
        for group in message.resource_spans:
            self.resources.append(attributes(group.resource))
            for scope in group.scope_spans:
                self.spans += scope.spans

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def attributes(thing: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in thing.attributes}


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind)


def ask(
    endpoint: str,
    path: str,
    body: dict[str, Any],
    client: FakeClient | None = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> int:
    """Returns the answer's status once all spans have been sent."""
    import httpx

    args = ServerArgs(otlp_endpoint=endpoint, **settings)
    app = build_app(client or FakeClient(), args)  # type: ignore[arg-type]

    async def go() -> int:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(path, json=body, headers=headers)
            await http.get("/health")
        await asyncio.to_thread(app.state.server.tracing.close)
        return answer.status_code

    status: int = run(go())
    return status


def test_a_request(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    assert ask(collector.url, "/v1/completions", PROMPT, headers=headers) == 200
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "quire"
    assert [span.name for span in sorted(collector.spans, key=lambda s: s.name)] == [
        "POST /v1/completions",
        "decode",
        "prefill",
        "queue",
    ]
    (request,) = collector.named("POST /v1/completions")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.kind == request.SPAN_KIND_SERVER
    found = attributes(request)
    assert found.pop("quire.time_to_first_token") > 0
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "quire.request.id": "mine",
        "quire.key": "",
    }
    for name in ("queue", "prefill", "decode"):
        (span,) = collector.named(name)
        assert span.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano
    assert attributes(collector.named("decode")[0])["gen_ai.usage.output_tokens"] == 3


def test_several_prompts(collector: Collector) -> None:
    body = {"prompt": [[1, 2, 3], [1, 2, 3]], "stream": True}
    client = FakeClient(tokenizer=PlainTokenizer())
    assert ask(f"{collector.url}/", "/v1/completions", body, client) == 200
    numbers = [attributes(span)["quire.prompt"] for span in collector.named("decode")]
    assert sorted(numbers) == [0, 1]
    (request,) = collector.named("POST /v1/completions")
    assert attributes(request)["gen_ai.usage.output_tokens"] == 6
    assert request.parent_span_id == b""


def test_embeddings(collector: Collector) -> None:
    body = {"model": "fake", "input": [1, 2, 3]}
    assert ask(collector.url, "/v1/embeddings", body) == 200
    (request,) = collector.named("POST /v1/embeddings")
    assert attributes(request)["gen_ai.operation.name"] == "embeddings"
    assert (len(collector.named("prefill")), collector.named("decode")) == (1, [])


def test_errors(collector: Collector) -> None:
    assert ask(collector.url, "/v1/completions", {"prompt": []}) == 400
    assert ask(collector.url, "/v1/completions", PROMPT, FakeClient(alive=False)) == 503
    statuses = {
        attributes(span)["error.type"]: span.status.code
        for span in collector.named("POST /v1/completions")
    }
    assert statuses == {"400": 0, "503": 2}


def test_unsampled_traces_are_not_sent(collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert ask(collector.url, "/v1/completions", PROMPT, headers=headers) == 200
    assert collector.spans == []


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "\xff"])
def test_a_wrong_traceparent_begins_a_trace(collector: Collector, given: str) -> None:
    headers = {"traceparent": given.encode("latin-1")}
    assert ask(collector.url, "/v1/completions", PROMPT, headers=headers) == 200  # type: ignore[arg-type]
    (request,) = collector.named("POST /v1/completions")
    assert (request.parent_span_id, len(request.trace_id)) == (b"", 16)


def test_a_collector_that_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert ask(url, "/v1/completions", PROMPT) == 200


def test_phases() -> None:
    assert _spans(PromptPhases(1.0, 5.0)) == [("queue", 1.0, 5.0, {})]
    names = [(name, start, end) for name, start, end, _ in _spans(PromptPhases(1.0, 5.0, 2.0))]
    assert names == [("queue", 1.0, 3.0), ("prefill", 3.0, 5.0)]
    names = [(name, start, end) for name, start, end, _ in _spans(PromptPhases(1.0, 5.0, 2.0, 4.0))]
    assert names == [("queue", 1.0, 3.0), ("prefill", 3.0, 4.0), ("decode", 4.0, 5.0)]
    delayed = PromptPhases(1.0, 5.0, 2.0, delays={"queue": 2.0, "prompts": 1.5})
    *_, (name, _, _, found) = _spans(delayed)
    assert name == "prefill"
    assert found == found | {"quire.delay.queue": 2.0, "quire.delay.prompts": 1.5}


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://x", "http://", "grpc://a:1"])
def test_wrong_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        ServerArgs(otlp_endpoint=endpoint)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def missing(name: str) -> Any:
        return None if name == "opentelemetry.sdk" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"opentelemetry.sdk; install .* '\.\[otel\]'"):
        ServerArgs(otlp_endpoint="http://localhost:4318")


def test_a_real_server(collector: Collector) -> None:
    server = start_server("--otlp-endpoint", collector.url)
    try:
        answer = server.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
    finally:
        assert server.stop() == 0  # what was not sent yet is sent now
    (request,) = collector.named("POST /v1/chat/completions")
    found = attributes(request)
    assert answer.usage is not None
    assert found["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert found["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert {span.name for span in collector.spans if span.parent_span_id == request.span_id} == {
        "queue",
        "prefill",
        "decode",
    }
    (prefill,) = collector.named("prefill")
    assert prefill.end_time_unix_nano > prefill.start_time_unix_nano
