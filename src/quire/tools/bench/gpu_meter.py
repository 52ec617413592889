"""Utilization, memory and power of GPUs while something is measured, where NVML tells them."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.config import EngineArgs
from quire.server.telemetry.gpu_metrics import open_nvml, visible_gpus

Metrics = dict[str, float]

_PERIOD = 0.1
"""Seconds between two samples."""
_LEAST_SECONDS = 1.0
"""Shortest time whose energy is told: the driver counts it up every 0.1 s or so."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Readings of all GPUs: mean share of busy time in percent, bytes in use, watts. None: not
    given."""

    busy: float | None
    memory: float | None
    watts: float | None


@dataclass(slots=True)
class Reading:
    """Holds what a meter saw of one run.

    Attributes:
        joules: by all GPUs; None where one of them does not count them.
    """

    seconds: float = 0.0
    joules: float | None = None
    samples: list[_Sample] = field(default_factory=list)

    def metrics(self, output_tokens: int = 0) -> Metrics:
        """Returns metrics of a record: `gpu_utilization_percent`, the mean over time and GPUs;
        `gpu_memory_gb`, the most that all GPUs held together, reserved memory included;
        `gpu_watts`, the mean of their sum; `joules_per_token`. Absent are those that NVML does not
        give, and of runs under a second the energy."""
        found: Metrics = {}
        busy, memory, watts = (
            [value for sample in self.samples if (value := getattr(sample, name)) is not None]
            for name in ("busy", "memory", "watts")
        )
        if busy:
            found["gpu_utilization_percent"] = statistics.fmean(busy)
        if memory:
            found["gpu_memory_gb"] = max(memory) / 1e9
        counted = self.joules if self.seconds >= _LEAST_SECONDS else None
        if counted is not None:
            # Of short runs a sample may be a mean over more than the run.
            found["gpu_watts"] = counted / self.seconds
        elif watts:
            found["gpu_watts"] = statistics.fmean(watts)
        if counted is not None and output_tokens:
            found["joules_per_token"] = counted / output_tokens
        return found


class GpuMeter:
    """Samples some GPUs in a thread while a block runs, by `reading`.

    handles: NVML's, of these GPUs. nvml: the module, or None: then there are no figures.
    """

    def __init__(self, nvml: Any = None, handles: Sequence[Any] = ()) -> None:
        self._nvml, self._handles = nvml, handles

    @classmethod
    def of_device(cls, device: str, count: int = 1) -> GpuMeter:
        """Returns the meter of `count` GPUs from a device on ("cuda", "cuda:N"); of a CPU, and
        where NVML does not find as many, one without figures."""
        nvml = open_nvml() if device.startswith("cuda") else None
        if nvml is None:
            return cls()
        first = int(device.partition(":")[2] or 0)
        with contextlib.suppress(nvml.NVMLError):
            handles = [handle for _, handle in visible_gpus(nvml)][first : first + count]
            if len(handles) == count:
                return cls(nvml, handles)
        return cls()

    @classmethod
    def of_engine(cls, args: EngineArgs, device: str) -> GpuMeter:
        """Returns the meter of an engine's GPUs, of all its ranks. device: the first one's."""
        return cls.of_device(device, args.ranks)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """Yields the reading of a block, complete once the block has ended."""
        seen = Reading()
        if not self._handles:
            yield seen
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(seen, ended), daemon=True)
        before, began = self._joules(), time.perf_counter()
        thread.start()
        try:
            yield seen
        finally:
            seen.seconds = time.perf_counter() - began
            after = self._joules()
            ended.set()
            thread.join()
            if before is not None and after is not None:
                seen.joules = after - before

    def _sample(self, seen: Reading, ended: threading.Event) -> None:
        over = False
        while not over:
            over = ended.wait(_PERIOD)  # the last sample after it: a short block has one too
            seen.samples.append(self._now())

    def _now(self) -> _Sample:
        nvml = self._nvml
        busy = self._each(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        memory = self._each(lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        watts = self._each(lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        return _Sample(
            None if busy is None else statistics.fmean(busy),
            None if memory is None else sum(memory),
            None if watts is None else sum(watts),
        )

    def _joules(self) -> float | None:
        read = self._each(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if read is None else sum(read) / 1000

    def _each(self, read: Any) -> list[float] | None:
        """Returns a value of each GPU; None if one of them does not give it."""
        try:
            return [float(read(handle)) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
