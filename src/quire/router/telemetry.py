"""The router's metrics, and one span per request."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import Scope

from quire.router.choice import RouteChoice
from quire.router.fleet import Fleet
from quire.router.replica import RoutedReplica
from quire.router.upstream import Headers
from quire.server.telemetry.tracing import Exporter

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class RouterMetrics:
    """Prometheus metrics of one router. The fleet's gauges are read at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.refused = Counter(
            "quire_router_refused", "Requests that the router itself refused", ["status"],
            registry=own,
        )  # fmt: skip
        self.retries = Counter(
            "quire_router_retries", "Requests sent to a further replica", registry=own
        )
        self.broken = Counter(
            "quire_router_broken_answers", "Answers within which a replica was lost", registry=own
        )
        self.prompts = Counter(
            "quire_router_prompts",
            "Prompts of requests to replicas that decode: computed there (local) or apart",
            ["where"],
            registry=own,
        )
        self.left = Counter(
            "quire_router_clients_left", "Requests whose client left before the end", registry=own
        )
        self.sockets = Gauge("quire_router_websockets", "Open WebSockets", registry=own)
        self.first_byte = Histogram(
            "quire_router_first_byte_seconds",
            "From a request's arrival to the head of its answer",
            buckets=_SECONDS,
            registry=own,
        )
        own.register(_FleetCollector(fleet))


class _FleetCollector:
    """Collects the metrics of the fleet's current members, so replicas that left have no series."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("quire_router_replica_ready", "1 if it is", labels=["replica"])
        running = GaugeMetricFamily(
            "quire_router_replica_requests", "Requests from this router", labels=["replica"]
        )
        requests = CounterMetricFamily(
            "quire_router_requests", "Requests answered", labels=["replica", "status"]
        )
        for replica in self._fleet:
            for status, count in replica.answers.items():
                requests.add_metric([replica.name, str(status)], count)
            ready.add_metric([replica.name], float(replica.available))
            running.add_metric([replica.name], replica.state.running)
        yield requests
        yield ready
        yield running


class RequestSpan:
    """A request's span, which is the parent of the replica's span.

    Attributes:
        headers: headers that pass the span's context to the replica.
    """

    def __init__(self, exporter: Exporter, scope: Scope) -> None:
        # OpenTelemetry is an optional package: only the extra `otel` installs it.
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
        """Records the replica that the request is sent to.

        Args:
            attempt: number of the attempt, from 1.
        """
        self._span.set_attribute("quire.replica", replica.name)
        self._span.set_attribute("quire.attempts", attempt)
        if choice.prefill is not None:
            self._span.set_attribute("quire.prefill", choice.prefill or "local")

    def end(self, status: int) -> None:
        """Ends the span.

        Args:
            status: HTTP status of the answer; 0 without one.
        """
        from opentelemetry.trace import Status, StatusCode  # An optional package, as above.

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if not status or status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
