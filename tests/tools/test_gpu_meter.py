"""The meter of GPUs, with a stand-in for NVML."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.bench_serve import meter_of
from quire.cli.main import app
from quire.server.telemetry.gpu_metrics import visible_gpus
from quire.tools.bench import gpu_meter
from quire.tools.bench.gpu_meter import GpuMeter


class NvmlError(Exception):
    pass


class FakeNvml:
    """GPUs that draw 100 W, 150 W, 200 W and so on.

    without: functions that the last GPU does not support.
    """

    seconds: float | None = None
    """Time as the meter sees it too; None: the real one."""

    NVMLError = NvmlError

    def __init__(self, count: int = 3, without: tuple[str, ...] = ()) -> None:
        self._count, self._without = count, without

    def clock(self) -> float:
        return time.perf_counter() if self.seconds is None else self.seconds

    def __getattr__(self, name: str) -> Any:
        if name in ("nvmlInit", "nvmlDeviceGetCount"):
            return lambda: self._count

        def read(gpu: int) -> Any:
            if name in self._without and gpu == self._count - 1:
                raise NvmlError
            watts = 100 + 50 * gpu
            spent = 1000 * watts * self.clock()
            return {
                "nvmlDeviceGetHandleByIndex": gpu,
                "nvmlDeviceGetUUID": f"GPU-{gpu}",
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50 + 10 * gpu),
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=(gpu + 1) * 10**9),
                "nvmlDeviceGetPowerUsage": 1000 * watts,
                "nvmlDeviceGetTotalEnergyConsumption": int(spent),
            }[name]

        return read


def install(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_meter, "_PERIOD", 0.005)
    monkeypatch.setattr(gpu_meter, "_LEAST_SECONDS", 0.01)
    clock = time.perf_counter if nvml is None else nvml.clock
    monkeypatch.setattr(gpu_meter, "time", SimpleNamespace(perf_counter=clock))


def measured(nvml: FakeNvml, meter: GpuMeter, tokens: int = 0) -> dict[str, float]:
    """Returns the metrics of a block of two seconds."""
    nvml.seconds = 1.0
    with meter.reading() as reading:
        nvml.seconds = 3.0
    return reading.metrics(tokens)


def test_gpus_of_a_run_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvml := FakeNvml())
    found = measured(nvml, GpuMeter.of_device("cuda:1", 2), 10)
    assert found["gpu_utilization_percent"] == pytest.approx(65)
    assert found["gpu_memory_gb"] == pytest.approx(5)
    assert found["gpu_watts"] == pytest.approx(350)
    assert found["joules_per_token"] == pytest.approx(350 * 2 / 10)
    assert "joules_per_token" not in measured(nvml, GpuMeter.of_device("cuda"))


def test_metrics_that_a_gpu_does_not_report_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvml := FakeNvml(2, ("nvmlDeviceGetTotalEnergyConsumption",)))
    found = measured(nvml, GpuMeter.of_device("cuda", 2), 10)
    assert found.keys() == {"gpu_utilization_percent", "gpu_memory_gb", "gpu_watts"}
    assert found["gpu_watts"] == pytest.approx(250)
    nvml = FakeNvml(1, ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"))
    install(monkeypatch, nvml)
    assert measured(nvml, GpuMeter.of_device("cuda"), 10).keys() == {
        "gpu_memory_gb", "gpu_watts", "joules_per_token"
    }  # fmt: skip


def test_energy_of_a_short_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvml := FakeNvml())
    monkeypatch.setattr(gpu_meter, "_LEAST_SECONDS", 5.0)
    found = measured(nvml, GpuMeter.of_device("cuda"), 10)
    assert found["gpu_watts"] == 100
    assert "joules_per_token" not in found


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda:3", 1), ("cuda", 4)])
def test_no_metrics_without_a_gpu(device: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvml := FakeNvml())
    assert measured(nvml, GpuMeter.of_device(device, count), 10) == {}
    install(monkeypatch, None)
    assert measured(nvml, GpuMeter.of_device("cuda"), 10) == {}


def test_visible_gpus_are_in_cudas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-0")
    assert [index for index, _ in visible_gpus(FakeNvml())] == [2, 0]


def test_gpus_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvml := FakeNvml(4))
    flags = "a/model --tensor-parallel-size 2 --data-parallel-size=2 --max-num-seqs 4"
    assert measured(nvml, meter_of(flags))["gpu_memory_gb"] == pytest.approx(10)
    assert measured(nvml, meter_of("a/model"))["gpu_memory_gb"] == pytest.approx(1)
    assert measured(nvml, meter_of("a/model --device cpu")) == {}


@pytest.mark.parametrize(
    ("command", "case"),
    [(("throughput", "--case", "1x8x4", "--repeat", "1"), "1x8x4"),
     (("latency", "--input-len", "8", "--output-len", "4", "--requests", "2"), "latency-8x4")],
)  # fmt: skip
def test_records_have_the_metrics_of_the_gpu(
    command: tuple[str, ...], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeNvml())
    of_device = GpuMeter.of_device
    monkeypatch.setattr(GpuMeter, "of_device", lambda device, count=1: of_device("cuda", count))
    out = tmp_path / "records.jsonl"
    done = CliRunner().invoke(
        app, ["bench", *command, "--output", str(out), "--device", "cpu"], catch_exceptions=False
    )
    assert done.exit_code == 0
    record = json.loads(out.read_text())
    assert record["case"] == case
    assert record["metrics"].keys() >= {"gpu_watts", "gpu_memory_gb", "joules_per_token"}
    assert "gpu_watts" in done.stdout
