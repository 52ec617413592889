"""The API process's Prometheus metrics, in their own registry."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from quire.server.context.request_trace import PromptPhases
from quire.server.errors import ApiError
from quire.server.telemetry.vllm_names import VllmNames

if TYPE_CHECKING:
    from quire.engine.loop.output import CompletionUpdate

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which prometheus_client keeps each process's values."""


class ServerMetrics:
    """Metrics of the API process. Collectors add the whole server's metrics at each scrape.

    If several API processes share a port, a scrape of any of them returns the sums of all.

    Attributes:
        vllm_model: model name for the metrics under vLLM's names; None leaves those out.
        registry: holds this process's metrics.
        collectors: collectors of the whole server's metrics.
    """

    def __init__(self) -> None:
        self.vllm_model: str | None = None
        self.registry = CollectorRegistry()
        self.collectors: list[Collector] = []
        self.ttft = self._histogram("time_to_first_token_seconds", "Request in to first token out.")
        self.queued = self._histogram(
            "request_queue_seconds", "Request in to its first step begun."
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between a request's tokens.")
        self.e2e = self._histogram("request_seconds", "Request in to last token out.")
        self.prompt_len = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.output_len = self._histogram("request_output_tokens", "Tokens of an answer.", TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of all requests.")
        self.cached_tokens = self._counter(
            "prompt_cached_tokens", "Prompt tokens found in the cache."
        )
        self.output_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.started = self._counter("requests_started", "Completions handed to the engine.")
        self.finished = self._counter(
            "requests_finished",
            "Completions that ended, by the reason: stop, length, abort (the client left), timeout "
            "or error.",
            ["reason"],
        )
        self.errors = self._counter(
            "errors", "Errors sent to clients, including those in streams.", ["kind", "status"]
        )
        self.http = self._counter(
            "http_requests", "HTTP requests that ended.", ["route", "method", "status"]
        )
        self.http_seconds = self._histogram(
            "http_request_seconds", "First byte in to last byte out.", labels=["route", "method"]
        )
        self.ignored = self._counter(
            "ignored_fields", "Requests with a hint that the answer ignores.", ["field"]
        )
        self.batches_finished = self._counter(
            "batches_finished",
            "Batches that ended, by their status: completed, failed, expired or cancelled.",
            ["status"],
        )
        self.batch_requests = self._counter(
            "batch_requests", "Requests of batches that were answered or failed.", ["outcome"]
        )
        self.asleep = Gauge(
            "quire_engine_asleep",
            "1 between /sleep and /wake_up.",
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.open = Gauge(
            "quire_open_requests",
            "Prompts handed to the engine.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _histogram(
        self,
        name: str,
        help: str,
        buckets: Iterable[float] = SECONDS,
        labels: Iterable[str] = (),
    ) -> Histogram:
        return Histogram(
            f"quire_{name}", help, tuple(labels), buckets=tuple(buckets), registry=self.registry
        )

    def _counter(self, name: str, help: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"quire_{name}", help, tuple(labels), registry=self.registry)

    def collect_from(self, collector: Collector) -> None:
        """Adds a collector of the whole server's metrics.

        Its values are not summed over processes: each process would report the same ones.
        """
        self.collectors.append(collector)
        self.registry.register(collector)

    def count_error(self, error: ApiError) -> None:
        info = error.body.error
        self.errors.labels(info.code or info.type, str(error.status)).inc()

    def count_http(self, route: str, method: str, status: int, seconds: float) -> None:
        self.http.labels(route, method, str(status)).inc()
        self.http_seconds.labels(route, method).observe(seconds)

    def count_prompt(self, tokens: int, cached: int, queued: float) -> None:
        """Counts a prompt.

        Args:
            tokens: the prompt's tokens.
            cached: the tokens of them that were in the prefix cache.
            queued: seconds until its first step.
        """
        self.prompt_tokens.inc(tokens)
        self.prompt_len.observe(tokens)
        self.cached_tokens.inc(cached)
        self.queued.observe(queued)

    def text(self) -> bytes:
        registry = self._scrape_registry()
        if self.vllm_model is None:
            return generate_latest(registry)
        vllm_registry = CollectorRegistry()
        vllm_registry.register(VllmNames(registry, self.vllm_model))
        return generate_latest(registry) + generate_latest(vllm_registry)

    def _scrape_registry(self) -> CollectorRegistry:
        if MULTIPROCESS not in os.environ:
            return self.registry
        registry = CollectorRegistry()
        registry.register(WorkerValues(Path(os.environ[MULTIPROCESS])))
        for collector in self.collectors:
            registry.register(collector)
        return registry


class WorkerValues(Collector):
    """Sums the values that the API processes keep in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterable[Metric]:
        # A worker creates a file and then sets its size. An empty file is new, or its worker was
        # killed in between. Files may also vanish at any time, when their worker ends.
        files = [str(file) for file in self.folder.glob("*.db") if _size(file)]
        return MultiProcessCollector.merge(files)  # type: ignore[no-any-return, no-untyped-call]


def _size(file: Path) -> int:
    """Returns a file's size in bytes; 0 if it is gone."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


class RequestTimer:
    """Measures one prompt with its `n` completions, update by update."""

    __slots__ = ("delays", "first", "last", "metrics", "open", "outputs", "prompt_counts", "start")

    def __init__(self, metrics: ServerMetrics, n: int) -> None:
        self.metrics = metrics
        self.open = n
        metrics.started.inc(n)
        self.start = time.perf_counter()
        self.first: float | None = None
        self.prompt_counts: tuple[int, int, float] | None = None
        self.last: dict[int, float] = {}
        self.outputs: dict[int, int] = {}
        self.delays: dict[str, float] = {}

    def observe(self, update: CompletionUpdate) -> None:
        now = time.perf_counter()
        metrics, index, count = self.metrics, update.index, len(update.token_ids)
        if update.prompt_token_ids is not None:
            prompt = len(update.prompt_token_ids)
            self.prompt_counts = prompt, update.num_cached_tokens, update.queued
            metrics.count_prompt(*self.prompt_counts)
        self.delays = update.delays or self.delays
        if count:
            metrics.output_tokens.inc(count)
            if index in self.last:
                metrics.itl.observe((now - self.last[index]) / count)
            elif not self.last:
                self.first = now
                metrics.ttft.observe(now - self.start)
            self.last[index] = now
            self.outputs[index] = self.outputs.get(index, 0) + count
        if update.finish_reason is not None:
            self.open -= 1
            metrics.finished.labels(str(update.finish_reason)).inc()
            metrics.output_len.observe(self.outputs.get(index, 0))
            metrics.e2e.observe(now - self.start)

    def end(self, reason: str) -> None:
        """Counts the completions that have not ended by themselves.

        Args:
            reason: why they end: abort, timeout or error.
        """
        if self.open:
            self.metrics.finished.labels(reason).inc(self.open)
        self.open = 0

    def phases(self) -> PromptPhases:
        """Returns the phases so far."""
        prompt, cached, queued = self.prompt_counts or (0, 0, None)
        outputs = sum(self.outputs.values())
        now = time.perf_counter()
        return PromptPhases(
            self.start, now, queued, self.first, prompt, cached, outputs, self.delays
        )
