"""Telemetry of a running engine: counters, histograms, the times of requests."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

from quire.config import EngineConfig
from quire.engine.loop.trace import StepTrace, TraceFiles
from quire.outputs import RequestTimes
from quire.plan import StepPlan, StopReason
from quire.request import Request
from quire.scheduler import Scheduler, StepProgress

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 5)
PREFILL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUESTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (0, 1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

_FIRSTS = 64


class Histogram(msgspec.Struct):
    """A histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending.
        counts: number of values in each bucket, and of values above all bounds.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Trace(Protocol):
    """Receives the calls of `Telemetry`, two for each step. now: the time of the call."""

    def launched(
        self, plan: StepPlan, admitted: list[Request], begun: float, planned: float, now: float
    ) -> None: ...

    def read(
        self, progress: StepProgress, device_us: float, begun: float, collected: float, now: float
    ) -> None: ...

    def close(self) -> None: ...


def open_trace(config: EngineConfig, scheduler: Scheduler) -> Trace | None:
    """Returns the trace that settings ask for.

    Raises:
        ConfigError: the trace's folder cannot be written to.
    """
    if config.args.trace_dir is None:
        return None
    return StepTrace(TraceFiles(Path(config.args.trace_dir)), scheduler)


class Telemetry:
    """Counts and times steps. The engine calls it at each step's launch and at its end.

    All times are of `time.monotonic`. The histograms are:

    - `step_seconds`: A step's time, from its launch or the previous step's end, to its end.
    - `step_device_seconds`: The device's part of that time.
    - `step_requests`: Requests of a launched step.
    - `step_tokens`: Tokens of a launched step.
    - `prefill_seconds`: Time from a request's first step to its first token.

    Args:
        trace: Receives the same calls; None: no trace is written.

    Attributes:
        broken_logits: Completions that ended because their logits were not numbers.
        firsts: The last requests with a first token: their number, and the seconds it took.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self.steps = self.generation_tokens = self.broken_logits = 0
        self.histograms = {
            "step_seconds": Histogram.of(STEP_SECONDS),
            "step_device_seconds": Histogram.of(STEP_SECONDS),
            "step_requests": Histogram.of(REQUESTS),
            "step_tokens": Histogram.of(TOKENS),
            "prefill_seconds": Histogram.of(PREFILL_SECONDS),
        }
        self.firsts: deque[tuple[int, float]] = deque(maxlen=_FIRSTS)
        self._num_firsts = 0
        # Running requests without a token. They are few, and only their times can change.
        self._tokenless: list[Request] = []
        self._launches: deque[float] = deque()
        self._last_end = 0.0

    def launched(
        self, plan: StepPlan, admitted: list[Request], begun: float, planned: float
    ) -> None:
        """Records that a step was submitted.

        Args:
            admitted: the requests that got their lanes with this step.
            begun, planned: start and end of its planning.
        """
        self.steps += 1
        self._launches.append(planned)
        self.histograms["step_requests"].add(plan.num_rows)
        self.histograms["step_tokens"].add(plan.num_tokens)
        for request in admitted:
            times = request.times
            if times.first_scheduled is None:
                times.first_scheduled = planned
                self._tokenless.append(request)
        if self._trace is not None:
            self._trace.launched(plan, admitted, begun, planned, time.monotonic())

    def read(
        self, progress: StepProgress, device_us: float, begun: float, collected: float
    ) -> None:
        """Records that the scheduler has taken in the oldest step's result.

        Args:
            device_us: the device's time for the step, in microseconds.
            begun, collected: start and end of the wait for the result.
        """
        histograms = self.histograms
        histograms["step_seconds"].add(collected - max(self._launches.popleft(), self._last_end))
        histograms["step_device_seconds"].add(device_us * 1e-6)
        self._last_end = collected
        self.generation_tokens += int(progress.n_tokens.sum())
        if self._tokenless or progress.finished:
            self._note_times(progress)
        if self._trace is not None:
            self._trace.read(progress, device_us, begun, collected, time.monotonic())

    def _note_times(self, progress: StepProgress) -> None:
        now = time.monotonic()
        still = []
        for request in self._tokenless:
            if request.num_output_tokens:
                self._note_first(request.times, now)
            elif not request.finished:
                still.append(request)
        self._tokenless = still
        for place in progress.finished:
            self.broken_logits += int(progress.stop_reason[place] == StopReason.BROKEN)
            progress.requests[place].times.finished = now

    def close(self) -> None:
        """Closes the trace. Idempotent."""
        if self._trace is not None:
            self._trace.close()

    def _note_first(self, times: RequestTimes, now: float) -> None:
        times.first_token = now
        self._num_firsts += 1
        self.firsts.append((self._num_firsts, now - times.arrival))
        if times.first_scheduled is not None:
            self.histograms["prefill_seconds"].add(now - times.first_scheduled)
