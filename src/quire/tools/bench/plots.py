"""Draws pictures of records. The extra `plots` installs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import OPTIMIZATIONS
from quire.tools.bench import ablation, startup
from quire.tools.bench.record import BenchRecord

_RATE = "output tokens/s"
_TIMES = {"ttft": "first token", "itl": "between tokens", "e2e": "whole answer"}
_TEXT = "#7d8590"
"""Color of text and axes. It is legible on a light and on a dark page."""
COLORS = ("#2f81f7", "#d4761c", "#2da44e", "#a371f7", "#bf3989", "#57606a", "#b59f00", "#1b7c83")
"""Colors of series, in their order."""
_NO_DATE = {"svg": {"Date": None}}
"""Metadata of a picture, by its kind: no date, so that equal pictures are equal files."""
_LINE_OF_TEXT = 10.0
"""Distance of two names beside lines, in points."""


def throughput(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws sweeps as lines over the setting that varies, and other cases as bars.

    Tokens/s and TTFT have separate panels."""
    swept = [record for record in records if "sweep" in record.settings]
    plain = [record for record in records if "sweep" not in record.settings]
    axes = list(dict.fromkeys(record.settings["sweep"] for record in swept))
    rates = [(r.case, r.metrics["output_tok_s"]) for r in plain if "output_tok_s" in r.metrics]
    waits = [
        (name.removesuffix("_ms").replace("ttft_", "TTFT "), value)
        for r in plain
        for name, value in r.metrics.items()
        if name.startswith("ttft_")
    ]
    bars = [(rates, _RATE)] * bool(rates) + [(waits, "ms")] * bool(waits)
    figure, panels = _panels(len(axes) + len(bars), _title(records))
    for axis, panel in zip(axes, panels, strict=False):
        points = sorted(
            (r.settings[axis], r.metrics["output_tok_s"])
            for r in swept
            if r.settings["sweep"] == axis
        )
        panel.plot(*zip(*points, strict=True), marker="o")
        panel.set_xscale("log", base=2)
        panel.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        panel.set_xlabel({"rows": "requests at once", "input_len": "prompt tokens"}[axis])
        panel.set_ylabel(_RATE)
        _from_zero(panel)
    for (values, unit), panel in zip(bars, panels[len(axes) :], strict=True):
        _bars(panel, [name for name, _ in values], [value for _, value in values], unit)
    save(figure, path)


