"""The scheduler's benchmark runs and reports all its metrics; their values are not checked."""

from __future__ import annotations

from quire.tools.bench.scheduler import TARGETS_AT_256, run, table


def test_records_and_table() -> None:
    records = run((1, 256), num_blocks=100_000, steps=64)
    assert [r["running"] for r in records] == [1, 256]
    for record in records:
        assert all(record[name] > 0 for name in (*TARGETS_AT_256, "create_us"))
    assert "within_target" in records[1]
    text = table(records)
    assert "µs per changed request" in text
    assert "target plan 100 µs, update 150 µs" in text
