"""Times the products of a decoder layer by every kernel that takes them, beside cuBLAS in bf16.

    PYTHONPATH=src python bench/kernels/products.py int4-zeros fp8 int8   # inputs in 16 bits
    PYTHONPATH=src python bench/kernels/products.py fp8-blocks w8a8 w8a8_fp8 --rows 64 512 2048
    PYTHONPATH=src python bench/kernels/products.py bf16 --model Qwen3-0.6B --rows 1 64 2048

A table for each format has the µs of each product and of all four together. Weights are read from
memory. `ROADS` explains the columns. `tests/gpu` compares the kernels with float64.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from layers import BANDWIDTH, FORMATS, draw, layer, values
from shapes import LARGE, MODELS, Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.choose import Policy, use_policy
from quire.ops.triton.collectives.segments import segment_sum
from quire.ops.triton.launch import compiling, traits
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products import block_gemv, eight_bit, hopper_blocks, hopper_gemm, small
from quire.ops.triton.products.plan import LinearArgs, shape_of
from quire.ops.triton.products.quantized_tiles import dequantize
from quire.ops.triton.products.round_inputs import order_inputs, quantize_inputs, round_inputs
from quire.ops.triton.products.table import heuristic

ROWS = (1, 16, 32, 64, 128, 256, 512, 2048)
FIXED = Policy(deterministic=True)
linear_module = importlib.import_module("quire.ops.triton.linear")
Road = Callable[[LinearArgs], object]
ROADS = {
    "cuBLAS": "bf16, without norm, activation and residual",
    "wgmma": "hopper_gemm; inputs are ordered before",
    "any card": "kernels that need no Hopper card",
    "blocks": "hopper_blocks; for one row block_gemv, with norm and rounding",
    "8 bits": "eight_bit_gemm",
    "_scaled_mm": "cuBLAS in 8-bit floats",
    "order": "the kernel that orders inputs",
    "norm, order": "the same with a norm",
    "round": "the kernel that rounds inputs",
    "norm, round": "the same with a norm",
    "linear": "the layer as the engine runs it, with norm and residual",
    "without narrow": "the same without hopper_narrow",
    "deterministic": "the same with --deterministic",
}
"""Columns of the tables."""


def counters() -> Tensor:
    return small.default_workspace(torch.device(DEVICE)).counters


def empty_output(args: LinearArgs) -> Tensor:
    return torch.empty(len(args.x), args.n, dtype=args.x.dtype, device=args.x.device)


# -- roads: the ways through a product ---------------------------------------------------------


def by_cublas(args: LinearArgs) -> object:
    return torch.matmul(args.x, args.weight.values.t())


def by_linear(args: LinearArgs) -> object:
    return linear_module.linear(args.x, args.weight, args.bias, args.residual, args.norm, args.act)


def without_narrow(args: LinearArgs) -> object:
    kept = linear_module._hopper_narrow
    linear_module._hopper_narrow = lambda card: None
    try:
        return by_linear(args)
    finally:
        linear_module._hopper_narrow = kept


def deterministic(args: LinearArgs) -> object:
    with use_policy(FIXED):
        if args.residual is not None:
            return segment_sum(args.x, args.weight, 8, args.x.dtype, args.bias, args.residual)
        return by_linear(args)


def by_wgmma(args: LinearArgs) -> object:
    tile, out = hopper_gemm.tile_for(args), empty_output(args)
    programs = hopper_gemm.programs_for(tile, args)
    return hopper_gemm.hopper_gemm(args, out, tile, counters(), programs, pdl=True).run()


def expanded(args: LinearArgs) -> object:
    """Runs a skinny GEMM where rules choose one, else cuBLAS behind the dequantized weight."""
    plan = heuristic(shape_of(args), traits(args.x.device))
    if len(args.x) <= 256 and plan.kernel != "torch":
        return small.run(args, plan)
    return torch.matmul(args.x, dequantize(args.weight, torch.bfloat16).t())


def rounded_first(args: LinearArgs) -> object:
    """Runs norm and rounding, to 16 bits, in a kernel of their own, then the product."""
    x = round_inputs(args.x, args.weight, args.norm)
    return small.small_linear(replace(args, x=x, norm=None), rms_norm=normed)


def normed(x: Tensor, norm: RmsScale) -> Tensor:
    return rms_norm(x, *norm)


def by_block_gemv(args: LinearArgs) -> object:
    return block_gemv.product(args)


def by_blocks(args: LinearArgs, q: Tensor, scales: Tensor) -> object:
    tile, out = hopper_blocks.tile_for(len(q), args), empty_output(args)
    programs = hopper_blocks.programs_for(tile, args)
    return hopper_blocks.hopper_blocks(
        q, scales, args, out, tile, counters(), programs, pdl=True
    ).run()


def by_eight_bits(args: LinearArgs, q: Tensor, scales: Tensor) -> object:
    return eight_bit.eight_bit_gemm(q, scales, args, eight_bit.tile_for(len(q), args))


def by_scaled_mm(args: LinearArgs, q: Tensor, scales: Tensor) -> object:
    assert args.weight.scales is not None
    return torch._scaled_mm(
        q, args.weight.values.t(), scale_a=scales, scale_b=args.weight.scales.t(),
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def bare(args: LinearArgs) -> LinearArgs:
    return replace(args, norm=None, residual=None)


def roads_of(name: str, args: LinearArgs) -> dict[str, Road]:
    """Returns the ways through a product by the columns of the table."""
    form, rows = FORMATS[name], len(args.x)
    if form is None:
        found: dict[str, Road] = {"linear": by_linear, "deterministic": deterministic}
        if 16 < rows <= 32:
            found["without narrow"] = without_narrow
        return found
    gain = RmsScale(torch.ones(args.k, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    if form.inputs == "none":
        bits = form.bits or 8
        return {
            "wgmma": lambda a: by_wgmma(bare(a)),
            "any card": lambda a: expanded(bare(a)),
            "order": lambda a: order_inputs(a.x, None, bits),
            "norm, order": lambda a: order_inputs(a.x, gain, bits),
        }
    q, scales = quantize_inputs(args.x, args.weight, None)
    with_inputs: dict[str, Callable[..., object]] = {"8 bits": by_eight_bits}
    found = {
        "round": lambda a: quantize_inputs(a.x, a.weight, None),
        "norm, round": lambda a: quantize_inputs(a.x, a.weight, gain),
    }
    if name == "fp8-blocks" and rows == 1:
        return {"blocks": by_block_gemv, "any card": rounded_first, **found}
    if name == "fp8-blocks":
        with_inputs["blocks"] = by_blocks
        if rows <= 32:
            found["any card"] = rounded_first
    if name == "w8a8_fp8":
        with_inputs["_scaled_mm"] = by_scaled_mm
    own = {column: partial(road, q=q, scales=scales) for column, road in with_inputs.items()}
    return {**own, **found}


# -- times -------------------------------------------------------------------------------------


def layers_of(model: Shape, name: str, part: str, rows: int) -> list[LinearArgs]:
    """Returns copies of a product which together do not fit L2."""
    outputs, inputs = model.projections[part]
    weight = draw(name, outputs, inputs)
    count = copies_beyond_l2(weight.values.nbytes, most=16)
    first = layer(model, part, rows, weight)
    more = [draw(name, outputs, inputs) for _ in range(count - 1)]
    return [first, *(replace(first, weight=other) for other in more)]


def times(model: Shape, name: str, part: str, rows: int) -> dict[str, float]:
    """Returns the µs of each road, and of cuBLAS in bf16."""
    all_args = layers_of(model, name, part, rows)
    outputs, inputs = model.projections[part]
    plain = [replace(all_args[0], weight=draw("bf16", outputs, inputs)) for _ in range(2)]
    found = {"cuBLAS": microseconds(by_cublas, plain)}
    del plain
    found |= {
        column: microseconds(road, all_args) for column, road in roads_of(name, all_args[0]).items()
    }
    return found


def microseconds(road: Road, all_args: Sequence[LinearArgs]) -> float:
    """Returns the µs of a road; NaN where the kernel does not take the product."""
    calls = [partial(road, args) for args in all_args]
    try:
        with compiling(4):
            calls[0]()
        return graph_us(calls, target_ms=1.5)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("nan")


def in_a_row(model: Shape, rows: int) -> dict[str, float]:
    """Returns the µs of a layer's four products in one graph, a norm in attention's place."""
    weights = [
        {part: draw("bf16", *size) for part, size in model.projections.items()} for _ in range(3)
    ]
    steps = [{part: layer(model, part, rows, w) for part, w in own.items()} for own in weights]
    gain = values(model.heads * model.head_dim).abs()
    found = {}
    for column, road in roads_of("bf16", steps[0]["o"]).items():
        calls: list[Callable[[], object]] = []
        for step in steps:
            for part, args in step.items():
                if part == "o":
                    calls.append(partial(rms_norm, args.x, gain, 1e-6))
                calls.append(partial(road, args))
        found[column] = graph_us(calls, target_ms=1.5) * len(calls) / len(steps)
    return found


def table(model: Shape, name: str, all_rows: Sequence[int], end: float) -> None:
    """Prints the µs of each product, and their sums, by rows."""
    columns: list[str] = []
    lines: list[tuple[int, str, dict[str, float]]] = []
    for rows in all_rows:
        sums: dict[str, float] = {}
        for part in model.projections:
            if time.monotonic() > end:
                print(f"{rows} rows, {part}: left out, no time", flush=True)
                continue
            found = times(model, name, part, rows)
            lines.append((rows, part, found))
            sums = {column: sums.get(column, 0.0) + us for column, us in found.items()}
            columns = list(dict.fromkeys([*columns, *found]))
            print(rows, part, {key: round(us, 1) for key, us in found.items()}, flush=True)
        lines.append((rows, "all four", sums))
        if name == "bf16" and time.monotonic() < end:
            lines.append((rows, "in a row", in_a_row(model, rows)))
        print("\n" + "\n".join(f"{column}: {ROADS[column]}" for column in columns))
    print(f"\n{model.name}, {name}, µs\n| rows | product | floor | {' | '.join(columns)} |")
    print("| ---: | --- " + "| ---: " * (len(columns) + 1) + "|")
    for rows, part, found in lines:
        floor = ""
        if part in model.projections:
            weight = draw(name, 16, model.projections[part][1])
            nbytes = sum(t.nbytes for t in (weight.values, weight.scales) if t is not None)
            floor = f"{nbytes / 16 * model.projections[part][0] / BANDWIDTH:.1f}"
        cells = [f"{found[column]:.1f}" if column in found else "" for column in columns]
        print(f"| {rows} | {part} | {floor} | {' | '.join(cells)} |")


def main() -> None:
    known: dict[str, Any] = {model.name: model for model in MODELS + LARGE}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--model", choices=known, default="Qwen3-8B")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=90.0, help="begin nothing after this")
    options = parser.parse_args()
    torch.manual_seed(0)
    end = time.monotonic() + options.seconds
    for name in options.formats:
        table(known[options.model], name, options.rows, end)


if __name__ == "__main__":
    main()
