"""The suite: its points on the embedded model, and its report of records."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import suite
import suite_report
from quire.tools.bench.record import BenchRecord, append_jsonl, read_jsonl

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


def test_skipped_sizes_are_named_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = suite.Sizes((1, 40), (4000,), 4)
    options = suite.argparse.Namespace(device="cpu", seconds=60.0)
    assert list(suite.run_grid(None, options, sizes)) == []
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["1x4000", "40x4000"]
    assert all("tokens of context, and there are 2048" in line for line in said)


def test_no_time_is_left_for_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    options = suite.argparse.Namespace(device="cpu", seconds=0.0)
    assert list(suite.run_grid(None, options, suite.Sizes((1,), (16,), 2))) == []
    assert capsys.readouterr().out == "1x16: left out, no time\n"


def test_the_report_shows_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(case: str, model: str = "m", **metrics: float) -> BenchRecord:
        return BenchRecord(
            case=case, model=model, card="A card", date="2026-11-22", metrics=metrics,
            settings={"dtype": "bfloat16"},
        )  # fmt: skip

    file = tmp_path / "a_suite.jsonl"
    grid = [
        record(f"grid-{rows}x8", rows=rows, prompt_tokens=8, decode_step_ms=2.0, prefill_ms=1.0)
        for rows in (4, 2)
    ]
    users = [record(f"users-{n}", users=n, ttft_p50_ms=5.0 * n, itl_p99_ms=3.0) for n in (10, 9)]
    newer = record("users-9", users=9, ttft_p50_ms=77.0, itl_p99_ms=3.0)
    append_jsonl(file, [*users, *grid, newer, record("users-1", "n", users=1)])
    assert suite.main(["--report", str(file)]) == 0
    text = file.with_suffix(".md").read_text()
    assert text in capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith(("**", "| "))] == [
        "**m, A card**, grid, bfloat16",
        "| batch | prompt | ms to all first tokens | ms of a decode step |",
        "| --- | --- | --- | --- |",
        "| 2 | 8 | 1 | 2 |",
        "| 4 | 8 | 1 | 2 |",
        "**m, A card**, users, bfloat16",
        "| users | TTFT p50, ms | ITL p99, ms |",
        "| --- | --- | --- |",
        "| 9 | 77 | 3 |",
        "| 10 | 50 | 3 |",
        "**n, A card**, users, bfloat16",
        "| users |",
        "| --- |",
        "| 1 |",
    ]
    with file.with_suffix(".csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == 5
