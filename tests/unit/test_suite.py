"""The suite: its points on the embedded model, and its report of records."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import suite
import suite_report
from quire.bench.record import BenchRecord, append_jsonl, read_jsonl
from tests.unit.tiny_engine import tiny_folder

SMALL = ["--small", "--device", "cpu", "--seconds", "60"]


def test_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SMALL", suite.Sizes((1, 3), (16,), 4, (1,), 16, 4))
    file = tmp_path / "records.jsonl"
    suite.main([*SMALL, "--worker", "grid", "--records", str(file)])
    records = read_jsonl(file)
    assert [record.case for record in records] == ["grid-1x16", "grid-3x16"]
    for record in records:
        metrics, rows = record.metrics, record.metrics["rows"]
        assert metrics["prefill_tok_s"] == pytest.approx(16e3 * rows / metrics["prefill_ms"])
        assert metrics["decode_tok_s"] == pytest.approx(1e3 * rows / metrics["decode_step_ms"])
        assert 0 < metrics["bandwidth_percent"] < 150
        assert record.settings["ceilings"]["origin"] == "measured now"


@pytest.mark.slow
def test_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.main([*SMALL, "--results", str(tmp_path)]) == 0
    records = read_jsonl(tmp_path / "cpu_suite.jsonl")
    assert {suite_report.kind(record) for record in records} == {"grid", "users"}
    assert {"ttft_p99_ms", "itl_p95_ms"} <= records[-1].metrics.keys()
    assert capfd.readouterr().out.endswith("0 failures\n")
