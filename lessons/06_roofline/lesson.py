"""The roofline: what a step must read and compute, and how long that takes on a card.

Run it from the repository's root: python -m lessons 6 [--plot FILE]
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from lessons import plots
from lessons.common import Loaded, check, engine, load, parser, table
from quire import SamplingParams

CONFIGS = Path(__file__).parents[2] / "bench" / "configs"
BANDWIDTH, RATE = 4.25e12, 700e12  # of an H200, measured
Rows = list[tuple[int, int]]
"""(first position, positions) of each row of a step."""


class Work:
    """Bytes and FLOPs of a step of a dense model like Qwen3, from its config.json."""

    def __init__(self, config: dict[str, Any], itemsize: int) -> None:
        hidden, self.layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config.get("head_dim") or hidden // heads
        attention = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden
        self.body = self.layers * (attention + 3 * hidden * config["intermediate_size"])
        self.head = config["vocab_size"] * hidden
        self.kv = 2 * self.layers * kv_heads * dim  # values that a token leaves in the cache
        self.pair = 4 * self.layers * heads * dim  # FLOPs of one query and one key
        self.itemsize = itemsize

    def flops(self, rows: Rows) -> float:
        """A product of n tokens with a weight of k values takes 2 n k. Each row ends in logits."""
        pairs = sum(n * first + n * (n + 1) // 2 for first, n in rows)
        tokens = sum(n for _, n in rows)
        return float(2 * tokens * self.body + 2 * len(rows) * self.head + pairs * self.pair)

    def bytes(self, rows: Rows) -> float:
        """Weights are read once a step, for all rows; each row reads its own keys and values."""
        seen = sum(first + 2 * n for first, n in rows)  # read to the end, and written
        return float(self.itemsize * (self.body + self.head + seen * self.kv))


def profiled(work: Callable[[], Any]) -> Any:
    """Returns torch's profile of a call."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    return profiler


def product(name: str, shapes: list[list[int]]) -> int:
    """Returns the FLOPs of an op that multiplies matrices, by the shapes of its inputs."""
    if name in ("mkldnn::_linear_pointwise", "aten::linear"):
        return 2 * math.prod(shapes[0]) * shapes[1][0]
    if name == "aten::bmm":
        return 2 * math.prod(shapes[0]) * shapes[1][2]
    if name == "aten::scaled_dot_product_attention":
        return 4 * math.prod(shapes[0]) * shapes[1][2]
    return 0


def counted(model: Loaded, work: Work, length: int) -> tuple[list[list[Any]], Any]:
    """Runs steps of the shipped engine. Returns rows of a table, MFLOP predicted and those of the
    ops that ran, and the last step's profile."""
    # Weights of larger models are packed for a CPU; then the profiler does not see their shapes.
    with mock.patch("quire.models.prepack.prepack_weights"):
        core, found = engine(model, enable_prefix_caching=False), []
    prompt = np.arange(100, 100 + length, dtype=np.int32)
    for n in (1, 4):
        for i in range(n):
            core.add(f"{n}-{i}", prompt, SamplingParams(ignore_eos=True), max_total=length + 2)
        for kind, row in (("prompts", (0, length)), ("decode", (length, 1))):
            last = profiled(core.step)
            ran = sum(product(event.name, event.input_shapes) for event in last.events())
            wanted = work.flops([row] * n)
            found.append([f"{kind}, {n}", wanted / 1e6, ran / 1e6, 100 * (wanted / ran - 1)])
    core.shutdown()
    return found, last


def decode_steps(sizes: list[int], context: int) -> list[list[Any]]:
    """Returns rows of a table: bounds of Qwen3-8B's decode steps in bf16 on an H200, by batch."""
    work = Work(json.loads((CONFIGS / "qwen3-8b" / "config.json").read_text()), itemsize=2)
    rows: list[list[Any]] = []
    for n in sizes:
        size, flops = work.bytes([(context, 1)] * n), work.flops([(context, 1)] * n)
        reading, computing = size / BANDWIDTH, flops / RATE
        bound, least = "bytes" if reading > computing else "FLOPs", max(reading, computing)
        rows.append([n, flops / size, 1e3 * reading, 1e3 * computing, bound, n / least])
    return rows


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--prompt", type=int, default=96, help="tokens of the prompts")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model = load(args)
    work = Work(model.config, itemsize=4)
    # A step reads one of them; tied models may store the embeddings twice.
    unread = "lm_head" if model.spec.tied_head else "embed_tokens"
    products = [w for name, w in model.weights.items() if "norm" not in name and unread not in name]
    stored = sum(weight.numel() for weight in products)
    check(work.body + work.head == stored, f"{stored:,} weights, by the formula and in the file\n")
    found, last = counted(model, work, args.prompt)
    print(table(["the engine's step", "MFLOP predicted", "of the ops that ran", "off, %"], found))
    worst = max(abs(row[3]) for row in found)
    check(worst < 10, f"FLOPs are predicted within {worst:.1f} %\n")
    events = sorted(last.key_averages(), key=lambda each: -each.self_cpu_time_total)
    whole = sum(each.self_cpu_time_total for each in events) / 100
    shares = [[each.key, each.count, each.self_cpu_time_total / whole] for each in events[:5]]
    print(table(["ops of the last step", "calls", "% of its time"], shares), "\n")

    rows = decode_steps([1, 4, 16, 64, 256, 1024], context=128)
    headers = ["rows", "FLOP/byte", "ms for bytes", "ms for FLOPs", "bound", "tok/s at most"]
    print(f"Qwen3-8B on an H200, {RATE / BANDWIDTH:.0f} FLOP/byte:\n{table(headers, rows)}\n")
    ridge = next(row[0] for row in rows if row[4] == "FLOPs")
    check(rows[0][4] == "bytes", f"one row waits for bytes, {ridge} compute\n")

    records = list(importlib.import_module("bench.roofline_error").rows())
    errors = [[row.model, row.case, row.measured, row.predicted, row.percent] for row in records]
    print(table(["model", "case", "measured, H200", "quire roofline", "off, %"], errors[::3]), "\n")
    mean = float(np.mean([abs(row.percent) for row in records]))
    check(mean < 10, f"{len(records)} figures are predicted within {mean:.1f} % on average")
    series = {"at most": [row[5] for row in rows]}
    plots.lines(args.plot, [row[0] for row in rows], series, ("rows", "tokens/s"), log="xy")


if __name__ == "__main__":
    main()
