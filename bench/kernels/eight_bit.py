"""Products in 8 bits on this GPU: each against float64, then times beside cuBLAS.

    PYTHONPATH=src python bench/kernels/eight_bit.py [--seconds 50] [--sweep]

Times the gated, the square and the tall layer of Qwen3-8B at 64 to 8192 rows: bf16 and `_scaled_mm`
of cuBLAS, our kernel in int8, in 8-bit floats, and with scales of 128 x 128 blocks; the rounding of
inputs, with and without the norm, by itself. --sweep: other tiles too, and the best is named.
Prints a table last. Without a GPU it only checks, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.products.eight_bit import EightBitTile, eight_bit_gemm, tile_for
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.weight import Weight, WeightFormat

FORMATS = {
    "int8": WeightFormat(torch.int8, scales=torch.float32, inputs="token"),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, inputs="token"),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group"),
}
LAYERS = {
    "gate_up": (24576, 4096, "silu_and_mul"),
    "o": (4096, 4096, None),
    "down": (4096, 12288, None),
}
ROWS = (64, 128, 256, 2048, 512, 8192)
TILES = [
    EightBitTile(bm, bn, 128, warps, stages, splits)
    for bm, bn, warps in ((64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for stages in (3, 4)
    for splits in (1, 2, 4)
]


def draw(name: str, outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(FORMATS[name], outputs, inputs, torch.device(DEVICE))
    integers = torch.randint(-127, 128, weight.values.shape, device=DEVICE, dtype=torch.int16)
    weight.values.copy_(integers.float() if weight.dtype.is_floating_point else integers)
    assert weight.scales is not None
    weight.scales.uniform_(1e-4, 2e-4)
    return weight


def check(name: str, rows: int, outputs: int, inputs: int, tile: EightBitTile | None) -> float:
    """Returns the relative error of a product of the inputs as they were rounded."""
    args = LinearArgs(
        torch.randn(rows, inputs, device=DEVICE).bfloat16(), draw(name, outputs, inputs)
    )
    q, scales = quantize_inputs(args.x, args.weight, None)
    found = eight_bit_gemm(q, scales, args, tile or tile_for(rows, args)).double()
    x = q.double() * scales.double().repeat_interleave(inputs // scales.shape[1], 1)
    wanted = x @ dequantize(args.weight, torch.float64).T
    return float((found - wanted).norm() / wanted.norm())


Call = Callable[[], object]


def times(rows: int, layer: str, tiles: list[EightBitTile]) -> dict[str, str]:
    """Returns µs of each road, as text for the table."""
    outputs, inputs, act = LAYERS[layer]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    copies = copies_beyond_l2(outputs * inputs, most=8)
    plain = [torch.randn(outputs, inputs, device=DEVICE).bfloat16() for _ in range(copies)]
    found = {"bf16": microseconds([partial(torch.matmul, x, w.t()) for w in plain])}
    del plain
    for name in FORMATS:
        weights = [draw(name, outputs, inputs) for _ in range(copies)]
        q, scales = quantize_inputs(x, weights[0], None)
        if name == "fp8":
            found["_scaled_mm"] = microseconds([library(q, scales, w) for w in weights])
        args = [LinearArgs(x, weight, act=act) for weight in weights]
        found[name] = own_times(q, scales, args, tiles)
    weight = draw("int8", 16, inputs)
    norm = RmsScale(torch.ones(inputs, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    found["round"] = microseconds([partial(quantize_inputs, x, weight, None)])
    found["norm+round"] = microseconds([partial(quantize_inputs, x, weight, norm)])
    return found


def microseconds(calls: list[Call]) -> str:
    return f"{graph_us(calls, target_ms=2.0):.1f}"


def library(q: Tensor, scales: Tensor, weight: Weight) -> Call:
    assert weight.scales is not None
    return partial(
        torch._scaled_mm, q, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def own_times(q: Tensor, scales: Tensor, args: list[LinearArgs], tiles: list[EightBitTile]) -> str:
    """Returns µs of the tile that is chosen, and of the best where that is faster by 2 %."""
    gated = args[0].gated
    own = tile_for(len(q), args[0])
    results = []
    tiles = [t for t in tiles if t.splits == 1 or (not gated and len(q) <= 256)]
    for tile in [own, *(t._replace(bn=t.bn // 2) if gated else t for t in tiles)]:
        try:
            us = graph_us([partial(eight_bit_gemm, q, scales, a, tile) for a in args], 2.0)
            results.append((us, tuple(tile)))
        except Exception as error:
            print(f"{args[0].weight.format.key} {len(q)} {tile}: {type(error).__name__}"[:200])
    if not results:
        return "failed"
    best = min(results)
    behind = f" (best {best[0]:.1f} {best[1]})" if best[0] < 0.98 * results[0][0] else ""
    return f"{results[0][0]:.1f}{behind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    torch.manual_seed(0)
    small = DEVICE == "cpu"
    for name in FORMATS:
        for rows in (5, 130):
            size = (32, 128) if small else (512, 1024)
            tile = EightBitTile(32, 16, 64, 4, 2) if small else None
            error = check(name, rows, *size, tile)
            print(f"check {name} {rows} rows: {error:.1e} {'ok' if error < 5e-3 else 'WRONG'}")
    if small:
        return
    print("| rows | layer | bf16 | int8 | _scaled_mm | fp8 | fp8-g128 | round | norm+round |")
    for rows in ROWS:
        for layer in LAYERS:
            if time.monotonic() > end:
                print(f"| {rows} | {layer} | skipped: out of time |")
                continue
            found = times(rows, layer, TILES if options.sweep else [])
            print("| " + " | ".join([str(rows), layer, *found.values()]) + " |", flush=True)


if __name__ == "__main__":
    main()
