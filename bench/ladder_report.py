"""The ladder's rungs as a table and a picture, out of the records of `bench/ladder.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.bench.record import BenchRecord, number, read_jsonl
from tables import RESULTS, table

_PREFIX = "ladder:"
_LINEAR = 20.0
"""The largest ratio that is drawn on a linear axis."""


def load() -> list[BenchRecord]:
    """Returns the records of all machines."""
    files = sorted(RESULTS.glob("*_ladder.jsonl"))
    return [record for file in files for record in read_jsonl(file)]


def climbs(records: Sequence[BenchRecord]) -> dict[str, dict[str, float]]:
    """Returns each rung's output tokens a second as a multiple of the first rung's, by model and
    machine, then by rung. Of records of the same the latest counts."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record.case.startswith(_PREFIX):
            own = found.setdefault(f"{record.model}, {record.card}", {})
            own[record.case.removeprefix(_PREFIX)] = record.metrics["to_naive"]
    return found


def order(found: dict[str, dict[str, float]]) -> list[str]:
    """Returns all rungs from the first to the last: some are skipped on some machines."""
    longest = sorted(found.values(), key=len, reverse=True)
    return list(dict.fromkeys(rung for own in longest for rung in own))


def rungs(records: Sequence[BenchRecord]) -> str:
    """Returns a row for each rung and a column for each model and machine, "" without records."""
    found = climbs(records)
    rows = [
        [rung, *(f"{number(own[rung])} ×" if rung in own else "–" for own in found.values())]
        for rung in order(found)
    ]
    return table(["rung", *found], rows) if rows else ""


def plot(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws the same as bars."""
    from matplotlib.figure import Figure

    found = climbs(records)
    names = order(found)
    height = 0.25 * len(names) * max(1.2, len(found)) + 1
    figure = Figure(figsize=(8, height), layout="constrained")
    panel = figure.subplots()
    for place, (machine, own) in enumerate(found.items()):
        rows = [names.index(name) + 0.8 * (place + 0.5) / len(found) - 0.4 for name in own]
        bars = panel.barh(rows, list(own.values()), 0.8 / len(found), label=machine)
        panel.bar_label(bars, [f"{value:.3g} ×" for value in own.values()], padding=2, fontsize=8)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    if max(value for own in found.values() for value in own.values()) > _LINEAR:
        panel.set_xscale("log")
    panel.margins(x=0.1)
    panel.set_xlabel("output tokens per second, as a multiple of naive recompute")
    panel.legend(loc="lower right")
    figure.savefig(path, dpi=110)
