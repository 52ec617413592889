"""Plots of lessons, where matplotlib is there (the `plots` extra)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_option(options: argparse.ArgumentParser) -> None:
    """Adds `--plot FILE`."""
    options.add_argument("--plot", type=Path, metavar="FILE", help="save a plot to this file")


def lines(
    file: Path | None,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    *,
    log: str = "",
) -> None:
    """Saves lines over `x` to a file; does nothing without one.

    labels: of the axes. log: the axes, of "x" and "y", that are logarithmic, to the base 2 and 10.
    """
    if file is None or (figure := _figure()) is None:
        return
    panel = figure.subplots()
    for name, values in series.items():
        panel.plot(x, values, marker="o", markersize=4, label=name)
    panel.set_xlabel(labels[0])
    panel.set_ylabel(labels[1])
    panel.grid(alpha=0.3)
    if "x" in log:
        panel.set_xscale("log", base=2)
        panel.set_xticks(x, [f"{value:g}" for value in x])
    if "y" in log:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    if len(series) > 1:
        panel.legend()
    figure.savefig(file, dpi=110)
    print(f"plot: {file}")


def roofline(
    file: Path | None, bandwidth: float, rate: float, points: Mapping[str, tuple[float, float]]
) -> None:
    """Saves a roofline, and points under it that have their names beside them.

    Args:
        bandwidth: bytes/s.
        rate: FLOP/s.
        points: (FLOP/byte, FLOP/s) by name.
    """
    if file is None or (figure := _figure()) is None:
        return
    panel = figure.subplots()
    ridge = rate / bandwidth
    low = min(each[0] for each in points.values()) / 3
    high = 3 * max(ridge, *(each[0] for each in points.values()))
    ends = (low, ridge, high)
    panel.plot(ends, [min(rate, bandwidth * each) for each in ends], color="0.4")
    panel.annotate(f"{rate / 1e9:,.0f} GFLOP/s", (high, rate), (0, 4), ha="right", **_OFFSET)
    start = f"{bandwidth / 1e9:,.0f} GB/s"
    panel.annotate(start, (low, low * bandwidth), (2, 12), rotation=33, **_OFFSET)
    for index, (name, (intensity, reached)) in enumerate(points.items()):
        panel.plot(intensity, reached, "o", markersize=5, color=f"C{index % 10}")
        panel.annotate(name, (intensity, reached), (7, -3), **_OFFSET)
    panel.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    panel.set_ylim(top=3 * rate)
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    print(f"plot: {file}")


_OFFSET: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}


def _figure() -> Any:
    """Returns a new figure; None, and says so, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (`make learn`, or pip install 'quire[plots]')")
        return None
    return Figure(figsize=(6.4, 3.6), layout="constrained")
