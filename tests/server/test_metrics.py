"""`/metrics`; documents and dashboards name only existing metrics."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.loop.stats import EngineStats, RankStats
from quire.engine.loop.telemetry import Histogram, Telemetry
from quire.features.conversation_leases.stats import LeaseStats
from quire.features.disaggregation.stats import DisaggStats
from quire.features.expert_balance.stats import ExpertStats
from quire.features.images.stats import ImageStats
from quire.features.kv_offload.stats import TierStats
from quire.features.speculation.stats import SourceStats, SpeculationStats
from quire.features.structured_output.stats import GrammarStats
from quire.features.weight_updates.stats import UpdateStats
from quire.server.errors import ApiError
from quire.server.telemetry.engine_metrics import EngineMetrics
from quire.server.telemetry.gpu_metrics import GpuMetrics
from quire.server.telemetry.metrics import ServerMetrics, WorkerValues
from quire.server.telemetry.vllm_names import NAMES

ROOT = Path(__file__).parents[2]
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


class NvmlError(Exception):
    pass


def fake_nvml() -> Any:
    """Two GPUs; the second one does not report its utilization, like a GPU partition."""

    def utilization(handle: int) -> SimpleNamespace:
        if handle:
            raise NvmlError
        return SimpleNamespace(gpu=37)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}abc",
        nvmlDeviceGetName=lambda handle: b"A GPU",
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5, total=7),
        nvmlDeviceGetPowerUsage=lambda handle: 300_000,
        nvmlDeviceGetTemperature=lambda handle, kind: 40,
    )


ADAPTERS = ("known", "cached", "resident", "waiting", "loads", "load_seconds", "failures")
"""The entries of `EngineStats.adapters`."""


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> ServerMetrics:
    """Returns all existing metrics, each with at least one value."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    metrics = ServerMetrics()
    stats = EngineStats(
        running=1,
        set_back=2,
        delay_seconds={"queue": 1.0},
        blocks_used=[1],
        blocks_cached=[2],
        blocks_free=[3],
        tiers=TierStats(),
        conversation_leases=LeaseStats(),
        disagg=DisaggStats(),
        adapters=dict.fromkeys(ADAPTERS, 0.0),
        grammars=GrammarStats(),
        images=ImageStats(),
        speculation=SpeculationStats(sources={"suffix": SourceStats(3, 6, 4, [3, 1])}),
        ranks=[RankStats(1, 0.5, 2, 3)],
        experts=ExpertStats(5.0, 4.0, 1),
        weight_updates=UpdateStats(),
        histograms=Telemetry().histograms,
    )
    EngineMetrics(metrics, "a-model").update(stats, replicas=[True])
    GpuMetrics(metrics, "cuda").update()
    metrics.count_error(ApiError(404, "no", code="model_not_found"))
    metrics.count_error(ApiError(400, "no"))
    metrics.count_http("/health", "GET", 200, 0.01)
    metrics.ignored.labels("service_tier").inc()
    metrics.finished.labels("stop").inc()
    metrics.batches_finished.labels("completed").inc()
    metrics.batch_requests.labels("completed").inc()
    return metrics


def families(metrics: ServerMetrics) -> dict[str, Any]:
    """Returns the metrics by the names that queries use."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if not family.name.endswith("_created"):
            found[family.name + "_total" * (family.type == "counter")] = family
    return found


def test_the_metrics_table_matches_the_exported_metrics(everything: ServerMetrics) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    row = r"^\| `(quire_\w+)(?:\{(.*)\})?` \| [^|]+ \|$"
    tables = re.split(r"^(?=\| [^`].* \| \|\n\| --- \|)", text, flags=re.MULTILINE)
    rows = [
        (name, "histogram" if table.startswith("| histograms") else None, labels)
        for table in tables
        for name, labels in re.findall(row, table, re.MULTILINE)
    ]
    told = {
        name: (
            kind or ("counter" if name.endswith("_total") else "gauge"),
            set(labels.split(",")) - {""},
        )
        for name, kind, labels in rows
    }
    assert len(told) == len(rows)
    there = {
        name: (family.type, {key for sample in family.samples for key in sample.labels} - {"le"})
        for name, family in families(everything).items()
    }
    assert told == there


def expressions(document: Any) -> Iterator[str]:
    """Returns the queries of panels, variables and alerts."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("expr", "definition", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(document, list):
        for item in document:
            yield from expressions(item)


def unknown(document: Any, metrics: ServerMetrics) -> set[str]:
    names = {n for text in expressions(document) for n in re.findall(r"\bquire_\w+", text)}
    known = families(metrics)
    assert len(names) > 5
    return {
        name
        for name in names
        if name not in known
        and getattr(known.get(_SUFFIX.sub("", name)), "type", None) != "histogram"
    }


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "w"), ("y", "h"))
    )