def online(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws throughput, and the times that users see, over the number of streams."""
    figure, panels = _panels(3, _title(records))
    cases = [record.case.removeprefix("serve-") for record in records]
    rates = [record.metrics.get("output_tok_s", float("nan")) for record in records]
    panels[0].plot(cases, rates, marker="o")
    panels[0].set_ylabel(_RATE)
    for panel, kind in zip(panels[1:], ("ttft", "itl"), strict=True):
        names = dict.fromkeys(m for r in records for m in r.metrics if m.startswith(f"{kind}_p"))
        for name in names:
            values = [record.metrics.get(name, float("nan")) for record in records]
            panel.plot(cases, values, marker="o", label=name.split("_")[1])
        panel.set_ylabel(f"{_TIMES[kind]}, ms")
        name_series(panel)
    for panel in panels:
        panel.set_xlabel("streams")
        _from_zero(panel)
    save(figure, path)


def rates(records: Sequence[BenchRecord], path: Path, *, limits: Mapping[str, float]) -> None:
    """Draws the times that users see over the request rate, with their limits as dashed lines."""
    figure, panels = _panels(len(limits), _title(records))
    ordered = sorted(records, key=lambda record: record.settings["request_rate"])
    at = [record.settings["request_rate"] for record in ordered]
    for panel, (kind, limit) in zip(panels, limits.items(), strict=True):
        for name in (n for n in ordered[0].metrics if n.startswith(f"{kind}_p")):
            values = [record.metrics.get(name, float("nan")) for record in ordered]
            panel.plot(at, values, marker="o", label=name.split("_")[1])
        panel.axhline(limit, linestyle="--", color="#dc2626")
        panel.set_yscale("log")
        panel.set_title(_TIMES.get(kind, kind))
        panel.set_ylabel("ms")
        panel.set_xlabel("requests/s")
        panel.legend()
    save(figure, path)


def beside(
    rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]],
    names: tuple[str, str],
    path: Path,
) -> None:
    """Draws throughput and median time to the first token of two engines under the same loads.

    Args:
        rows: for each load, its label, the metrics of the first engine and those of the second.
        names: the engines' names.
    """
    figure, panels = _panels(2, "One NVIDIA H200, prompts of 512 tokens, 256 out, streamed")
    kinds = (("output_tok_s", _RATE), ("ttft_p50_ms", "median ms to the first token"))
    for panel, (metric, unit) in zip(panels, kinds, strict=True):
        for index, (name, color) in enumerate(zip(names, ("#8c959f", COLORS[0]), strict=True)):
            heights = [engines[index][metric] for _, *engines in rows]
            at = [place + 0.4 * (index - 0.5) for place in range(len(rows))]
            bars = panel.bar(at, heights, width=0.4, label=name, color=color)
            panel.bar_label(bars, labels=[f"{height:,.0f}" for height in heights], fontsize=7)
        panel.set_xticks(range(len(rows)), [label for label, *_ in rows], fontsize=7)
        panel.set_ylabel(unit)
        name_series(panel)
    save(figure, path)


def latency(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws percentiles of the times to the first token, between tokens, and to the last one."""
    figure, panels = _panels(3, _title(records))
    cases = [record.case.removeprefix("latency-") for record in records]
    for panel, (kind, title) in zip(panels, _TIMES.items(), strict=True):
        names = dict.fromkeys(m for r in records for m in r.metrics if m.startswith(f"{kind}_p"))
        for name in names:
            values = [record.metrics.get(name, float("nan")) for record in records]
            panel.plot(cases, values, marker="o", linestyle="", label=name.split("_")[1])
        panel.set_xlabel("prompt x output tokens")
        panel.set_ylabel(f"{title}, ms")
        _from_zero(panel)
        panel.tick_params(axis="x", rotation=30)
        if names:
            name_series(panel)
    save(figure, path)


def phases(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws one bar per start, with its phases."""
    figure, (panel,) = _panels(1, _title(records))
    names = [f"{record.model}\n{record.case}" for record in records]
    left = [0.0] * len(records)
    for phase in startup.PHASES:
        widths = [record.metrics.get(phase, 0.0) for record in records]
        color = COLORS[startup.PHASES.index(phase) % len(COLORS)]
        panel.barh(names, widths, left=left, label=phase.removesuffix("_s"), color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.set_xlabel("seconds to the first token")
    name_series(panel)
    save(figure, path)


def switches(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws the speed without each optimization as one group of bars per case."""
    table = ablation.lines(records)
    figure, (panel,) = _panels(1, _title(records), width=9.0)
    shown = [name for name in OPTIMIZATIONS if any(name in line.off for line in table)]
    width = 0.8 / max(1, len(shown))
    for place, switch in enumerate(shown):
        at = [i + place * width for i in range(len(table))]
        speeds = [
            100 * line.speed(switch) if switch in line.off else float("nan") for line in table
        ]
        panel.bar(at, speeds, width, label=f"without {switch}", color=COLORS[place])
    panel.axhline(100, color=_TEXT, linewidth=0.8)
    middle = (len(shown) - 1) * width / 2
    panel.set_xticks([i + middle for i in range(len(table))], [line.label for line in table])
    panel.set_ylabel("% of the speed with everything on")
    name_series(panel)
    save(figure, path)


def quality(records: Sequence[BenchRecord], path: Path) -> None:
    """Draws each format's divergence from the original, with a panel for each text.

    A label gives the change of perplexity. Bars are red if it is more than 5 %."""
    texts = list(dict.fromkeys(record.settings["text"] for record in records))
    figure, panels = _panels(len(texts), _title(records), width=7.0)
    for panel, text in zip(panels, texts, strict=True):
        shown = [record for record in records if record.settings["text"] == text][::-1]
        changes = [record.metrics["change_percent"] for record in shown]
        heights = [record.metrics["kl"] for record in shown]
        colors = [COLORS[0] if change <= 5 else "#da3633" for change in changes]
        bars = panel.barh([record.case for record in shown], heights, color=colors)
        labels = [f" perplexity {change:+.2f} %" for change in changes]
        panel.bar_label(bars, labels=labels, fontsize=7)
        panel.set_xscale("log")
        panel.set_xlim(min(heights) / 3, 20 * max(heights))
        panel.set_title(text, fontsize="small")
        panel.set_xlabel("KL divergence from the original, nats per token")
        panel.tick_params(axis="y", labelsize=7)
    save(figure, path)


def _panels(count: int, title: str, width: float = 6.0) -> tuple[Any, list[Any]]:
    # A figure without pyplot, which would look for a display and keep the figure in memory.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * max(1, count), 4.5), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, max(1, count), squeeze=False)[0])


def _bars(panel: Any, names: list[str], values: list[float], unit: str) -> None:
    places = range(len(names))
    panel.bar_label(panel.bar(places, values), fmt="{:,.4g}")
    panel.set_xticks(places, names, rotation=20)
    panel.set_ylabel(unit)


def name_series(panel: Any, columns: int = 5) -> None:
    """Writes the names of the series above the panel, in the colors of the series."""
    panel.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize="small",
        handlelength=0.8, handletextpad=0.4, labelcolor="linecolor",
    )  # fmt: skip


def label_lines(panel: Any) -> None:
    """Writes the names of lines at the panel's right edge, in their colors and as high as the lines
    end. Names keep a distance."""
    figure = panel.get_figure()
    figure.draw_without_rendering()
    low, high = panel.get_window_extent().get_points()[:, 1]
    names = [line for line in panel.lines if not line.get_label().startswith("_")]
    ends = {line: panel.transData.transform(line.get_xydata()[-1])[1] for line in names}
    free = -math.inf
    for line in sorted(names, key=lambda line: float(ends[line])):
        place = max(float(ends[line]), free)
        free = place + _LINE_OF_TEXT * figure.dpi / 72
        panel.annotate(
            line.get_label(), (1, (place - low) / (high - low)), xycoords="axes fraction",
            xytext=(5, 0), textcoords="offset points", va="center", color=line.get_color(),
            fontsize="small", annotation_clip=False,
        )  # fmt: skip


def _from_zero(panel: Any) -> None:
    if panel.lines:
        panel.set_ylim(0, 1.08 * panel.dataLim.ymax)


def _title(records: Sequence[BenchRecord]) -> str:
    models = ", ".join(dict.fromkeys(record.model for record in records))
    cards = ", ".join(dict.fromkeys(record.card for record in records))
    return f"{models} on {cards}"


def save(figure: Any, path: Path) -> None:
    """Draws axes and text in one style, on a transparent ground, and writes a picture: PNG, or what
    the file's name ends in."""
    title = figure.get_suptitle() if hasattr(figure, "get_suptitle") else ""
    if title:
        figure.suptitle(title, color=_TEXT, fontsize="medium")
    for panel in figure.axes:
        panel.set_facecolor("none")
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[:].set_color(_TEXT)
        panel.tick_params(colors=_TEXT, which="both")
        panel.title.set_color(_TEXT)
        for text in (panel.xaxis.label, panel.yaxis.label, *panel.texts):
            # The names of lines have colors of their own.
            if text.get_color() not in COLORS:
                text.set_color(_TEXT)
    kind = path.suffix.removeprefix(".") or "png"
    figure.savefig(path, format=kind, dpi=120, transparent=True, metadata=_NO_DATE.get(kind))
