"""Products of weights and inputs in 8-bit floats with scales for each 128 inputs, on this GPU.

    for i in 0 1 2 3; do PYTHONPATH=src python bench/kernels/blocks.py --warm $i/4 & done; wait
    PYTHONPATH=src python bench/kernels/blocks.py [--seconds 90]

Holds every tile and plan against float64, then times those of Qwen3-8B's layers, weights read from
memory, beside bf16 by cuBLAS and the kernels for any card. Prints a table last. --warm: compiles a
share of the variants and ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.reference import activate
from quire.ops.reference.quantized import dequantize
from quire.ops.triton.launch import compiling
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.block_gemv import block_gemv, plans_of
from quire.ops.triton.products.eight_bit import eight_bit_gemm
from quire.ops.triton.products.eight_bit import tile_for as any_tile_for
from quire.ops.triton.products.hopper_blocks import BlockTile, hopper_blocks, programs_for, tile_for
from quire.ops.triton.products.plan import Launch, LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs, round_inputs
from quire.ops.triton.products.small import default_workspace, small_linear
from quire.ops.weight import Weight, WeightFormat

FORM = WeightFormat(torch.float8_e4m3fn, scales=torch.float32, group=128, inputs="group")
LAYERS = {
    "qkv": (6144, 4096, None, False),
    "o": (4096, 4096, None, True),
    "gate_up": (24576, 4096, "silu_and_mul", False),
    "down": (4096, 12288, None, True),
}
"""Weight rows, inputs, activation, and whether a residual is added."""
NORMED = ("qkv", "gate_up")
ROWS = (64, 2048, 256, 32, 512, 8, 8192, 128, 4, 16)
BANDWIDTH = 4.24e6
"""Bytes per µs of a GEMV, measured on an H200."""
CASES = (
    (17, 272, 640, "silu_and_mul", True, True),
    (64, 1000, 1024, None, True, False),
    (130, 520, 1152, "gelu_tanh", False, True),
    (300, 4096, 128, "silu_and_mul", False, False),
    (700, 2048, 1536, None, False, True),
)
"""Rows, weight rows, inputs, activation, bias, residual."""
GEMV_CASES = ((40, 4096, None), (48, 12288, "silu_and_mul"), (4096, 1024, "gelu_tanh"))
"""Weight rows, inputs, activation."""
TOLERANCE = 5e-3


def draw(outputs: int, inputs: int) -> Weight:
    weight = Weight.empty(FORM, outputs, inputs, torch.device(DEVICE))
    weight.values.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)  # up to 1.875
    assert weight.scales is not None
    weight.scales.uniform_(0.01, 0.03)
    return weight


def make(
    rows: int, outputs: int, inputs: int, act: str | None, bias: bool, residual: bool, norm: bool
) -> LinearArgs:
    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    n = outputs // 2 if act == "silu_and_mul" else outputs
    x = values(rows, inputs)
    x[:, 3] *= 50
    return LinearArgs(
        x, draw(outputs, inputs), values(outputs) if bias else None,
        RmsScale(values(inputs).abs(), 1e-6) if norm else None,
        values(rows, n) if residual else None, act,
    )  # fmt: skip


def layer(name: str, rows: int, weight: Weight | None = None) -> LinearArgs:
    outputs, inputs, act, residual = LAYERS[name]
    args = make(rows, 16 if weight else outputs, inputs, act, False, False, name in NORMED)
    args = replace(args, weight=weight or args.weight)
    if residual:
        res = torch.randn(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
        args = replace(args, residual=res)
    return args


def expected(args: LinearArgs, q: Tensor, scales: Tensor) -> Tensor:
    x = q.double() * scales.double().repeat_interleave(128, 1)
    y = x @ dequantize(args.weight, torch.float64).T
    if args.bias is not None:
        y = y + args.bias.double()
    if args.act is not None:
        y = activate(y, args.act)
    return y if args.residual is None else y + args.residual.double()


def tiles_of(rows: int, args: LinearArgs) -> list[BlockTile]:
    """Returns the tile of rules of thumb, then others."""
    own = tile_for(rows, args)
    others = [BlockTile(bn, shared) for bn in (own.bn, own.bn // 2) for shared in (True, False)]
    return list(dict.fromkeys([own, *(tile for tile in others if tile.bn >= 32)]))


def many(q: Tensor, scales: Tensor, args: LinearArgs, tile: BlockTile, out: Tensor) -> Launch:
    counters = default_workspace(q.device).counters
    return hopper_blocks(q, scales, args, out, tile, counters, programs_for(tile, args), pdl=True)


def outputs_of(args: LinearArgs) -> Tensor:
    return torch.full((len(args.x), args.n), float("nan"), dtype=args.x.dtype, device=DEVICE)


def compile_all(share: int, of: int) -> None:
    """Compiles a share of what is checked and timed."""
    work: list[Callable[[], Launch]] = []
    for case in CASES:
        args = make(*case, norm=False)
        q, scales = quantize_inputs(args.x, args.weight, None)
        work += [
            partial(many, q, scales, args, BlockTile(bn, shared), outputs_of(args))
            for bn in (32, 64, 128)
            for shared in (True, False)
        ]
    for name in LAYERS:
        args = layer(name, 128)
        q, scales = quantize_inputs(args.x, args.weight, None)
        work += [
            partial(many, q, scales, args, BlockTile(bn, shared), outputs_of(args))
            for bn in (32, 64, 128)
            for shared in (True, False)
        ]
        args = layer(name, 1)
        work += [
            partial(block_gemv, args, outputs_of(args), plan, pdl=True) for plan in plans_of(args)
        ]
    for outputs, inputs, act in GEMV_CASES:
        for norm in (False, True):
            args = make(1, outputs, inputs, act, True, True, norm)
            work += [
                partial(block_gemv, args, outputs_of(args), plan, pdl=True)
                for plan in plans_of(args)[:6]
            ]
    with compiling(4):
        for prepare in work[share::of]:
            prepare().run()


def checks() -> Iterator[str]:
    """Yields what is wrong."""
    for case in CASES:
        args = make(*case, norm=False)
        q, scales = quantize_inputs(args.x, args.weight, None)
        wanted = expected(args, q, scales)
        for tile in [BlockTile(bn, shared) for bn in (32, 64, 128) for shared in (True, False)]:
            for attempt in range(2):
                out = outputs_of(args)
                many(q, scales, args, tile, out).run()
                error = float((out.double() - wanted).norm() / wanted.norm())
                if not error < TOLERANCE:
                    yield f"WRONG {case} {tile} {attempt}: {error}"
    for outputs, inputs, act in GEMV_CASES:
        for norm in (False, True):
            args = make(1, outputs, inputs, act, True, True, norm)
            q, scales = quantize_inputs(args.x, args.weight, args.norm)
            wanted = expected(args, q, scales)
            for plan in plans_of(args)[:6]:
                out = outputs_of(args)
                block_gemv(args, out, plan, pdl=True).run()
                error = float((out.double() - wanted).norm() / wanted.norm())
                if not error < TOLERANCE:
                    yield f"WRONG {outputs} {inputs} {act} {norm} {plan}: {error}"
    args = make(300, 16, 4096, None, False, False, norm=True)
    assert args.norm is not None
    fused = quantize_inputs(args.x, args.weight, args.norm)
    apart = quantize_inputs(rms_norm(args.x, *args.norm), args.weight, None)
    differ = int((fused[0].view(torch.uint8) != apart[0].view(torch.uint8)).sum())
    yield f"norm and rounding in one kernel: {differ} of {fused[0].numel()} numbers differ"
    # On a GPU, torch divides by a number by multiplying.
    scale = args.x.float().view(300, -1, 128).abs().amax(2).cpu() / 448
    same = torch.equal(scale, quantize_inputs(args.x, args.weight, None)[1].cpu())
    yield f"scales are the reference's: {same}"


def attempt(calls: list[Callable[[], object]]) -> float:
    """Returns µs, infinity where a variant does not run."""
    try:
        return graph_us(calls, target_ms=1.5, at_least=12)
    except Exception as error:
        print(type(error).__name__, str(error)[:200])
        return float("inf")


def told(found: list[tuple[float, tuple[object, ...]]]) -> str:
    """Returns the time of the first, which the rules of thumb choose, and the best three."""
    best = sorted(found, key=lambda own: own[0])[:3]
    return f"{found[0][0]:.1f}; " + ", ".join(
        f"{us:.1f} {'/'.join(str(int(part)) for part in own)}"  # type: ignore[call-overload]
        for us, own in best
    )


def apart(args: LinearArgs) -> None:
    """Runs the norm and the rounding, to 16 bits, in a kernel of their own."""
    x = round_inputs(args.x, args.weight, args.norm)
    small_linear(replace(args, x=x, norm=None), rms_norm=normed)


def normed(x: Tensor, norm: RmsScale) -> Tensor:
    return rms_norm(x, *norm)


def time_one_row(name: str) -> str:
    outputs, inputs, _, _ = LAYERS[name]
    copies = copies_beyond_l2(outputs * inputs, most=16)
    all_args = [layer(name, 1, draw(outputs, inputs)) for _ in range(copies)]
    outs = [outputs_of(args) for args in all_args]
    found = []
    for plan in plans_of(all_args[0]):
        calls = [
            block_gemv(args, out, plan, pdl=True).run
            for args, out in zip(all_args, outs, strict=True)
        ]
        found.append((attempt(calls), tuple(plan)))

    before = attempt([partial(apart, args) for args in all_args])
    plain = replace(FORM, inputs="none")
    bare = [
        partial(small_linear, replace(a, weight=replace(a.weight, format=plain)), rms_norm=normed)
        for a in all_args
    ]
    floor = outputs * inputs * (1 + 4 / 128) / BANDWIDTH
    return f"| 1 | {name} | {floor:.1f} | {before:.1f} | {attempt(bare):.1f} | {told(found)} |"


def time_rows(name: str, rows: int) -> str:
    outputs, inputs, _, _ = LAYERS[name]
    copies = copies_beyond_l2(outputs * inputs, most=4)
    all_args = [layer(name, rows, draw(outputs, inputs)) for _ in range(copies)]
    x = all_args[0].x
    plain = [torch.randn(outputs, inputs, dtype=x.dtype, device=DEVICE) for _ in range(2)]
    library = attempt([partial(torch.matmul, x, w.t()) for w in plain])
    del plain
    q, scales = quantize_inputs(x, all_args[0].weight, None)
    found = []
    for tile in tiles_of(rows, all_args[0]):
        calls = [many(q, scales, args, tile, outputs_of(args)).run for args in all_args]
        found.append((attempt(calls), tuple(tile)))
    any_card = float("nan")
    if rows <= 32:
        any_card = attempt([partial(apart, args) for args in all_args])
    elif rows in (64, 2048):
        any_card = attempt(
            [partial(eight_bit_gemm, q, scales, a, any_tile_for(rows, a)) for a in all_args]
        )
    norm = all_args[0].norm
    rounding = attempt([partial(quantize_inputs, x, all_args[0].weight, norm)])
    rate = 2 * rows * outputs * inputs / min(us for us, _ in found) / 1e6
    return (
        f"| {rows} | {name} | {library:.1f} | {any_card:.1f} | {rounding:.1f} | {told(found)} | "
        f"{rate:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--warm", default="", metavar="SHARE/OF")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.warm:
        share, of = map(int, options.warm.split("/"))
        compile_all(share, of)
        return
    end = time.monotonic() + options.seconds
    for problem in checks():
        print(problem, flush=True)
    print(f"checks took {time.monotonic() - end + options.seconds:.0f} s", flush=True)
    one = []
    for name in LAYERS:
        one.append(time_one_row(name))
        print(one[-1], flush=True)
    lines = ["| rows | layer | bf16 | any card | rounding | own; best (rows, shared) | TFLOP/s |"]
    for rows in ROWS:
        for name in LAYERS:
            if time.monotonic() < end:
                lines.append(time_rows(name, rows))
                print(lines[-1], flush=True)
    print("| rows | layer | floor | apart | no rounding | own; best (warps, chunks, programs) |")
    print("\n".join(one + lines))


if __name__ == "__main__":
    main()
