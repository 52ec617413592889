"""Measures utilization, memory and power of GPUs during a run, by NVML."""

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
"""Shortest run, in seconds, for which energy is reported. The driver updates it every 0.1 s or
so."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Readings of all GPUs. A field is None if a GPU does not report it.

    Attributes:
        busy: mean percentage of busy time.
        memory: bytes in use.
        watts: power.
    """

    busy: float | None
    memory: float | None
    watts: float | None


@dataclass(slots=True)
class Reading:
    """The measurements of one run.

    Attributes:
        seconds: duration of the run.
        joules: energy of all GPUs; None if one of them does not report it.
        samples: samples during the run.
    """

    seconds: float = 0.0
    joules: float | None = None
    samples: list[_Sample] = field(default_factory=list)

    def metrics(self, output_tokens: int = 0) -> Metrics:
        """Returns metrics of a record. Metrics that NVML does not report are left out.

        - `gpu_utilization_percent` is the mean over time and GPUs.
        - `gpu_memory_gb` is the most memory of all GPUs together, including reserved memory.
        - `gpu_watts` is the mean power of all GPUs together.
        - `joules_per_token` is left out for runs under a second.
        """
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
            # The samples of a short run may be means over a longer time.
            found["gpu_watts"] = counted / self.seconds
        elif watts:
            found["gpu_watts"] = statistics.fmean(watts)
        if counted is not None and output_tokens:
            found["joules_per_token"] = counted / output_tokens
        return found


class GpuMeter:
    """Samples GPUs in a thread while the block of `reading` runs.

    Args:
        nvml: the module; None measures nothing.
        handles: NVML's handles of the GPUs.
    """

    def __init__(self, nvml: Any = None, handles: Sequence[Any] = ()) -> None:
        self._nvml, self._handles = nvml, handles

    @classmethod
    def of_device(cls, device: str, count: int = 1) -> GpuMeter:
        """Returns the meter of `count` GPUs from `device` on ("cuda" or "cuda:N").

        For a CPU, or if NVML finds fewer GPUs, the meter measures nothing.
        """
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
        """Returns the meter of the GPUs of all of an engine's ranks.

        Args:
            device: device of the first rank.
        """
        return cls.of_device(device, args.ranks)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reading]:
        """Yields the reading of the block. It is complete when the block has ended."""
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
            over = ended.wait(_PERIOD)  # One more sample follows, so short blocks have one, too.
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
        """Returns a value for each GPU, or None if one of them does not report it."""
        try:
            return [float(read(handle)) for handle in self._handles]
        except self._nvml.NVMLError:
            return None
