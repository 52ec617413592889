"""The roofline: what a step must read and compute, and how long that takes on a card.

Run it from the repository's root: python -m lessons 6 [--mine FILE] [--plot FILE]
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from lessons import mine, plots
from lessons.common import Loaded, check, engine, load, own_model, parser, table
from quire import SamplingParams

CONFIGS = Path(__file__).parents[2] / "bench" / "configs"
BANDWIDTH, RATE = 4.25e12, 700e12  # of an H200, measured


def counted(model: Loaded, work: mine.Work, length: int) -> list[list[Any]]:
    """Runs steps of the reader's engine. Returns rows of a table: MFLOP predicted, and those of
    the matrix products that ran."""
    own, found = own_model(model), []
    core = mine.Engine(own, mine.PagedCache(own, count=64), budget=1024)
    for n in (1, 4):
        for i in range(n):
            core.add(mine.Request(f"{n}-{i}", list(range(100, 100 + length)), length + 2))
        for kind, row in (("prompts", ("", 0, length)), ("decode", ("", length, 1))):
            with FlopCounterMode(display=False) as counter:
                core.step()
            wanted, ran = work.flops([row] * n), counter.get_total_flops()
            found.append([f"{kind}, {n}", wanted / 1e6, ran / 1e6, 100 * (wanted / ran - 1)])
    return found


def shipped_profile(model: Loaded, length: int) -> list[list[Any]]:
    """Returns rows of a table: the ops in which a decode step of the shipped engine spends most."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops
    core, prompt = engine(model, enable_prefix_caching=False), np.arange(length, dtype=np.int32)
    core.add("a", prompt, SamplingParams(ignore_eos=True), max_total=length + 2)
    core.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        core.step()
    core.shutdown()
    events = sorted(profiler.key_averages(), key=lambda each: -each.self_cpu_time_total)
    whole = sum(each.self_cpu_time_total for each in events) / 100
    return [[each.key, each.count, each.self_cpu_time_total / whole] for each in events[:5]]


def decode_steps(sizes: list[int], context: int) -> list[list[Any]]:
    """Returns rows of a table: bounds of Qwen3-8B's decode steps in bf16 on an H200, by batch."""
    work = mine.Work(json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text()), itemsize=2)
    rows: list[list[Any]] = []
    for n in sizes:
        size, flops = (count([("", context, 1)] * n) for count in (work.bytes, work.flops))
        reading, computing = size / BANDWIDTH, flops / RATE
        bound, least = "bytes" if reading > computing else "FLOPs", max(reading, computing)
        rows.append([n, flops / size, 1e3 * reading, 1e3 * computing, bound, n / least])
    return rows


def recorded() -> tuple[list[list[Any]], list[float]]:
    """Compares `quire roofline` with the records of an H200. Returns a row for each configuration,
    and the sizes of all errors, in percent."""
    rows = list(importlib.import_module("bench.roofline_error").rows())
    found: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        found.setdefault((row.model, row.quantization or "16 bits", row.ranks), []).append(
            row.percent
        )
    shown = [
        [*key, len(each), float(np.mean(np.abs(each))), max(each, key=abs)]
        for key, each in found.items()
    ]
    return shown, [abs(row.percent) for row in rows]


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=96, help="tokens of the prompts")
    plots.add_option(options)
    args = options.parse_args(arguments)
    loaded = load(args)
    model, work = own_model(loaded), mine.Work(loaded.config, itemsize=4)
    # A step reads one of them; tied models may store the embeddings twice.
    unread = "lm_head" if loaded.spec.tied_head else "embed_tokens"
    stored = sum(
        w.numel() for name, w in model.w.items() if "norm" not in name and unread not in name
    )
    found = counted(loaded, work, args.prompt)
    print(table(["my engine's step", "MFLOP predicted", "of the ops that ran", "off, %"], found))
    worst = max(abs(row[3]) for row in found)
    check(worst < 10, f"FLOPs are predicted within {worst:.1f} %")
    check(work.body + work.head == stored, f"{stored:,} weights, by the formula and in the file\n")

    measure = importlib.import_module("lessons.06_roofline.measure")
    bandwidth, rate = measure.machine()
    points = measure.kernels(model)
    rows = [
        [name, each, min(rate, each * bandwidth) / 1e9, reached / 1e9,
         "bytes" if each * bandwidth < rate else "FLOPs"]
        for name, (each, reached) in points.items()
    ]  # fmt: skip
    speed = f"{bandwidth / 1e9:.1f} GB/s and {rate / 1e9:.0f} GFLOP/s"
    print(f"This CPU, with {torch.get_num_threads()} threads: {speed}")
    print(table(["my kernels", "FLOP/byte", "GFLOP/s at most", "measured", "bound"], rows))
    one, many = points["product, 1"][0], points["product, 256"][0]
    check(many > 100 * one, f"256 rows do {many / one:.0f} x the work of one on each byte\n")
    plots.roofline(args.plot, bandwidth, rate, points)

    bounds = decode_steps([1, 4, 16, 64, 256, 1024], context=128)
    headers = ["rows", "FLOP/byte", "ms for bytes", "ms for FLOPs", "bound", "tok/s at most"]
    print(f"Qwen3-8B on an H200, {RATE / BANDWIDTH:.0f} FLOP/byte:\n{table(headers, bounds)}")
    ridge = next(row[0] for row in bounds if row[4] == "FLOPs")
    check(bounds[0][4] == "bytes", f"one row waits for bytes, {ridge} compute\n")

    configurations, errors = recorded()
    headers = ["model", "weights", "GPUs", "figures", "mean error, %", "worst, %"]
    print(f"`quire roofline` and what an H200 measured:\n{table(headers, configurations)}")
    mean = float(np.mean(errors))
    check(mean < 10, f"{len(errors)} figures are predicted within {mean:.1f} % on average\n")
    ops = shipped_profile(loaded, args.prompt)
    print(table(["ops of Quire's decode step", "calls", "% of its time"], ops))


if __name__ == "__main__":
    main()
