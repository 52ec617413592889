"""Ablation: the same cases with everything on, then with one optimization off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import OPTIMIZATIONS
from quire.errors import ConfigError
from quire.tools.bench.record import BenchRecord

PREFIX = "ablation:"
"""Prefix of the case's name in records. `settings["off"]` names the optimization that was off, or
is "" if all were on."""


def without(fields: Mapping[str, Any], switch: str) -> dict[str, Any]:
    """Returns the engine's settings with `switch` off as well.

    Raises:
        ConfigError: the switch is unknown.
    """
    if switch not in OPTIMIZATIONS:
        raise ConfigError(
            f"unknown switch {switch!r}; expected one of: {', '.join(OPTIMIZATIONS)}", "off"
        )
    return {**fields, "disable": (*fields.get("disable", ()), switch)}


def switches_of(tensor_parallel_size: int) -> tuple[str, ...]:
    """Returns the optimizations of an engine with this number of ranks per layer."""
    alone = tensor_parallel_size == 1
    return tuple(name for name in OPTIMIZATIONS if not (alone and name == "symmetric"))


def figures(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics by which a case is compared: output tokens/s, or ms to the first
    token."""
    if "output_tok_s" in metrics:
        return {"output_tok_s": metrics["output_tok_s"]}
    return {name: value for name, value in metrics.items() if name.startswith("ttft_")}


@dataclass(frozen=True, slots=True)
class Line:
    """One figure with everything on, and without each switch.

    Attributes:
        label: the case and the figure.
        unit: unit of the figure.
        on: the figure with everything on.
        off: the figure by the switch that was off.
    """

    label: str
    unit: str
    on: float
    off: dict[str, float]

    def speed(self, switch: str) -> float:
        value = self.off[switch]
        return value / self.on if self.unit == "tok/s" else self.on / value


def lines(records: Sequence[BenchRecord]) -> list[Line]:
    """Returns the figures measured with everything on and at least once with something off."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if not record.case.startswith(PREFIX):
            continue
        case = record.case.removeprefix(PREFIX)
        for name, value in figures(record.metrics).items():
            found.setdefault((case, name), {})[record.settings["off"]] = value
    table = []
    for (case, name), values in found.items():
        on = values.pop("", None)
        if on is None or not values:
            continue
        ttft = name.startswith("ttft_")
        label = f"TTFT {name.split('_')[1]}" if ttft else case
        table.append(Line(label, "ms" if ttft else "tok/s", on, values))
    return table


def markdown(table: Sequence[Line]) -> str:
    """Returns a table of one row per figure: with everything on, then the speed without each
    switch."""
    switches = [name for name in OPTIMIZATIONS if any(name in line.off for line in table)]
    rows = ["| case | everything on | " + " | ".join(f"without {s}" for s in switches) + " |"]
    rows.append("| --- " * (2 + len(switches)) + "|")
    for line in table:
        cells = [
            f"{_shown(line.off[s], line.unit)} ({100 * (line.speed(s) - 1):+.0f} %)"
            if s in line.off
            else ""
            for s in switches
        ]
        shown = f"{_shown(line.on, line.unit)} {line.unit}"
        rows.append(f"| {line.label} | {shown} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _shown(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "ms" else f"{value:,.0f}"