def test_the_dashboard(everything: ServerMetrics) -> None:
    board = json.loads((ROOT / "docs" / "grafana" / "quire.json").read_text())
    assert unknown(board, everything) == set()
    panels = board["panels"]
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert titles == ["Traffic", "Latency", "Engine", "Cache", "GPU", "Errors"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert not overlap(one, other)
    shown = " ".join(expressions(board))
    missing = [name for name in families(everything) if not re.search(rf"\b{name}", shown)]
    assert missing == []
    for text in expressions(board):
        assert text.count("(") == text.count(")"), text


def test_alerts(everything: ServerMetrics) -> None:
    folder = ROOT / "deploy" / "prometheus"
    assert unknown(yaml.safe_load((folder / "alerts.yml").read_text()), everything) == set()
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]


def test_autoscaling(everything: ServerMetrics) -> None:
    text = (ROOT / "deploy/helm/quire/templates/hpa.yaml").read_text()
    names = set(re.findall(r"metric: \{ name: (\w+) \}", text))
    assert names == {"quire_requests_waiting", "quire_open_requests"}
    assert names <= set(families(everything))


def test_names_of_vllm(everything: ServerMetrics) -> None:
    everything.ttft.observe(0.02)
    before = set(families(everything))
    everything.vllm_model = "a-model"
    found = families(everything)
    assert before < set(found)
    also = {name: family for name, family in found.items() if name.startswith("vllm:")}
    wanted = {f"vllm:{name}" for names in NAMES.values() for name in names}
    assert {name.removesuffix("_total") for name in also} == wanted | {"vllm:kv_cache_usage_perc"}
    assert all(s.labels["model_name"] == "a-model" for f in also.values() for s in f.samples)
    (running,) = also["vllm:num_requests_running"].samples
    assert running.value == 1
    (usage,) = also["vllm:kv_cache_usage_perc"].samples
    assert usage.value == pytest.approx(1 / 6)
    (ended,) = also["vllm:request_success_total"].samples
    assert (ended.labels["finished_reason"], ended.value) == ("stop", 1)
    counts = [
        s for s in also["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")
    ]
    assert [s.value for s in counts] == [1]


def test_histograms_of_the_engine() -> None:
    histogram = Histogram.of((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0)
    metrics = ServerMetrics()
    engine = EngineMetrics(metrics, "m")
    engine.update(EngineStats(histograms={"step_seconds": histogram}), replicas=[True])
    lines = metrics.text().decode().splitlines()
    for line in (
        'quire_engine_step_seconds_bucket{le="1.0"} 2.0',
        'quire_engine_step_seconds_bucket{le="2.0"} 3.0',
        'quire_engine_step_seconds_bucket{le="+Inf"} 4.0',
        "quire_engine_step_seconds_count 4.0",
        "quire_engine_step_seconds_sum 12.0",
    ):
        assert line in lines


def test_an_engine_that_never_answered() -> None:
    metrics = ServerMetrics()
    EngineMetrics(metrics, "m")
    found = families(metrics)
    assert found["quire_engine_up"].samples[0].value == 0
    assert "quire_requests_running" not in found


def test_gpus(everything: ServerMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    def readings() -> dict[str, dict[str, float]]:
        metrics = ServerMetrics()
        GpuMetrics(metrics, "cuda:1").update()
        return {
            name: {sample.labels["gpu"]: sample.value for sample in family.samples}
            for name, family in families(metrics).items()
            if name.startswith("quire_gpu_")
        }

    found = readings()
    assert found["quire_gpu_utilization_ratio"] == {"0": 0.37}
    assert found["quire_gpu_memory_used_bytes"] == {"0": 5, "1": 5}
    assert found["quire_gpu_power_watts"] == {"0": 300, "1": 300}
    for visible in ("1", "GPU-1", " 1 ,", "GPU-1abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert readings()["quire_gpu_memory_total_bytes"] == {"1": 7}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert readings() == {}


@pytest.mark.parametrize("fault", ["no package", "no driver", "a driver that fails later", "cpu"])
def test_no_gpus(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise NvmlError

    nvml = fake_nvml()
    if fault == "no driver":
        nvml.nvmlInit = fail
    elif fault == "a driver that fails later":
        nvml.nvmlDeviceGetCount = fail
    monkeypatch.setitem(sys.modules, "pynvml", None if fault == "no package" else nvml)
    metrics = ServerMetrics()
    gpus = GpuMetrics(metrics, "cpu" if fault == "cpu" else "cuda")
    gpus.update()
    assert not any("gpu" in name for name in families(metrics))


def test_the_empty_file_of_a_new_worker_is_no_error(tmp_path: Path) -> None:
    """A worker's new, still empty file is no error, and the other files count."""
    (tmp_path / "counter_1.db").touch()
    values = MmapedDict(str(tmp_path / "counter_2.db"))  # type: ignore[no-untyped-call]
    values.write_value(mmap_key("quire_x_total", "quire_x_total", [], [], "Help."), 3.0, 0.0)  # type: ignore[no-untyped-call]
    (metric,) = WorkerValues(tmp_path).collect()
    assert [sample.value for sample in metric.samples] == [3.0]
    values.close()  # type: ignore[no-untyped-call]
