"""NVML, the driver's library, and the GPUs of it that CUDA sees."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.server.telemetry.metrics import ServerMetrics


def open_nvml() -> Any:
    """Returns NVML, or None where it does not work."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer
        return None
    return pynvml


def visible_gpus(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yields (the driver's index, handle) of each GPU that CUDA sees, in CUDA's order where all
    GPUs are of one kind.

    Raises:
        nvml.NVMLError: the driver fails.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append((index, handle, text(nvml.nvmlDeviceGetUUID(handle))))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index, *_ in gpus] if visible is None else visible.split(",")
    for name in (name.strip() for name in names):
        for index, handle, uuid in gpus:
            # An index, or the beginning of a UUID.
            if name == str(index) or (name and uuid.startswith(name)):
                yield index, handle


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# Metrics of the GPUs, from their driver through NVML; none where there is no driver.

GAUGES = {
    "utilization": ("gpu_utilization_ratio", "Share of the time in which kernels ran, 0 to 1."),
    "memory_used": ("gpu_memory_used_bytes", "Device memory in use, by all processes."),
    "memory_total": ("gpu_memory_total_bytes", "Device memory."),
    "power": ("gpu_power_watts", "Power drawn."),
    "temperature": ("gpu_temperature_celsius", "The GPU's temperature."),
}
"""Maps readings to their metrics' names and meanings."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its readings.

    Attributes:
        index: the driver's.
        readings: values by name; those that the driver does not give are absent.
    """

    index: int
    name: str
    readings: dict[str, float]


class GpuMetrics(Collector):
    """The GPUs that the engine may use; none for an engine on a CPU."""

    def __init__(self, metrics: ServerMetrics, device: str) -> None:
        self._nvml = None if device == "cpu" else open_nvml()
        self._gpus: list[Gpu] = []
        metrics.collect_from(self)

    def update(self) -> None:
        """Reads the driver, which may take some milliseconds."""
        if self._nvml is not None:
            self._gpus = list(_read(self._nvml))

    def collect(self) -> Iterator[Metric]:
        for reading, (name, help) in GAUGES.items():
            family = GaugeMetricFamily(f"quire_{name}", help, labels=("gpu", "name"))
            for gpu in self._gpus:
                if reading in gpu.readings:
                    family.add_metric([str(gpu.index), gpu.name], gpu.readings[reading])
            if family.samples:
                yield family


def _read(nvml: Any) -> Iterator[Gpu]:
    with contextlib.suppress(nvml.NVMLError):
        for index, handle in visible_gpus(nvml):
            yield Gpu(index, text(nvml.nvmlDeviceGetName(handle)), _readings(nvml, handle))


def _readings(nvml: Any, handle: Any) -> dict[str, float]:
    """Reads each value by itself, as a device, or a share of one, does not give all."""
    readings: dict[str, float] = {}
    with contextlib.suppress(nvml.NVMLError):
        readings["utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        readings |= {"memory_used": memory.used, "memory_total": memory.total}
    with contextlib.suppress(nvml.NVMLError):
        readings["power"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with contextlib.suppress(nvml.NVMLError):
        celsius = nvml.NVML_TEMPERATURE_GPU
        readings["temperature"] = nvml.nvmlDeviceGetTemperature(handle, celsius)
    return readings
