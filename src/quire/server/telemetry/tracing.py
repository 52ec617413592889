"""OpenTelemetry traces of requests, sent to a collector by OTLP over HTTP (the extra `otel`)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from quire import __version__
from quire.server.args import check_endpoint
from quire.server.context.request_context import RequestContext
from quire.server.context.request_trace import Handover, PromptPhases, RequestTrace

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/score": "embeddings",
    "/v1/score": "embeddings",
    "/rerank": "embeddings",
    "/v1/rerank": "embeddings",
    "/v2/rerank": "embeddings",
    "/kv/prefill": "prefill",
}
"""Maps each traced route to the name of its operation in the GenAI conventions."""

CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_EXPORT_SECONDS = 5.0
_CLOSE_SECONDS = 2.0


class Exporter:
    """Sends spans in a background thread. The SDK reads its own OTEL_* variables.

    Args:
        endpoint: URL of the collector; without a path, /v1/traces is added.
        service: the service's name, unless OTEL_SERVICE_NAME is set.

    Raises:
        ConfigError: `endpoint` is not a URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        # OpenTelemetry is an optional package: only the extra `otel` installs it.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        check_endpoint(endpoint)
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        service = os.environ.get("OTEL_SERVICE_NAME", service)
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("quire", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def parent(self, scope: Scope) -> Any:
        """Returns the trace context in a request's headers."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in CONTEXT_HEADERS
        }
        return self.propagator.extract(carrier)

    def close(self) -> None:
        """Sends the remaining spans, and waits a moment for it. Blocks."""
        self._provider.force_flush(round(_CLOSE_SECONDS * 1000))
        self._provider.shutdown()


class Tracing:
    """Turns finished requests into spans, and exports them.

    Spans that the collector does not accept are dropped.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._exporter = Exporter(endpoint, "quire")
        self._tracer = self._exporter.tracer
        self._model = model

    def begin(self, path: str, scope: Scope) -> RequestTrace | None:
        """Begins a request's trace; returns None if the route is not traced.

        Args:
            path: the path without the root path.
        """
        operation = _OPERATIONS.get(path) if scope["method"] == "POST" else None
        if operation is None:
            return None
        return RequestTrace(operation, self._exporter.parent(scope), scope)

    def export(self, trace: RequestTrace, context: RequestContext) -> None:
        """Makes the spans of a finished request."""
        # OpenTelemetry is an optional package: only the extra `otel` installs it.
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now = time.perf_counter()
        clock = _Clock(now, time.time_ns())
        route = getattr(trace.scope.get("route"), "path", "")
        request = self._tracer.start_span(
            f"{trace.scope['method']} {route}".strip(),
            context=trace.parent,
            kind=SpanKind.SERVER,
            start_time=clock.at(context.began),
            attributes=self._attributes(trace, context, route),
        )
        failed = trace.handover is not None and trace.handover.outcome != "done"
        if context.status >= 500 or context.end in ("error", "timeout") or failed:
            request.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(request)
        for number, phases in enumerate(trace.prompts):
            for name, start, end, attributes in _spans(phases):
                self._tracer.start_span(
                    name,
                    context=inside,
                    start_time=clock.at(start),
                    attributes={"quire.prompt": number, **attributes},
                ).end(clock.at(end))
        for name, start, end in _handover_spans(trace.handover):
            self._tracer.start_span(name, context=inside, start_time=clock.at(start)).end(
                clock.at(end)
            )
        request.end(clock.at(now))

    def _attributes(
        self, trace: RequestTrace, context: RequestContext, route: str
    ) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": trace.scope["method"],
            "http.route": route,
            "gen_ai.operation.name": trace.operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": context.prompt_tokens,
            "gen_ai.usage.output_tokens": context.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": context.cached_tokens,
            "quire.request.id": context.id,
            "quire.key": context.key.name,
        }
        if context.status:  # 0 if the client disconnected before the answer began
            attributes["http.response.status_code"] = context.status
        if context.end is not None:
            attributes["gen_ai.response.finish_reasons"] = [context.end]
        if trace.handover is not None:
            attributes["gen_ai.usage.input_tokens"] = trace.handover.tokens
            attributes["quire.handover.outcome"] = trace.handover.outcome
        if context.first_token is not None:
            attributes["quire.time_to_first_token"] = context.first_token
        if context.status >= 400:
            attributes["error.type"] = str(context.status)
        return attributes

    def close(self) -> None:
        """Sends the remaining spans, and waits a moment for it. Blocks."""
        self._exporter.close()


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts `time.perf_counter` to nanoseconds since the epoch.

    Attributes:
        counter, unix_ns: both clocks, read at the same moment.
    """

    counter: float
    unix_ns: int

    def at(self, counter: float) -> int:
        return self.unix_ns + round((counter - self.counter) * 1e9)


def _spans(phases: PromptPhases) -> list[tuple[str, float, float, dict[str, float]]]:
    """Returns the spans of a prompt: name, start, end, attributes."""
    if phases.queued is None:
        return [("queue", phases.start, phases.end, {})]
    started = min(phases.start + phases.queued, phases.end)
    first = phases.end if phases.first_token is None else max(phases.first_token, started)
    read = {
        "gen_ai.usage.input_tokens": phases.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": phases.cached_tokens,
    }
    spans: list[tuple[str, float, float, dict[str, float]]] = [
        ("queue", phases.start, started, {}),
        ("prefill", started, first, dict(read)),
    ]
    if phases.first_token is not None:
        wrote = {"gen_ai.usage.output_tokens": phases.output_tokens}
        spans.append(("decode", first, phases.end, dict(wrote)))
    spans[-1][3].update({f"quire.delay.{cause}": s for cause, s in phases.delays.items()})
    return spans


def _handover_spans(handover: Handover | None) -> list[tuple[str, float, float]]:
    """Returns the spans of a prompt that was computed for another engine: name, start, end."""
    if handover is None:
        return []
    if handover.computed is None:
        return [("prefill", handover.start, handover.end)]
    return [
        ("prefill", handover.start, handover.computed),
        ("handover", handover.computed, handover.end),
    ]
