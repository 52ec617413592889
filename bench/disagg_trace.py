"""Finds why steps of decoding streams take longer, in their engine's trace (`--trace-dir`).

A step of the streams alone grows with their contexts. A line through its times before and after the
flood describes this growth. The flood causes the time of a step above that line. A step's period is
the time from the end of the previous step to its own end. It consists of the device's time for the
step and the time in which the device waited for the host.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Window = tuple[float, float]
"""Begin and end, in seconds of the monotonic clock."""

KINDS = ("streams alone", "their blocks move", "a newcomer decodes", "a prompt's rest")
_HOST = ("plan", "submit", "update")
_OUTLIER = 3.0
"""Steps of more than so many times the median are no part of the line."""


@dataclass(frozen=True)
class Step:
    """A step on the device.

    Attributes:
    end: in seconds of the monotonic clock.
    period: ms from the end of the previous step.
    device: ms of the step on the device.
    idle: ms in which the device waited for the host.
    host: ms of the loop since it planned the previous step, without waits for the device.
    moved: blocks that the plan moves.
    """

    number: int
    end: float
    period: float
    device: float
    idle: float
    host: float
    rows: int
    tokens: int
    moved: int

    def kind(self, streams: int) -> str:
        if self.tokens > self.rows:
            return KINDS[3]
        if self.rows > streams:
            return KINDS[2]
        return KINDS[1] if self.moved else KINDS[0]


def read_steps(folder: Path) -> list[Step]:
    """Returns the steps of an engine's trace, in order."""
    devices: dict[int, dict[str, float]] = {}
    busy: dict[int, float] = {}
    plans: dict[int, tuple[float, int]] = {}
    waits: dict[int, float] = {}
    for path in sorted(folder.glob("*.trace.json")):
        for line in path.read_text().splitlines():
            if not line.startswith("{"):
                continue
            event = json.loads(line.rstrip(",]"))
            args, name = event.get("args", {}), event["name"]
            number = args.get("step")
            if number is None:
                continue
            if name == "step":
                devices[number] = {**args, "end": event["ts"] + event["dur"]}
            elif name == "plan":
                moved = sum(args.get(f"blocks_{way}", 0) for way in ("in", "out"))
                plans[number] = event["ts"], moved
            elif name == "wait":
                waits[number] = event["dur"]
            if name in _HOST:
                busy[number] = busy.get(number, 0.0) + event["dur"]
    steps: list[Step] = []
    numbers = sorted(devices.keys() & plans.keys())
    for before, number in itertools.pairwise(numbers):
        device = devices[number]
        turn = plans[number][0] - plans[before][0]
        steps.append(
            Step(
                number,
                1e-6 * device["end"],
                1e-3 * (device["end"] - devices[before]["end"]),
                1e-3 * device["device_us"],
                1e-3 * device["idle_before_us"],
                1e-3 * max(0.0, turn - waits.get(before, 0.0)),
                int(device["requests"]),
                int(device["tokens"]),
                plans[number][1],
            )
        )
    return steps


def line_at_rest(steps: Sequence[Step], rests: Sequence[Window], streams: int) -> np.ndarray:
    """Returns the line (slope, begin) of periods of the streams alone by the steps' numbers."""
    alone = [
        each
        for each in steps
        if each.rows == each.tokens == streams
        and not each.moved
        and any(begin <= each.end <= end for begin, end in rests)
    ]
    periods = np.array([each.period for each in alone])
    kept = periods < _OUTLIER * np.median(periods)
    numbers = np.array([each.number for each in alone])
    return np.polyfit(numbers[kept], periods[kept], 1)


def causes(
    folder: Path, rests: Sequence[Window], flood: Window, streams: int
) -> tuple[dict[str, float], list[str]]:
    """Returns metrics of the steps under the flood, and a table of their causes."""
    steps = read_steps(folder)
    inside = [each for each in steps if flood[0] <= each.end <= flood[1]]
    line = line_at_rest(steps, rests, streams)
    expected = {each.number: float(np.polyval(line, each.number)) for each in inside}
    # Of steps that nothing disturbs, so of contexts that grow alone.
    grown = np.array(list(expected.values()))
    over = np.array([each.period - expected[each.number] for each in inside])
    ratio = np.array([each.period / expected[each.number] for each in inside])
    metrics = {
        "step_growth_p99_to_p50": float(np.percentile(grown, 99) / np.percentile(grown, 50)),
        "step_over_line_p50_ms": float(np.percentile(over, 50)),
        "step_over_line_p99_ms": float(np.percentile(over, 99)),
        "step_p99_to_p50_steady": float(np.percentile(ratio, 99) / np.percentile(ratio, 50)),
        "step_host_p99_ms": float(np.percentile([each.host for each in inside], 99)),
        "step_host_max_ms": max(each.host for each in inside),
    }
    rows = [
        f"{'steps under the flood':22}{'share':>8}{'period':>9}{'line':>8}{'over':>8}{'p99':>8}"
        f"{'device':>8}{'waits':>8}{'host':>8}{'most':>8}"
    ]
    tops = over >= np.percentile(over, 99)
    for kind in KINDS:
        chosen = [i for i, each in enumerate(inside) if each.kind(streams) == kind]
        if not chosen:
            continue
        found = [inside[i] for i in chosen]
        means = [
            np.mean([each.period for each in found]),
            np.mean(grown[chosen]),
            np.mean(over[chosen]),
            np.percentile(over[chosen], 99),
            np.mean([each.device for each in found]),
            np.mean([each.idle for each in found]),
            np.mean([each.host for each in found]),
            max(each.host for each in found),
        ]
        share = len(chosen) / len(inside)
        rows.append(
            f"{kind:22}{100 * share:7.1f}%{means[0]:9.2f}"
            + "".join(f"{value:8.2f}" for value in means[1:])
            + f"   {int(tops[chosen].sum())} of the {int(tops.sum())} longest"
        )
        metrics[f"over_{kind.replace(' ', '_').replace(chr(39), '')}_ms"] = float(means[2])
    return metrics, rows
