"""Products with weights of 4 or 8 bits and inputs of 16 on this GPU: checks, then times beside
others.

    PYTHONPATH=src python bench/kernels/hopper_gemm.py [--seconds 60] [--sweep] [--format int8]

Each tile is held against float64. Then times of the four layers of Qwen3-8B at 16 to 2048 rows:
bf16 by cuBLAS, the other kernels' road (a skinny GEMM, or the weight dequantized as a whole and
cuBLAS), and the kernel by wgmma; and of what orders its inputs, with and without the norm. --sweep:
all tiles, the fastest first. --format: of the weights that are timed. Prints a table last.

Predicted before the first run, µs of a layer's four products: 40 at 16 rows, 55 at 64 (where 116
were measured of the skinny GEMM), 75 at 128, 130 at 256, 1,430 at 2048 (cuBLAS: 1,080). All were
too low: docs/performance/tried-weights.md. Of 8 bits, predicted: 66 at 16 rows (bytes alone: 46),
70 at 64, 98 at 128, 170 at 256.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from timing import copies_beyond_l2, graph_us
from torch import Tensor
from torch.nn.functional import silu

from quire.ops.arguments import Activation, RmsScale
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.launch import compiling, traits
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products import small
from quire.ops.triton.products.hopper_gemm import (
    HopperTile,
    hopper_gemm,
    product,
    programs_for,
    takes,
    tile_for,
)
from quire.ops.triton.products.plan import LinearArgs, shape_of
from quire.ops.triton.products.quantized_tiles import dequantize as expand
from quire.ops.triton.products.round_inputs import order_inputs
from quire.ops.triton.products.table import heuristic
from quire.ops.weight import Weight, WeightFormat

DEVICE = torch.device("cuda", 0)
FORMATS = {
    "int4-g128": WeightFormat(torch.uint8, bits=4, scales=torch.bfloat16, group=128),
    "int4-g128-zeros": WeightFormat(
        torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True
    ),
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.float32),
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "int8-g128": WeightFormat(torch.int8, scales=torch.bfloat16, group=128),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "fp8-g128": WeightFormat(torch.float8_e4m3fn, scales=torch.bfloat16, group=128),
}
TIMED = "int4-g128-zeros"
"""The format of `--quantization int4`; others of 4 bits take as long."""
GATED: Activation = "silu_and_mul"
LAYERS: dict[str, tuple[int, int, Activation | None]] = {
    "qkv": (6144, 4096, None),
    "o": (4096, 4096, None),
    "gate_up": (24576, 4096, GATED),
    "down": (4096, 12288, None),
}
ROWS = (64, 16, 256, 2048, 128, 32, 512)
TILES = [HopperTile(groups, bn) for groups in (2, 3) for bn in (16, 32, 64, 128)]
Call = Callable[[], object]


def draw(form: WeightFormat, outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(form, outputs, inputs, DEVICE)
    if form.values.is_floating_point:
        weight.values.copy_(torch.randn(weight.values.shape, device=DEVICE))
    else:
        weight.values.view(torch.uint8).random_(0, 256)
    assert weight.scales is not None
    weight.scales.copy_(torch.rand(weight.scales.shape, device=DEVICE) * 1e-3 + 1e-3)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 17, weight.zeros.shape, device=DEVICE))
    return weight


def run(
    args: LinearArgs, ordered: Tensor, tile: HopperTile, out: Tensor, programs: int = 0
) -> None:
    args = LinearArgs(ordered, args.weight, args.bias, residual=args.residual, act=args.act)
    counters = small.default_workspace(DEVICE).counters
    programs = programs or programs_for(tile, args)
    hopper_gemm(args, out, tile, counters, programs, pdl=True).run()


class Case(NamedTuple):
    """A product with bias, residual and maybe an activation to check."""

    name: str
    rows: int
    outputs: int
    inputs: int
    tile: HopperTile
    act: Activation | None

    def error(self) -> float:
        """Returns the relative error; computes nothing where kernels only compile."""
        weight = draw(FORMATS[self.name], self.outputs * (2 if self.act else 1), self.inputs)

        def values(*size: int) -> Tensor:
            return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)

        x, bias = values(self.rows, self.inputs), values(weight.outputs)
        residual = values(self.rows, self.outputs)
        args = LinearArgs(x, weight, bias, residual=residual, act=self.act)
        out = torch.full_like(residual, float("nan"))
        for _ in range(3):
            run(args, order_inputs(x, bits=weight.format.bits or 8), self.tile, out)
        y = x.double() @ dequantize(weight, torch.float64).T + bias.double()
        if self.act:
            gate, up = y.chunk(2, -1)
            y = silu(gate) * up
        y = y + residual.double()
        return float((out.double() - y).norm() / y.norm())


CASES = [
    Case("int4-g128", rows, 520, 1024, tile, act)
    for tile in TILES
    for rows, act in ((tile.bn, None), (3 * tile.bn - 5, GATED))
]
CASES += [Case(name, 77, 264, 2048, HopperTile(3, 64), None) for name in FORMATS]
CASES += [
    Case("int4-g128", 64, 12288, 4096, HopperTile(3, 64), GATED),
    Case("int8", 64, 12288, 4096, HopperTile(3, 64), GATED),
    Case("fp8", 300, 4096, 4096, HopperTile(2, 128), None),
    Case("int4-g128", 300, 4096, 4096, HopperTile(2, 128), None),
]


def layer_error(dtype: torch.dtype) -> float:
    """Returns the relative error of a layer with a norm by the tile that is chosen."""
    weight = draw(FORMATS["int4-g128-zeros"], 520, 1024)
    x = torch.randn(150, 1024, device=DEVICE, dtype=dtype)
    norm = RmsScale(torch.rand(1024, device=DEVICE, dtype=dtype) + 0.5, 1e-6)
    args = LinearArgs(x, weight, norm=norm)
    assert takes(args)
    found = product(args).double()
    y = rms_norm(x, *norm).double() @ dequantize(weight, torch.float64).T
    return float((found - y).norm() / y.norm())


def checks() -> None:
    for case in CASES:
        error = case.error()
        print(f"check {tuple(case)}: {error:.1e} {'ok' if error < 5e-3 else 'WRONG'}", flush=True)
    for dtype in (torch.bfloat16, torch.float16):
        error = layer_error(dtype)
        print(f"check layer in {dtype}: {error:.1e} {'ok' if error < 5e-3 else 'WRONG'}")
    x = torch.randn(3, 4096, device=DEVICE, dtype=torch.bfloat16)
    norm = RmsScale(torch.rand(4096, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    same = torch.equal(order_inputs(x, norm), order_inputs(rms_norm(x, *norm)))
    print(f"check norm: {'ok' if same else 'WRONG'}", flush=True)


def compile_all(form: WeightFormat) -> None:
    """Compiles what `checks` and `times` run, many at once."""
    with compiling(16):
        for outputs, inputs, act in reversed(LAYERS.values()):
            weight = draw(form, outputs, inputs)
            for rows in sorted(ROWS):
                x = torch.empty(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
                args = LinearArgs(x, weight, act=act)
                out = torch.empty(rows, args.n, device=DEVICE, dtype=torch.bfloat16)
                for tile in TILES if rows == 64 else ():
                    run(args, x, tile, out)
                if rows <= 256:
                    other_road(args)
        for case in CASES:
            case.error()
        for dtype in (torch.bfloat16, torch.float16):
            layer_error(dtype)


def microseconds(calls: list[Call]) -> float:
    return graph_us(calls, target_ms=1.5)


def counts(args: LinearArgs, tile: HopperTile) -> list[int]:
    """Returns numbers of programs: the one that is chosen, and as many as multiprocessors."""
    return sorted({programs_for(tile, args), traits(DEVICE).num_sms})


def other_road(args: LinearArgs) -> None:
    plan = heuristic(shape_of(args), traits(DEVICE))
    if args.x.shape[0] <= 256 and plan.kernel != "torch":
        small.run(args, plan)
    else:
        torch.matmul(args.x, expand(args.weight, torch.bfloat16).t())


def times(rows: int, layer: str, form: WeightFormat, sweep: bool) -> dict[str, str]:
    """Returns µs of each road, as text for the table."""
    outputs, inputs, act = LAYERS[layer]
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    copies = copies_beyond_l2(outputs * inputs * (form.bits or 8) // 8, most=32)
    found = {}
    plain = [torch.randn(outputs, inputs, device=DEVICE).bfloat16() for _ in range(2)]
    found["bf16"] = f"{microseconds([partial(torch.matmul, x, w.t()) for w in plain]):.1f}"
    del plain
    weights = [draw(form, outputs, inputs) for _ in range(copies)]
    args = [LinearArgs(x, w, act=act) for w in weights]
    found["others"] = f"{microseconds([partial(other_road, a) for a in args]):.1f}"
    out = torch.empty(rows, args[0].n, device=DEVICE, dtype=torch.bfloat16)
    tiles = [t for t in TILES if min(rows, 128) <= 2 * t.bn <= 2 * max(16, rows)]
    results = []
    for tile in tiles if sweep else [tile_for(args[0])]:
        for programs in counts(args[0], tile) if sweep else (0,):
            try:
                us = microseconds([partial(run, a, x, tile, out, programs) for a in args])
                results.append((us, tuple(tile), programs))
            except Exception as error:
                print(f"{rows} {layer} {tile}: {type(error).__name__} {error}"[:200])
    results.sort()
    found["wgmma"] = ", ".join(f"{us:.1f} {tile} {count}" for us, tile, count in results)
    norm = RmsScale(torch.ones(inputs, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    bits = form.bits or 8
    found["order"] = f"{microseconds([partial(order_inputs, x, None, bits)]):.1f}"
    found["norm+order"] = f"{microseconds([partial(order_inputs, x, norm, bits)]):.1f}"
    found["norm"] = f"{microseconds([partial(rms_norm, x, *norm)]):.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--format", choices=FORMATS, default=TIMED)
    options = parser.parse_args()
    form = FORMATS[options.format]
    end = time.monotonic() + options.seconds
    torch.manual_seed(0)
    start = time.monotonic()
    small.default_workspace(DEVICE)
    compile_all(form)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    checks()
    print(f"checked after {time.monotonic() - start:.0f} s", flush=True)
    print("| rows | layer | bf16 | others | wgmma | order | norm+order | norm |")
    for rows in ROWS:
        for layer in LAYERS:
            if time.monotonic() > end:
                print(f"| {rows} | {layer} | skipped: out of time |")
                continue
            found = times(rows, layer, form, options.sweep)
            print("| " + " | ".join([str(rows), layer, *found.values()]) + " |", flush=True)


if __name__ == "__main__":
    main()
