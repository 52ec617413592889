"""GEMV of one row and a weight in 8-bit floats with a scale for each 128 inputs.

The kernel rounds the row to 8-bit floats as well. One instruction widens 8-bit floats to pairs of
fp16, which is exact for the weights and for the rounded row.

A tile is 16 weight rows. A program's warps share K, and each has neighbouring groups of inputs. A
warp requests its weights before the preceding kernel has ended. Then it rounds its own share of the
row, each input once, and stores it in shared memory with a scale for each group. Programs with
several tiles request the next weights while they multiply. If the row is normed first, a reduction
over the warps gives the sum of its squares before the row is rounded."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.activation import activate
from quire.ops.triton.launch import options, traits
from quire.ops.triton.products.common import gdc_launch_dependents, normalise, wait_for_predecessor
from quire.ops.triton.products.integer_gemv import rows_of_tile
from quire.ops.triton.products.mma_gemv import keep_order, load_residual, load_words, store_outputs
from quire.ops.triton.products.plan import CHUNK_WORDS, Launch, LinearArgs
from quire.ops.triton.products.round_inputs import quotient, scale_for
from quire.ops.triton.products.thread_words import (
    add_squares,
    high_halves,
    keep_float,
    keep_four,
    keep_two,
    kept_float,
    kept_four,
    load_four,
    low_halves,
    of_lane,
    of_other_lane,
    sum_of_lanes,
    sum_of_warps,
)

CHUNK: tl.constexpr = tl.constexpr(CHUNK_WORDS)
INPUTS: tl.constexpr = tl.constexpr(4 * CHUNK_WORDS)
LARGEST: tl.constexpr = tl.constexpr(448.0)
_GROUP = 128
"""Inputs that share a scale: two chunks."""
_MOST_BYTES = 40 << 10
"""Bytes of shared memory for the row."""

_SHAPES = (
    (8, 8), (8, 10), (8, 12), (8, 6), (8, 4), (16, 4), (4, 12), (4, 8), (4, 10), (4, 6), (4, 4),
    (2, 8), (2, 6), (2, 4), (2, 2), (1, 4), (1, 2),
)  # fmt: skip
"""Warps of a program, and chunks that each has in flight."""
_MOST_PARTS = 6
"""The most rounds of COUNT chunks that a warp may have, which limits the length of a row."""

_MULTIPLY = tl.constexpr("""{
.reg .b16 h<4>;
.reg .b32 a<2>, b<2>;
mov.b32 {h0, h1}, $4; mov.b32 {h2, h3}, $5;
cvt.rn.f16x2.e4m3x2 a0, h0; cvt.rn.f16x2.e4m3x2 a1, h1;
cvt.rn.f16x2.e4m3x2 b0, h2; cvt.rn.f16x2.e4m3x2 b1, h3;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {a0, b0, a1, b1}, {$6, $7},
{$8, $9, $10, $11};
}""")
_ROUND = tl.constexpr("""{
.reg .b16 h;
cvt.rn.satfinite.e4m3x2.f32 h, $2, $1;
cvt.rn.f16x2.e4m3x2 $0, h;
}""")


@triton.jit
def _multiply(low, high, x0, x1, sums):
    """Returns `sums` plus the products of 4 inputs and a word of each of two rows."""
    return tl.inline_asm_elementwise(
        _MULTIPLY, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [low, high, x0, x1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _rounded(first, second):
    """Returns two numbers rounded to 8-bit floats, as a pair of fp16 numbers."""
    return tl.inline_asm_elementwise(
        _ROUND, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _load_inputs(x_ptrs, wanted):
    """Returns 16 neighbouring bf16 inputs of each thread, as pairs."""
    a = load_four(x_ptrs, wanted, False)
    b = load_four(x_ptrs + 4, wanted, False)
    return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])


@triton.jit
def _normed(pairs, gains, inverse):
    """Returns both numbers of pairs, normed and rounded to bf16."""
    first = normalise(low_halves(pairs), inverse, low_halves(gains), tl.bfloat16, tl.bfloat16)
    second = normalise(high_halves(pairs), inverse, high_halves(gains), tl.bfloat16, tl.bfloat16)
    return first, second


@triton.jit
def _keep_inputs(
    pairs, g_ptrs, inverse, wanted, address, about, leads, NORM: tl.constexpr
):  # fmt: skip
    """Rounds 16 inputs of each thread, and stores them and their scale in shared memory. Eight
    neighbouring threads have the inputs of one group."""
    even = ()
    odd = ()
    if NORM:
        gains = _load_inputs(g_ptrs, wanted)
        for each in tl.static_range(8):
            first, second = _normed(pairs[each], gains[each], inverse)
            even = even + (first,)
            odd = odd + (second,)
    else:
        for each in tl.static_range(8):
            even = even + (low_halves(pairs[each]),)
            odd = odd + (high_halves(pairs[each]),)
    largest = tl.maximum(tl.abs(even[0]), tl.abs(odd[0]))
    for each in tl.static_range(1, 8):
        largest = tl.maximum(largest, tl.maximum(tl.abs(even[each]), tl.abs(odd[each])))
    # Bits of non-negative floats have the same order as their values.
    bits = largest.to(tl.int32, bitcast=True)
    bits = tl.maximum(bits, of_other_lane(bits, 1))
    bits = tl.maximum(bits, of_other_lane(bits, 2))
    bits = tl.maximum(bits, of_other_lane(bits, 4))
    largest = bits.to(tl.float32, bitcast=True)
    scale = scale_for(largest, LARGEST)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    kept = ()
    for each in tl.static_range(8):
        kept = kept + (
            _rounded(
                quotient(even[each], scale, reciprocal), quotient(odd[each], scale, reciprocal)
            ),
        )  # fmt: skip
    keep_four(address, wanted, kept[0], kept[1], kept[2], kept[3])
    keep_four(address + 16, wanted, kept[4], kept[5], kept[6], kept[7])
    unit = scale.to(tl.int32, bitcast=True)
    keep_two(about, leads, unit, unit)


@triton.jit
def _load_group(low_ptrs, high_ptrs, low_scale, high_scale, at, wanted):
    """Returns two chunks of words of both weight rows, and the scales of their group."""
    return (
        (load_words(low_ptrs + at, wanted), load_words(high_ptrs + at, wanted)),
        (load_words(low_ptrs + at + CHUNK, wanted), load_words(high_ptrs + at + CHUNK, wanted)),
        tl.load(low_scale + at // (2 * CHUNK)), tl.load(high_scale + at // (2 * CHUNK)),
    )  # fmt: skip


@triton.jit
def _add_group(sums, group, digits, about):
    """Returns the sums of two weight rows plus the products of a group."""
    none = tl.zeros(sums[0].shape, tl.float32)
    new = (none, none, none, none)
    for half in tl.static_range(2):
        low, high = group[half]
        p0, p1, p2, p3 = kept_four(digits + half * 128)
        q0, q1, q2, q3 = kept_four(digits + half * 128 + 16)
        new = _multiply(low[0], high[0], p0, p1, new)
        new = _multiply(low[1], high[1], p2, p3, new)
        new = _multiply(low[2], high[2], q0, q1, new)
        new = _multiply(low[3], high[3], q2, q3, new)
    unit = kept_float(about)
    return sums[0] + new[0] * (group[2] * unit), sums[1] + new[2] * (group[3] * unit)


@triton.jit
def block_gemv_kernel(
    x_ptr, g_ptr, w_ptr, w_scale_ptr, bias_ptr, res_ptr, y_ptr, N, K, eps, stride_wn, stride_sn,
    TILES, SHARED: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr,
    LOOP: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr, PDL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Computes y [N] of x [K] and w [N, K / 4 words]; a gated layer has 2 N weight rows.

    A tile is 16 weight rows. Grid: one program per tile, or with LOOP fewer programs, which stride
    over the tiles.

    Args:
        x_ptr: int32 pairs of bf16 inputs.
        g_ptr: int32 pairs of bf16 norm weights.
        stride_wn: words from one weight row to the next.
        COUNT: chunks that a warp has in flight.
        PARTS: number of rounds of COUNT chunks that a warp has.
    """
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    thread = tl.arange(0, 32 * WARPS)
    turn = thread // 32
    eighth = thread % 32 // 4
    quarter = thread % 4
    begin = turn * COUNT
    one = tl.full([32 * WARPS], 1, tl.int32)
    first = w_ptr + begin * CHUNK + quarter * 4
    scales_at = w_scale_ptr + begin // 2
    low, high = rows_of_tile(pid, eighth, N, GLU)
    groups = ()
    for index in tl.static_range(COUNT // 2):
        groups = groups + (
            _load_group(
                first + low.to(tl.int64) * stride_wn, first + high.to(tl.int64) * stride_wn,
                scales_at + low * stride_sn, scales_at + high * stride_sn, index * 2 * CHUNK, one,
            ),
        )  # fmt: skip
    mine = tl.where(turn == 0, 1, 0)
    if PDL:
        wait_for_predecessor(True)
    shared = of_lane(thread, SHARED)
    notes = shared + WARPS * COUNT * PARTS * 128
    sums_at = notes + WARPS * COUNT * PARTS * 4
    inputs = ()
    squares = tl.zeros([32 * WARPS], tl.float32)
    for part in tl.static_range(PARTS):
        for turns in tl.static_range((COUNT + 7) // 8):
            chunk = 8 * turns + eighth
            own = (chunk < COUNT).to(tl.int32)
            at = (part * WARPS * COUNT + begin + chunk) * (INPUTS // 2) + quarter * 8
            pairs = _load_inputs(x_ptr + at, own)
            if NORM:
                for each in tl.static_range(8):
                    squares = add_squares(squares, pairs[each])
            inputs = inputs + ((pairs, at, own, part * WARPS * COUNT + begin + chunk),)
    inverse = 1.0
    if NORM:
        keep_float(sums_at + thread * 4, sum_of_lanes(squares))
        tl.debug_barrier()
        inverse = tl.rsqrt(sum_of_warps(sums_at, thread, WARPS) / K + eps)
        tl.debug_barrier()
    for index in tl.static_range(PARTS * ((COUNT + 7) // 8)):
        pairs, at, own, place = inputs[index]
        leads = own * (thread % 8 == 0).to(tl.int32)
        _keep_inputs(
            pairs, g_ptr + at, inverse, own, shared + place * 128 + quarter * 32,
            notes + place // 2 * 8, leads, NORM,
        )  # fmt: skip
    keep_order(thread)
    tile = pid
    parity = 0
    for _ in range(0, tl.cdiv(TILES - pid, programs) if LOOP else 1):
        cols = tile * (8 if GLU else 16) + eighth
        low1, high1 = rows_of_tile(tile, eighth, N, GLU)
        b0 = 0.0
        b1 = 0.0
        if HAS_BIAS:
            b0 = tl.load(bias_ptr + low1).to(tl.float32)
            b1 = tl.load(bias_ptr + high1).to(tl.float32)
        r0 = load_residual(res_ptr, 0, quarter, cols, mine, N, HAS_RES)
        r1 = load_residual(res_ptr, 0, quarter, cols + 8, mine, N, HAS_RES and not GLU)
        follow = tile + programs
        low2, high2 = rows_of_tile(follow, eighth, N, GLU)
        none = tl.zeros([32 * WARPS], tl.float32)
        sums = (none, none)
        for part in tl.static_range(PARTS):
            following = ()
            for index in tl.static_range(COUNT // 2):
                held = part * WARPS * COUNT + begin + 2 * index
                sums = _add_group(
                    sums, groups[index], shared + held * 128 + quarter * 32, notes + held * 4
                )
                if part + 1 < PARTS:
                    following = following + (
                        _load_group(
                            first + low1.to(tl.int64) * stride_wn,
                            first + high1.to(tl.int64) * stride_wn, scales_at + low1 * stride_sn,
                            scales_at + high1 * stride_sn,
                            ((part + 1) * WARPS * COUNT + index * 2) * CHUNK, one,
                        ),
                    )  # fmt: skip
                elif LOOP:
                    following = following + (
                        _load_group(
                            first + low2.to(tl.int64) * stride_wn,
                            first + high2.to(tl.int64) * stride_wn, scales_at + low2 * stride_sn,
                            scales_at + high2 * stride_sn, index * 2 * CHUNK,
                            (follow < TILES).to(tl.int32) * one,
                        ),
                    )  # fmt: skip
            if part + 1 < PARTS or LOOP:
                keep_order(thread)
                groups = following
        y0, y1 = sums
        if WARPS > 1:
            at0 = sums_at + parity * WARPS * 256
            keep_float(at0 + thread * 4, y0)
            keep_float(at0 + WARPS * 128 + thread * 4, y1)
            tl.debug_barrier()
            y0 = sum_of_warps(at0, thread, WARPS)
            y1 = sum_of_warps(at0 + WARPS * 128, thread, WARPS)
            parity = 1 - parity
        y0 += b0
        y1 += b1
        if GLU:
            store_outputs(activate(y0, ACT) * y1 + r0, y_ptr, 0, quarter, cols, mine, N)
        else:
            store_outputs(activate(y0, ACT) + r0, y_ptr, 0, quarter, cols, mine, N)
            store_outputs(activate(y1, ACT) + r1, y_ptr, 0, quarter, cols + 8, mine, N)
        tile = follow


class BlockPlan(NamedTuple):
    """One way to run `block_gemv`.

    Attributes:
        warps: warps of a program.
        count: chunks that each warp has in flight.
        programs: number of programs that share the tiles; 0 means one program per tile.
    """

    warps: int
    count: int
    programs: int


def plans_of(args: LinearArgs) -> list[BlockPlan]:
    """Returns plans in which warps share all chunks evenly. The first one was the fastest in a
    sweep over an 8B model's layers."""
    chunks, sms = args.k // (4 * CHUNK_WORDS), traits(args.x.device).num_sms
    tiles, found = _tiles(args), []
    for warps, count in _SHAPES:
        if chunks % (warps * count) == 0 and chunks <= _MOST_PARTS * warps * count:
            fits = (1, 2, 3, 0)
            if chunks == warps * count:
                # Two such programs run on a multiprocessor.
                fits = (0, 1, 2, 3) if tiles <= 2 * sms else fits
                fits = (2, 1, 3, 0) if 2 * sms < tiles <= 4 * sms else fits
            found += [BlockPlan(warps, count, fit * sms) for fit in fits if fit * sms < tiles]
    return found


def takes(args: LinearArgs) -> bool:
    """Whether the kernel supports a layer.

    It needs one row in bf16, and weights in 8-bit floats with a scale for each 128 inputs. The
    layer must round x in the same way."""
    weight, x, norm = args.weight, args.x, args.norm
    form, values, scales = weight.format, weight.values, weight.scales
    if form.values != torch.float8_e4m3fn or form.inputs != "group" or form.group != _GROUP:
        return False
    if form.zeros or form.ordered or weight.first or weight.inputs % _GROUP or scales is None:
        return False
    if len(x) != 1 or x.dtype != torch.bfloat16 or args.apart or 2 * args.k > _MOST_BYTES:
        return False
    gain = x if norm is None else norm.weight
    if gain is None or gain.dtype != torch.bfloat16:
        return False
    if not plans_of(args):
        return False
    starts = (x.data_ptr(), gain.data_ptr(), values.data_ptr(), values.stride(0))
    return scales.dtype == torch.float32 and all(start % 16 == 0 for start in starts)


def product(args: LinearArgs) -> Tensor:
    """Returns y [1, N], see `LinearArgs`, for a layer that passes `takes`."""
    out = torch.empty(1, args.n, dtype=args.x.dtype, device=args.x.device)
    block_gemv(args, out, plans_of(args)[0], pdl=traits(args.x.device).pdl).run()
    return out


def _tiles(args: LinearArgs) -> int:
    return triton.cdiv(args.n, 8 if args.gated else 16)


def block_gemv(args: LinearArgs, out: Tensor, plan: BlockPlan, *, pdl: bool) -> Launch:
    """Writes the layer `args`, whose x has one row, to `out` [1, N]."""
    weight, norm, res, x = args.weight, args.norm, args.residual, args.x
    assert weight.scales is not None
    words, pairs = weight.values.view(torch.int32), x.view(torch.int32)
    warps, count, programs = plan
    chunks, tiles = args.k // (4 * CHUNK_WORDS), _tiles(args)
    size = chunks * 132 + warps * 512
    operands = (
        pairs, pairs if norm is None else norm.weight.view(torch.int32), words, weight.scales,
        x if args.bias is None else args.bias, x if res is None else res, out, args.n, args.k,
        0.0 if norm is None else norm.eps, words.stride(0), weight.scales.stride(0), tiles,
    )  # fmt: skip
    named = options(
        pdl, SHARED=f"{{\n.shared .align 16 .b8 kept[{size}];\nmov.u32 $0, kept;\n}}", WARPS=warps,
        COUNT=count, PARTS=chunks // (warps * count), LOOP=0 < programs < tiles, GLU=args.gated,
        ACT=args.act_name, HAS_BIAS=args.bias is not None, HAS_RES=res is not None, PDL=pdl,
        NORM=norm is not None, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return Launch(block_gemv_kernel, (min(programs or tiles, tiles),), operands, named)
