"""Tables of engines that ran one after the other on one machine, for `report.py`.

`bench/results/peers_newest.json` has the figures: a list of machines, each with versions, setup and
the figures of each model and case. Rates are output tokens per second, TTFT is in milliseconds, and
the start of an engine in seconds.
"""

from __future__ import annotations

import json
from typing import Any

from tables import RESULTS, table

OURS = "Quire"
_START = "start of the engine"
SUMMARY = (
    ("Qwen3-0.6B", "b1", "Qwen3-0.6B, one stream, tok/s"),
    ("Qwen3-0.6B", "nano", "Qwen3-0.6B, 256 requests offline, tok/s"),
    ("Qwen3-0.6B", "TTFT 2048", "Qwen3-0.6B, first token of a prompt of 2048, ms"),
    ("Qwen3-8B", "b1 (256 out)", "Qwen3-8B, one stream, tok/s"),
    ("Qwen3-8B", "b64", "Qwen3-8B, 64 requests offline, tok/s"),
    ("Qwen3-8B", "TTFT 8192", "Qwen3-8B, first token of a prompt of 8192, ms"),
    ("Qwen3-8B FP8", "b64", "the same with 8-bit floats (`w8a8_fp8`), 64 requests, tok/s"),
    ("Qwen3-30B-A3B", "b1 (256 out)", "Qwen3-30B-A3B (experts), one stream, tok/s"),
    ("Qwen3-8B", _START, "Qwen3-8B, start of the engine, s"),
)
"""Rows of the README: model, case, label. Quire is behind in the last one."""
COLUMNS = ("nano", "b64", "b1", "TTFT 512", "TTFT 2048", "TTFT 8192", _START)
"""Cases of the short table. `b1` has 512 or 256 output tokens."""

Machine = dict[str, Any]


def load() -> list[Machine]:
    machines: list[Machine] = json.loads((RESULTS / "peers_newest.json").read_text())
    return machines


def ratio(case: str, figures: dict[str, float]) -> float | None:
    """Returns how many times as good Quire is as the best other engine."""
    others = [value for name, value in figures.items() if name != OURS]
    if not others or OURS not in figures:
        return None
    if case.startswith("TTFT") or case == _START:
        return min(others) / figures[OURS]
    return figures[OURS] / max(others)


def shown(value: float | None, case: str) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if case.startswith("TTFT") or case == _START else f"{value:,.0f}"


def machines(found: list[Machine]) -> str:
    """Returns one table for each machine: all figures, and the ratio to the best other engine."""
    parts = []
    for machine in found:
        names = list(machine["versions"])
        rows = []
        for model, cases in machine["models"].items():
            for case, figures in cases.items():
                cells = [shown(figures.get(name), case) for name in names]
                rows.append([model, case, *cells, _times(case, figures)])
        header = [f"{name} {version}" for name, version in machine["versions"].items()]
        header = ["model", "case", *header, "to the best other"]
        parts.append(f"{table(header, rows)}\n{_source(machine)}\n")
    return "\n".join(parts)


def newest(found: list[Machine]) -> str:
    """Returns Quire's figures by machine and model, with ratios to the best other engine."""
    rows = []
    for machine in found:
        for model, cases in machine["models"].items():
            if "b1 (256 out)" in cases:
                cases = {**cases, "b1": cases["b1 (256 out)"]}
            cells = [
                f"{shown(cases[case][OURS], case)} ({_times(case, cases[case])})"
                if case in cases and ratio(case, cases[case]) is not None
                else "–"
                for case in COLUMNS
            ]
            if any(cell != "–" for cell in cells):
                rows.append([machine["card"].split()[1], model, *cells])
    header = ["card", "model", *COLUMNS]
    return table(header, rows) + "\n" + "".join(f"- {_source(machine)}\n" for machine in found)


def _times(case: str, figures: dict[str, float]) -> str:
    times = ratio(case, figures)
    return "–" if times is None else f"{times:.2f} ×"


def _source(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['card']}, {machine['date']}, {versions}: {machine['setup']}."


def summary(found: list[Machine]) -> str:
    """Returns the README's table: the first machine's engines beside each other."""
    machine = found[0]
    names = list(machine["versions"])
    rows = []
    for model, case, label in SUMMARY:
        figures = machine["models"][model][case]
        rows.append([label, *(shown(figures.get(name), case) for name in names)])
    header = [f"{n} {v}" if n != OURS else n for n, v in machine["versions"].items()]
    return table(["", *header], rows)
