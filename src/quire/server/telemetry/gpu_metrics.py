"""Metrics of the GPUs, read from the driver through NVML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.server.telemetry.metrics import ServerMetrics
from quire.system import visible_devices


def open_nvml() -> Any:
    """Returns NVML, or None if it does not work on this machine."""
    try:
        import pynvml  # An optional package, and of no use without a driver.

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not answer
        return None
    return pynvml


def visible_gpus(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yields (driver's index, NVML handle) of each GPU that CUDA sees.

    The order is CUDA's if all GPUs are of the same model.

    Raises:
        nvml.NVMLError: the driver fails.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append((index, handle, text(nvml.nvmlDeviceGetUUID(handle))))
    visible = visible_devices()
    names = [str(index) for index, *_ in gpus] if visible is None else visible
    for name in names:
        for index, handle, uuid in gpus:
            # CUDA_VISIBLE_DEVICES may contain indices, or beginnings of UUIDs.
            if name == str(index) or (name and uuid.startswith(name)):
                yield index, handle


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
        index: the driver's index.
        name: the model's name.
        readings: values by the names in `GAUGES`. Values that the driver cannot read are absent.
    """

    index: int
    name: str
    readings: dict[str, float]


class GpuMetrics(Collector):
    """Collects the readings of the GPUs that the engine may use; nothing for a CPU."""

    def __init__(self, metrics: ServerMetrics, device: str) -> None:
        self._nvml = None if device == "cpu" else open_nvml()
        self._gpus: list[Gpu] = []
        metrics.collect_from(self)

    def update(self) -> None:
        """Reads the driver, which may take several milliseconds."""
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
    """Reads each value separately, because some devices, and shares of devices, lack some."""
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
