"""The suite's records as lines, Markdown and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.tools.bench import plots
from quire.tools.bench.record import BenchRecord, number
from tables import table

GRID = {
    "rows": "batch", "prompt_tokens": "prompt", "prefill_ms": "ms to all first tokens",
    "prefill_tok_s": "prompt tok/s", "prefill_mfu_percent": "MFU, %",
    "decode_step_ms": "ms of a decode step", "decode_tok_s": "tok/s",
    "bandwidth_percent": "bandwidth, %", "gpu_watts": "W",
}  # fmt: skip
_TIMES = {"ttft": "ms to the first token", "itl": "ms between tokens"}
_PERCENTILES = (50, 95, 99)
USERS = {
    "users": "users", "output_tok_s": "tok/s",
    **{f"{of}_p{p}_ms": f"{of.upper()} p{p}, ms" for of in _TIMES for p in _PERCENTILES},
    "bandwidth_percent": "bandwidth, %", "gpu_utilization_percent": "GPU busy, %", "gpu_watts": "W",
    "joules_per_token": "J per token",
}  # fmt: skip
_KINDS = {"grid": GRID, "users": USERS}


def kind(record: BenchRecord) -> str:
    return record.case.partition("-")[0]


def order(record: BenchRecord) -> tuple[Any, ...]:
    """Returns the place of a record: by card, model and kind, then by size."""
    sizes = record.metrics.get("prompt_tokens", 0), record.metrics.get("rows", 0)
    users = record.metrics.get("users", 0)
    return record.card, record.model, kind(record), users, *(() if users else sizes)


def line(record: BenchRecord) -> str:
    """Returns one line for the screen."""
    shown = [
        f"{words} {number(record.metrics[name])}"
        for name, words in _KINDS[kind(record)].items()
        if name in record.metrics
    ]
    return f"{record.model} {record.case}: {'; '.join(shown)}"


def groups(records: Sequence[BenchRecord]) -> Iterator[tuple[str, str, list[BenchRecord]]]:
    """Yields (model and card, kind, records) of each table."""
    found: dict[tuple[str, str], list[BenchRecord]] = {}
    for record in records:
        found.setdefault((f"{record.model}, {record.card}", kind(record)), []).append(record)
    for (name, of), own in found.items():
        yield name, of, own


def markdown(records: Sequence[BenchRecord]) -> str:
    """Returns a table for each model and kind; columns that nothing fills are left out."""
    parts = []
    for name, of, own in groups(records):
        columns = [m for m in _KINDS[of] if any(m in record.metrics for record in own)]
        rows = [[number(r.metrics[m]) if m in r.metrics else "" for m in columns] for r in own]
        about = own[-1]
        limits = about.settings.get("ceilings")
        given = (
            ""
            if limits is None
            else (
                f", of {limits['memory_tb_s']:.3g} TB/s and {limits['matmul_tflop_s']:.3g} TFLOP/s "
                f"({limits['origin']})"
            )
        )
        versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
        parts.append(
            f"**{name}**, {of}, {about.settings['dtype']}{given}\n\n"
            + table([_KINDS[of][m] for m in columns], rows)
            + f"\n{versions}, {about.date[:10]}.\n"
        )
    return "\n".join(parts)


def plot(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws four panels for each model: the time of a decode step and its share of the bandwidth
    by batch, a line for each length of prompt; times to the first token and between tokens by
    users, a line for each percentile. A model without a grid has no panels of it."""
    from matplotlib.figure import Figure

    found = list(groups(records))
    names = list(dict.fromkeys(name for name, *_ in found))
    figure = Figure(figsize=(17, 3.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 4, squeeze=False)
    for name, of, own in found:
        row = panels[names.index(name)]
        if of == "grid":
            _grid_panels(row[:2], own)
        else:
            _users_panels(row[2:], own)
        drawn = [panel for panel in row if panel.lines]
        if drawn:
            drawn[0].set_title(name)
    for panel in panels.flat:
        if panel.lines:
            _label_axis(panel)
        else:
            panel.remove()
    for panel in figure.axes:
        plots.label_lines(panel)
    plots.save(figure, path)


def _grid_panels(panels: Sequence[Any], records: Sequence[BenchRecord]) -> None:
    for panel, metric in zip(panels, ("decode_step_ms", "bandwidth_percent"), strict=True):
        for place, prompt in enumerate(sorted({r.metrics["prompt_tokens"] for r in records})):
            some = [r for r in records if r.metrics["prompt_tokens"] == prompt]
            _line(panel, some, "rows", metric, f"{prompt:,g} tokens", place)
        panel.set_xlabel("batch")
        panel.set_ylabel(GRID[metric])
        panel.set_ylim(bottom=0)


def _users_panels(panels: Sequence[Any], records: Sequence[BenchRecord]) -> None:
    for panel, (times, unit) in zip(panels, _TIMES.items(), strict=True):
        for place, p in enumerate(_PERCENTILES):
            _line(panel, records, "users", f"{times}_p{p}_ms", f"p{p}", place)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_xlabel("users")
        panel.set_ylabel(unit)


def _label_axis(panel: Any) -> None:
    """Numbers an axis of powers of two."""
    shown = sorted({float(x) for line in panel.lines for x in line.get_xdata()})
    panel.set_xscale("log", base=2)
    panel.set_xticks(shown, [f"{x:g}" for x in shown])


def _line(
    panel: Any, records: Sequence[BenchRecord], x: str, y: str, label: str, place: int
) -> None:
    points = [(r.metrics[x], r.metrics[y]) for r in records if y in r.metrics]
    if points:
        color = plots.COLORS[place]
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, color=color)
