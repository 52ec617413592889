"""The ladder's rungs as a table and a picture, out of the records of `bench/ladder.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.tools.bench import plots
from quire.tools.bench.record import BenchRecord, number, read_jsonl
from tables import RESULTS, table

_PREFIX = "ladder:"
PUBLISHED = {
    "KV cache": "2.2 × at 1000 tokens (GPT-2, A100)",
    "static batch": "118 × at batch 512 (GPT-2, A100)",
    "paged": "15 × one at a time at batch 8 (T4); 8.7 × less memory at batch 256, 9 × at 512; "
    "11.1 × one at a time with 64 users (GPT-2, A100)",
    "prefix cache": "2.56 × sooner to the first token (Qwen2.5-1.5B)",
    "speculation": "1.7 to 2.2 × on chat (Llama-7B)",
}
"""Figures that other small engines have published of a rung."""
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
        # Without the first rung there is no ratio to it.
        if record.case.startswith(_PREFIX) and "to_naive" in record.metrics:
            own = found.setdefault(f"{record.model}, {record.card}", {})
            own[record.case.removeprefix(_PREFIX)] = record.metrics["to_naive"]
    return found


def order(found: dict[str, dict[str, float]]) -> list[str]:
    """Returns all rungs from the first to the last: some are skipped on some machines."""
    longest = sorted(found.values(), key=len, reverse=True)
    return list(dict.fromkeys(rung for own in longest for rung in own))


def rungs(records: Sequence[BenchRecord]) -> str:
    """Returns a row for each rung, and a column for each model and machine and for what others have
    published; "" without records."""
    found = climbs(records)
    rows = []
    for rung in order(found):
        ratios = [f"{number(own[rung])} ×" if rung in own else "–" for own in found.values()]
        rows.append([rung, *ratios, PUBLISHED.get(rung, "")])
    return table(["rung", *found, "published by others"], rows) if rows else ""


def plot(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws the same as bars."""
    from matplotlib.figure import Figure

    found = climbs(records)
    names = order(found)
    height = 0.16 * len(names) * max(1.2, len(found)) + 1
    figure = Figure(figsize=(8, height), layout="constrained")
    panel = figure.subplots()
    for place, (machine, own) in enumerate(found.items()):
        rows = [names.index(name) + 0.8 * (place + 0.5) / len(found) - 0.4 for name in own]
        color = plots.COLORS[place % len(plots.COLORS)]
        bars = panel.barh(rows, list(own.values()), 0.8 / len(found), label=machine, color=color)
        panel.bar_label(bars, [f"{value:.3g} ×" for value in own.values()], padding=2, fontsize=8)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    if max(value for own in found.values() for value in own.values()) > _LINEAR:
        panel.set_xscale("log")
    panel.margins(x=0.1, y=0.01)
    panel.set_xlabel("output tokens per second, as a multiple of naive recompute")
    plots.name_series(panel, columns=2)
    plots.save(figure, path)
