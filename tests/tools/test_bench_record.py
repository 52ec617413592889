from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.tools.bench.record import append_jsonl, format_table, make_record, read_jsonl


def test_records_survive_a_file(tmp_path: Path) -> None:
    record = make_record("b1", {"output_tok_s": 12.5}, model="m", settings={"dtype": "float32"})
    file = tmp_path / "r.jsonl"
    append_jsonl(file, [record])
    append_jsonl(file, [record])
    assert read_jsonl(file) == [record, record]
    assert record.versions["quire"]
    assert record.date.endswith("+00:00")
    assert record.card


def test_bad_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"case": "x"}\n{"model": 1}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_jsonl(file)


def test_table_has_a_column_per_metric() -> None:
    records = [
        make_record("a", {"x_us": 1.0}),
        make_record("b", {"x_us": 123.456, "y": 0.01234}, model="m"),
    ]
    lines = format_table(records).splitlines()
    assert lines[0].split() == ["case", "model", "x_us", "y"]
    assert lines[2].split() == ["a", "1"]
    assert lines[3].split() == ["b", "m", "123.5", "0.0123"]
