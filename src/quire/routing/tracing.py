"""The router's spans: one for a request, as the parent of the replica's."""

from __future__ import annotations

from starlette.types import Scope

from quire.routing.choice import RouteChoice
from quire.routing.replica import RoutedReplica
from quire.routing.upstream import Headers
from quire.server.telemetry.tracing import Exporter


class RequestSpan:
    """A request's span. `headers` name it to the replica."""

    def __init__(self, exporter: Exporter, scope: Scope) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._span = exporter.tracer.start_span(
            f"route {scope['method']}",
            context=exporter.parent(scope),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        carrier: dict[str, str] = {}
        exporter.propagator.inject(carrier, set_span_in_context(self._span))
        self.headers: Headers = [(name.encode(), value.encode()) for name, value in carrier.items()]

    def chosen(self, replica: RoutedReplica, choice: RouteChoice, attempt: int) -> None:
        """Takes note of where the request is sent. attempt: counts from 1."""
        self._span.set_attribute("quire.replica", replica.name)
        self._span.set_attribute("quire.attempts", attempt)
        if choice.prefill is not None:
            self._span.set_attribute("quire.prefill", choice.prefill or "local")

    def end(self, status: int) -> None:
        """Ends it. status: of the answer, 0 if there was none."""
        from opentelemetry.trace import Status, StatusCode

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if not status or status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
