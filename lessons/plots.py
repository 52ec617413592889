"""Plots of lessons, where matplotlib is there (the `plots` extra)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path


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
    if file is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'quire[plots]')")
        return
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
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
