"""Products of 17 to 32 rows with weights of 16 bits on this GPU: checks, then times of layers.

    PYTHONPATH=src python bench/kernels/narrow.py

Sums of the kernel by wgmma are held against float64. Then the products of a layer that add a
residual, and all of a layer's kernels in a row, with a norm where attention would be: with the
kernel and without. Prints a table last.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial

import torch
from shapes import QWEN3_0_6B, QWEN3_8B, QWEN25_1_5B, Shape
from timing import copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products import small
from quire.ops.triton.products.hopper_narrow import product, takes
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.weight import Weight

DEVICE = torch.device("cuda", 0)
linear_module = importlib.import_module("quire.ops.triton.linear")
DTYPE = torch.bfloat16
ROWS = (32, 24, 17)
Call = Callable[[], object]


def draw(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE, dtype=DTYPE)


def check(rows: int, outputs: int, inputs: int, bias: bool) -> float:
    """Returns the relative error."""
    weight, own = draw(outputs, inputs) * 0.03, draw(outputs) if bias else None
    args = LinearArgs(draw(rows, inputs), Weight.plain(weight), own, residual=draw(rows, outputs))
    assert takes(args)
    assert args.residual is not None
    y = args.x.double() @ weight.double().T + args.residual.double()
    y = y if own is None else y + own.double()
    found = math.inf
    for _ in range(2):  # the first leaves the counters as it found them
        found = float((product(args).double() - y).norm() / y.norm())
    return found


def run(args: LinearArgs, ours: bool) -> None:
    """Runs a layer with the kernel or without."""
    hopper = linear_module._hopper_narrow
    if not ours:
        linear_module._hopper_narrow = lambda card: None
    try:
        linear_module.linear(args.x, args.weight, args.bias, args.residual, args.norm, args.act)
    finally:
        linear_module._hopper_narrow = hopper


def layer(part: str, rows: int, weight: Tensor) -> LinearArgs:
    """Returns a product of a layer."""
    k = weight.shape[1]
    if part in ("qkv", "gate_up"):
        norm = RmsScale(torch.ones(k, device=DEVICE, dtype=DTYPE), 1e-6)
        act = "silu_and_mul" if part == "gate_up" else None
        return LinearArgs(draw(rows, k), Weight.plain(weight), norm=norm, act=act)
    return LinearArgs(draw(rows, k), Weight.plain(weight), residual=draw(rows, len(weight)))


def in_a_row(model: Shape, rows: int, weights: dict[str, list[Tensor]], ours: bool) -> float:
    """Returns µs of a layer's kernels, one after the other."""
    calls: list[Call] = []
    gain = torch.ones(model.heads * model.head_dim, device=DEVICE, dtype=DTYPE)
    copies = len(weights["qkv"])
    for copy in range(copies):
        for part, own in weights.items():
            args = layer(part, rows, own[copy % len(own)])
            if part == "o":
                calls.append(partial(rms_norm, args.x, gain, 1e-6))
            calls.append(partial(run, args, ours))
    return graph_us(calls, target_ms=1.5) * len(calls) / copies


def main() -> None:
    torch.manual_seed(0)
    small.default_workspace(DEVICE)
    for case in ((32, 1536, 1536, False), (17, 520, 1000, True), (24, 4096, 12288, False)):
        error = check(*case)
        print(f"check {case}: {error:.1e} {'ok' if error < 5e-3 else 'WRONG'}", flush=True)
    lines = []
    for model in (QWEN25_1_5B, QWEN3_8B, QWEN3_0_6B):
        weights = {
            part: [draw(*size) * 0.03 for _ in range(copies_beyond_l2(2 * size[0] * size[1], 40))]
            for part, size in model.projections.items()
        }
        for rows in ROWS:
            cells = []
            for part in ("o", "down"):
                args = [layer(part, rows, weight) for weight in weights[part]]
                times = [graph_us([partial(run, a, ours) for a in args]) for ours in (False, True)]
                cells.append(f"{times[0]:.1f} → {times[1]:.1f}")
            times = [in_a_row(model, rows, weights, ours) for ours in (False, True)]
            cells.append(f"{times[0]:.1f} → {times[1]:.1f}")
            lines.append(f"| {model.name} | {rows} | " + " | ".join(cells) + " |")
        del weights
    print("| model | rows | o | down | a layer, µs |")
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
