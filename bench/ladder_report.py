"""The ladder's rungs as a table, out of the records of `bench/ladder.py`."""

from __future__ import annotations

from quire.bench.record import BenchRecord, number, read_jsonl
from tables import RESULTS, table

_PREFIX = "ladder:"


def load() -> list[BenchRecord]:
    """Returns the records of all machines."""
    files = sorted(RESULTS.glob("*_ladder.jsonl"))
    return [record for file in files for record in read_jsonl(file)]


def rungs(records: list[BenchRecord]) -> str:
    """Returns a row for each rung, a column for each model and machine: output tokens a second as a
    multiple of the first rung's. Of records of the same the latest counts."""
    found: dict[str, dict[str, BenchRecord]] = {}
    for record in records:
        if record.case.startswith(_PREFIX):
            machine = f"{record.model}, {record.card}"
            found.setdefault(record.case.removeprefix(_PREFIX), {})[machine] = record
    machines = list(dict.fromkeys(name for row in found.values() for name in row))
    rows = []
    for rung, row in found.items():
        cells = [
            f"{number(row[name].metrics['to_naive'])} ×" if name in row else "–"
            for name in machines
        ]
        rows.append([rung, *cells])
    return table(["rung", *machines], rows) if rows else ""
