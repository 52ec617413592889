"""The prefix cache's benchmark runs and reports all its metrics; their values are not checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.tools.bench.cache import CASES, CacheCase, run, table
from quire.tools.bench.record import read_jsonl


def test_records_and_table() -> None:
    cases = (CacheCase("short", 100), CacheCase("hub", 150, shared=60))
    records = list(run(cases, num_blocks=500, requests=20))
    assert [name for name, _ in records] == ["short", "hub"]
    for _, found in records:
        assert found["cached_blocks"] > 400
        assert found["nodes"] > 10
        for part in ("match", "insert", "evict", "admit_known", "admit_new", "release"):
            assert found[f"{part}_us"] > 0
            assert found[f"{part}_median_us"] > 0
    text = table(records)
    assert "µs per request" in text
    assert "target of match, insert and evict 20 µs" in text


def test_few_blocks_still_keep_reused_prefixes() -> None:
    """With more prompts than the cache holds, the repeated ones are still cached."""
    ((_, found),) = run((CacheCase("long", 1000),), num_blocks=400, requests=40)
    assert found["cached_blocks"] > 300


def test_the_command_writes_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "quire.tools.bench.cache.run",
        lambda num_blocks: run(CASES[:1], num_blocks=num_blocks, requests=20),
    )
    file = tmp_path / "cache.jsonl"
    result = CliRunner().invoke(app, ["bench", "cache", "--blocks", "10000", "--output", str(file)])
    assert result.exit_code == 0, result.output
    (record,) = read_jsonl(file)
    assert record.case == "cache-1k"
    assert record.metrics["tokens"] == 1024
