"""GEMV on tensor cores: up to 8 rows times a weight of 8 or 4 bits, or up to 16 rows times a weight
of 16 bits.

With so few rows, reading the weight should take all of the time. But at that speed 37 values of 4
bits arrive per clock. Widening them to fp32 and multiplying each by each row takes more
instructions than a multiprocessor can issue. So two instructions convert a pair of values to a pair
of 16-bit floats, and `mma.sync` (m16n8k16) multiplies 16 weight rows by up to 8 rows of x. Each
thread loads 16 neighbouring bytes of two weight rows, and the matching inputs of one row of x, into
the registers of the instruction. Inputs may be summed in any order, so nothing is shuffled. Only
the sums of a program's warps go through shared memory.

A program's warps share K in turns of 64 bytes of a row. A warp requests its first chunks before the
preceding kernel has ended. A group's scale is applied to the group's sum, in fp32. For a norm
before weights of 16 bits, each row's squares are summed from the inputs of the product."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.activation import activate
from quire.ops.triton.launch import options
from quire.ops.triton.products.common import gdc_launch_dependents, wait_for_predecessor
from quire.ops.triton.products.plan import (
    CHUNK_WORDS,
    GemmPlan,
    Launch,
    LinearArgs,
    chunk_inputs,
    stored_bits,
)
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.thread_words import (
    EIGHT_BITS,
    FOUR_BITS,
    MULTIPLY,
    PRODUCT,
    TYPES,
    add_squares,
    four_bit_integers,
    registers,
)

_SUMS = ", {{${0}, ${1}, ${2}, ${3}}};"
CHUNK: tl.constexpr = tl.constexpr(CHUNK_WORDS)


def _four_bits(dtype: torch.dtype) -> str:
    """Returns instructions for a word of two rows, $4 and $5, and 8 inputs, $8 to $11.

    A value first becomes 2^7 (bf16) or 2^10 (fp16) + value. $6 and $7 are then added, which
    subtracts the zero. Values 4 places apart form a pair."""
    t, (magic, one) = TYPES[dtype], FOUR_BITS[dtype]
    lines = [f"mov.b32 y0, {one};"]
    for source, out, zero in (("$4", "a", "$6"), ("$5", "b", "$7")):
        lines += four_bit_integers(t, magic, source, [f"{out}{pair}" for pair in range(4)], zero)
    lines += [
        "prmt.b32 y0, $8, $10, 0x5410;", "prmt.b32 y1, $8, $10, 0x7632;",
        "prmt.b32 y2, $9, $11, 0x5410;", "prmt.b32 y3, $9, $11, 0x7632;",
    ]  # fmt: skip
    multiply = MULTIPLY.format(t=t)
    lines.append(multiply + "{a0, b0, a1, b1}, {y0, y1}" + _SUMS.format(12, 13, 14, 15))
    lines.append(multiply + "{a2, b2, a3, b3}, {y2, y3}" + _SUMS.format(0, 1, 2, 3))
    return registers(4, "\n".join(lines))


def _eight_bits(dtype: torch.dtype, unpack: str, count: int) -> str:
    """Returns instructions for a word of two rows, $4 and $5, and 4 inputs, $6 and $7.

    Args:
        unpack: instructions that convert the word w to pairs o0 and o1.
        count: registers that `unpack` needs for a row.
    """
    text = "\n".join(
        unpack.replace("o0", f"{out}0").replace("o1", f"{out}1").replace("o2", f"{out}2")
        .replace("o3", f"{out}3").replace("w,", f"${word},")
        for word, out in ((4, "a"), (5, "b"))
    )  # fmt: skip
    end = "{a0, b0, a1, b1}, {$6, $7}" + _SUMS.format(8, 9, 10, 11)
    return registers(count, f"{text}\n{MULTIPLY.format(t=TYPES[dtype])}{end}")


INSTRUCTIONS = {
    **{(torch.uint8, dtype): _four_bits(dtype) for dtype in TYPES},
    **{key: _eight_bits(key[1], *own) for key, own in EIGHT_BITS.items()},
    **{(dtype, dtype): PRODUCT[dtype] for dtype in TYPES},
}
"""Instructions that unpack and multiply, by the dtypes of stored values and of x."""


@triton.jit
def load_words(pointers, wanted):
    """Returns four neighbouring words of each thread, which no other thread reads. Words that are
    not `wanted` are undefined."""
    # A warp reads half of each line and soon after the other half. The hint loads both at once.
    return tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $5, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];\n}",
        "=r,=r,=r,=r,l,r", [pointers, wanted],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep_order(thread):
    """Keeps loads before this point.

    Otherwise the assembler moves the next round's loads to their use, and no load is in flight
    while a warp computes."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [thread], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_inputs(pointers):
    """Returns eight neighbouring inputs of each thread, as pairs."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointers],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def times(pairs, weights):
    """Returns products of pairs of bf16 numbers."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pairs, weights], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _inverse_rms(x_ptr, K, eps, THREADS: tl.constexpr):
    BLOCK: tl.constexpr = 8 * THREADS
    squares = tl.zeros([BLOCK], tl.float32)
    at = tl.arange(0, BLOCK)
    for k in range(0, K, BLOCK):
        x = tl.load(x_ptr + k + at, mask=k + at < K, other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _multiply4(ASM: tl.constexpr, low, high, zero0, zero1, x0, x1, x2, x3, sums):
    """Returns `sums` plus the products of 8 inputs and a word of each of two rows."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [low, high, zero0, zero1, x0, x1, x2, x3, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply8(ASM: tl.constexpr, low, high, x0, x1, sums):
    """Returns `sums` plus the products of 4 inputs and a word of each of two rows."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [low, high, x0, x1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def multiply_pairs(ASM: tl.constexpr, a0, a1, a2, a3, x0, x1, sums):
    """Returns `sums`, for 16 weight rows and 8 rows of x, plus the products of 16 inputs.

    See `PRODUCT`."""
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, x0, x1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _add_plain(
    sums, squares, chunk, x_ptrs, g_ptrs, inside, ASM: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Returns `sums` plus the products of a chunk of 16 bits, and `squares` plus the squares of its
    inputs."""
    low, high, _, _ = chunk
    w0, w1, w2, w3 = low
    v0, v1, v2, v3 = high
    p0, p1, p2, p3 = load_inputs(x_ptrs)
    if not EVEN:
        # Registers that were not loaded may hold NaN.
        w0 = tl.where(inside, w0, 0)
        w1 = tl.where(inside, w1, 0)
        w2 = tl.where(inside, w2, 0)
        w3 = tl.where(inside, w3, 0)
        v0 = tl.where(inside, v0, 0)
        v1 = tl.where(inside, v1, 0)
        v2 = tl.where(inside, v2, 0)
        v3 = tl.where(inside, v3, 0)
        p0 = tl.where(inside, p0, 0)
        p1 = tl.where(inside, p1, 0)
        p2 = tl.where(inside, p2, 0)
        p3 = tl.where(inside, p3, 0)
    if NORM:
        squares = add_squares(squares, p0)
        squares = add_squares(squares, p1)
        squares = add_squares(squares, p2)
        squares = add_squares(squares, p3)
        g0, g1, g2, g3 = load_inputs(g_ptrs)
        p0 = times(p0, g0)
        p1 = times(p1, g1)
        p2 = times(p2, g2)
        p3 = times(p3, g3)
    sums = multiply_pairs(ASM, w0, v0, w1, v1, p0, p1, sums)
    sums = multiply_pairs(ASM, w2, v2, w3, v3, p2, p3, sums)
    return sums, squares


@triton.jit
def _inverse_of_rows(squares, m, K, eps, WARPS: tl.constexpr):
    """Returns 1 / RMS of each lane's row m.

    `squares` has the sum of squares of each thread's inputs. A thread's inputs belong to the row
    with the thread's index divided by four."""
    of_rows = tl.sum(tl.sum(tl.reshape(squares, [WARPS, 8, 4]), 0), 1)
    mine = tl.arange(0, 8)[:, None] == m[None, :]
    total = tl.sum(tl.where(mine, of_rows[:, None], 0.0), 0)
    return tl.rsqrt(total / K + eps)


@triton.jit
def _inputs(x_ptrs, g_ptrs, at, NORM: tl.constexpr):
    """Returns eight neighbouring inputs of each thread, as pairs, times weights of a norm."""
    p0, p1, p2, p3 = load_inputs(x_ptrs + at)
    if NORM:
        g0, g1, g2, g3 = load_inputs(g_ptrs + at)
        p0 = times(p0, g0)
        p1 = times(p1, g1)
        p2 = times(p2, g2)
        p3 = times(p3, g3)
    return p0, p1, p2, p3


@triton.jit
def _load_chunks(
    low_ptrs, high_ptrs, low_scale, high_scale, low_zero, high_zero, first, turn, W,
    WARPS: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr, PER_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns COUNT chunks of words of both rows from `first` on, with their groups' scales and
    zeros.

    The pointers point to the warp's first chunk. Words of chunks past the last are undefined. With
    WHOLE there are none."""
    chunks = ()
    for index in tl.static_range(COUNT):
        at = first + index * WARPS * CHUNK
        wanted = tl.full([32 * WARPS], 1, tl.int32)
        if not WHOLE:
            wanted = (at + turn * CHUNK < W).to(tl.int32)
            at = tl.minimum(at, W - (turn + 1) * CHUNK)
        scales = ()
        zeros = ()
        if PER_GROUP > 0:
            group = (at // CHUNK + turn) // PER_GROUP
            scales = (tl.load(low_scale + group), tl.load(high_scale + group))
            if HAS_ZEROS:
                zeros = (tl.load(low_zero + group), tl.load(high_zero + group))
        low = load_words(low_ptrs + at, wanted)
        high = load_words(high_ptrs + at, wanted)
        chunks = chunks + ((low, high, scales, zeros),)
    return chunks


@triton.jit
def pair(zeros, ROW: tl.constexpr, WARPS: tl.constexpr, FP16: tl.constexpr, STORED: tl.constexpr):
    """Returns -(2^7 + zero), or -(2^10 + zero) with FP16, as a pair of 16-bit floats.

    Without STORED the zero is 8."""
    zero = tl.full([32 * WARPS], 8, tl.int32)
    if STORED:
        zero = zeros[ROW].to(tl.int32)
    bits = zero | (0xE400 if FP16 else 0xC300)
    return bits | (bits << 16)


@triton.jit
def _add_chunk(
    sums, chunk, x_ptrs, g_ptrs, inside, WARPS: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr, FP16: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Returns sums plus the products of a chunk: 4 words of each of two rows."""
    low, high, scales, zeros = chunk
    new = sums
    if GROUPED:
        none = tl.zeros([32 * WARPS], tl.float32)
        new = (none, none, none, none)
    for half in tl.static_range(2):
        p0, p1, p2, p3 = _inputs(x_ptrs, g_ptrs, half * (8 if BITS == 4 else 4), NORM)
        if not EVEN:
            p0 = tl.where(inside, p0, 0)
            p1 = tl.where(inside, p1, 0)
            p2 = tl.where(inside, p2, 0)
            p3 = tl.where(inside, p3, 0)
        if BITS == 4:
            q0, q1, q2, q3 = _inputs(x_ptrs, g_ptrs, half * 8 + 4, NORM)
            if not EVEN:
                q0 = tl.where(inside, q0, 0)
                q1 = tl.where(inside, q1, 0)
                q2 = tl.where(inside, q2, 0)
                q3 = tl.where(inside, q3, 0)
            zero0 = pair(zeros, 0, WARPS, FP16, HAS_ZEROS)
            zero1 = pair(zeros, 1, WARPS, FP16, HAS_ZEROS)
            new = _multiply4(ASM, low[2 * half], high[2 * half], zero0, zero1, p0, p1, p2, p3, new)
            new = _multiply4(
                ASM, low[2 * half + 1], high[2 * half + 1], zero0, zero1, q0, q1, q2, q3, new
            )
        else:
            new = _multiply8(ASM, low[2 * half], high[2 * half], p0, p1, new)
            new = _multiply8(ASM, low[2 * half + 1], high[2 * half + 1], p2, p3, new)
    if GROUPED:
        s0 = scales[0].to(tl.float32)
        s1 = scales[1].to(tl.float32)
        new = (
            sums[0] + new[0] * s0, sums[1] + new[1] * s0,
            sums[2] + new[2] * s1, sums[3] + new[3] * s1,
        )  # fmt: skip
    return new


@triton.jit
def load_residual(res_ptr, stride_rm, m, cols, M, N, HAS_RES: tl.constexpr):
    """Returns each thread's element of the residual in fp32, 0 past the end."""
    value = 0.0
    if HAS_RES:
        mask = (m < M) & (cols < N)
        value = tl.load(res_ptr + m * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def store_outputs(y, y_ptr, stride_ym, m, cols, M, N):
    """Stores the output of each thread that has one."""
    mask = (m < M) & (cols < N)
    tl.store(y_ptr + m * stride_ym + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_residuals(res_ptr, stride_rm, m, cols, M, N, HAS_RES: tl.constexpr, GLU: tl.constexpr):
    """Returns each lane's elements of the residual, for rows m and m + 1 and two outputs."""
    r0 = load_residual(res_ptr, stride_rm, m, cols, M, N, HAS_RES)
    r1 = load_residual(res_ptr, stride_rm, m + 1, cols, M, N, HAS_RES)
    r2 = load_residual(res_ptr, stride_rm, m, cols + 8, M, N, HAS_RES and not GLU)
    r3 = load_residual(res_ptr, stride_rm, m + 1, cols + 8, M, N, HAS_RES and not GLU)
    return r0, r1, r2, r3


@triton.jit
def _finish_rows(
    sums, even, odd, s0, s1, b0, b1, residuals, y_ptr, stride_ym, m, cols, M, N,
    WARPS: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Stores rows m and m + 1 of each lane.

    An output is the sum over the warps, times 1 / RMS of the row, times the output's scale. Then
    come bias, activation and residual."""
    y0, y1, y2, y3 = sums
    if WARPS > 1:
        total = tl.join(tl.join(y0, y1), tl.join(y2, y3))
        total = tl.sum(tl.reshape(total, [WARPS, 32, 2, 2]), 0)
        y02, y13 = tl.split(total)
        y0, y1 = tl.split(y02)
        y2, y3 = tl.split(y13)
    y0 = y0 * (s0 * even) + b0
    y1 = y1 * (s0 * odd) + b0
    y2 = y2 * (s1 * even) + b1
    y3 = y3 * (s1 * odd) + b1
    r0, r1, r2, r3 = residuals
    if APART:
        store_outputs(y0, y_ptr, stride_ym, m, cols, M, N)
        store_outputs(y1, y_ptr, stride_ym, m + 1, cols, M, N)
        store_outputs(y2, y_ptr + N, stride_ym, m, cols, M, N)
        store_outputs(y3, y_ptr + N, stride_ym, m + 1, cols, M, N)
    elif GLU:
        store_outputs(activate(y0, ACT) * y2 + r0, y_ptr, stride_ym, m, cols, M, N)
        store_outputs(activate(y1, ACT) * y3 + r1, y_ptr, stride_ym, m + 1, cols, M, N)
    else:
        store_outputs(activate(y0, ACT) + r0, y_ptr, stride_ym, m, cols, M, N)
        store_outputs(activate(y1, ACT) + r1, y_ptr, stride_ym, m + 1, cols, M, N)
        store_outputs(activate(y2, ACT) + r2, y_ptr, stride_ym, m, cols + 8, M, N)
        store_outputs(activate(y3, ACT) + r3, y_ptr, stride_ym, m + 1, cols + 8, M, N)


@triton.jit(do_not_specialize=["M"])
def mma_gemv_kernel(
    x_ptr, x16_ptr, g_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, M, N, W, K,
    eps, stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    WARPS: tl.constexpr, COUNT: tl.constexpr, SINGLE: tl.constexpr, EVEN: tl.constexpr,
    BITS: tl.constexpr, ASM: tl.constexpr, FP16: tl.constexpr, PER_GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, EAGER: tl.constexpr,
    NORM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, W words] (gated: [2 N, W]).

    A program has 16 weight rows.

    Args:
        x_ptr: int32 pairs of inputs. `stride_xm` counts pairs.
        COUNT: chunks that a warp has in flight.
        SINGLE: a warp has at most COUNT chunks.
        EVEN: all warps have the same number of chunks.
        PER_GROUP: chunks of a group. 0 means that each output has one scale.
        BLOCKS: blocks of 8 rows of x. There is one if BITS is below 16.
    """
    if PDL and EAGER:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    thread = tl.arange(0, 32 * WARPS)
    turn = thread // 32
    eighth = thread % 32 // 4
    quarter = thread % 4
    if GLU:
        low = tl.minimum(pid * 8 + eighth, N - 1)
        high = low + N
    else:
        low = tl.minimum(pid * 16 + eighth, N - 1)
        high = tl.minimum(pid * 16 + 8 + eighth, N - 1)
    low_ptrs = w_ptr + low.to(tl.int64) * stride_wn + turn * CHUNK + quarter * 4
    high_ptrs = w_ptr + high.to(tl.int64) * stride_wn + turn * CHUNK + quarter * 4
    STEP: tl.constexpr = WARPS * COUNT * CHUNK
    PAIRS: tl.constexpr = 16 // BITS  # Pairs of inputs per word.
    chunks = _load_chunks(
        low_ptrs, high_ptrs, w_scale_ptr + low * stride_sn, w_scale_ptr + high * stride_sn,
        w_zero_ptr + low * stride_sn, w_zero_ptr + high * stride_sn, 0, turn, W, WARPS, COUNT,
        SINGLE and EVEN, PER_GROUP, HAS_ZEROS,
    )  # fmt: skip
    # The epilogue's operands are loaded early, because no work would hide their latency at the end.
    lane = tl.arange(0, 32)
    m = lane % 4 * 2
    cols = pid * (8 if GLU else 16) + lane // 4
    low1 = tl.minimum(cols, N - 1)
    high1 = low1 + N if GLU else tl.minimum(cols + 8, N - 1)
    s0 = 1.0
    s1 = 1.0
    if PER_GROUP == 0 and BITS < 16:
        s0 = tl.load(w_scale_ptr + low1 * stride_sn).to(tl.float32)
        s1 = tl.load(w_scale_ptr + high1 * stride_sn).to(tl.float32)
    b0 = 0.0
    b1 = 0.0
    if HAS_BIAS:
        b0 = tl.load(bias_ptr + low1).to(tl.float32)
        b1 = tl.load(bias_ptr + high1).to(tl.float32)
    if PDL:
        wait_for_predecessor(EAGER)
    residuals = ()
    for block in tl.static_range(BLOCKS):
        own_m = m + 8 * block
        residuals = residuals + (_load_residuals(
            res_ptr, stride_rm, own_m, cols, M, N, HAS_RES, GLU
        ),)  # fmt: skip
    inverse = 1.0
    if NORM and BITS < 16:
        inverse = _inverse_rms(x16_ptr, K, eps, 32 * WARPS)
    # Columns of the product past the last row of x repeat that row, and are not stored.
    own = (turn * CHUNK + quarter * 4) * PAIRS
    none = tl.zeros([32 * WARPS], tl.float32)
    x_ptrs = ()
    sums = ()
    squares = ()
    for block in tl.static_range(BLOCKS):
        x_ptrs = x_ptrs + (x_ptr + tl.minimum(eighth + 8 * block, M - 1) * stride_xm + own,)
        sums = sums + ((none, none, none, none),)
        squares = squares + (none,)
    for first in range(0, STEP if SINGLE else W, STEP):
        current = chunks
        if not SINGLE:
            chunks = _load_chunks(
                low_ptrs, high_ptrs, w_scale_ptr + low * stride_sn,
                w_scale_ptr + high * stride_sn, w_zero_ptr + low * stride_sn,
                w_zero_ptr + high * stride_sn, first + STEP, turn, W, WARPS, COUNT, False,
                PER_GROUP, HAS_ZEROS,
            )  # fmt: skip
            keep_order(thread)
        for index in tl.static_range(COUNT):
            at = first + index * WARPS * CHUNK
            inside = at + turn * CHUNK < W
            if not EVEN:
                at = tl.minimum(at, W - (turn + 1) * CHUNK)
            if BITS == 16:
                new_sums = ()
                new_squares = ()
                for block in tl.static_range(BLOCKS):
                    new, square = _add_plain(
                        sums[block], squares[block], current[index], x_ptrs[block] + at,
                        g_ptr + own + at, inside, ASM, EVEN, NORM,
                    )  # fmt: skip
                    new_sums = new_sums + (new,)
                    new_squares = new_squares + (square,)
                sums = new_sums
                squares = new_squares
            else:
                new = _add_chunk(
                    sums[0], current[index], x_ptrs[0] + at * PAIRS, g_ptr + own + at * PAIRS,
                    inside, WARPS, BITS, ASM, FP16, PER_GROUP > 0, HAS_ZEROS, EVEN, NORM,
                )  # fmt: skip
                sums = (new,)
    for block in tl.static_range(BLOCKS):
        own_m = m + 8 * block
        even = inverse
        odd = inverse
        if NORM and BITS == 16:
            even = _inverse_of_rows(squares[block], m, K, eps, WARPS)
            odd = _inverse_of_rows(squares[block], m + 1, K, eps, WARPS)
        _finish_rows(
            sums[block], even, odd, s0, s1, b0, b1, residuals[block], y_ptr, stride_ym, own_m,
            cols, M, N, WARPS, GLU, ACT, APART,
        )  # fmt: skip


def mma_gemv(args: LinearArgs, out: Tensor, plan: GemmPlan, *, pdl: bool) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N].

    The shape must pass `multiplies`, and with a norm also `norms_late`."""
    x, own, res, norm, n = args.x, Operands(args.weight), args.residual, args.norm, args.n
    words, pairs = own.values.view(torch.int32), x.view(torch.int32)
    count, bits = words.shape[1], stored_bits(args.weight.format)
    step = plan.warps * plan.stages * CHUNK_WORDS
    operands = (
        pairs, x, pairs if norm is None else norm.weight.view(torch.int32), words, own.scales,
        own.zeros, x if args.bias is None else args.bias, x if res is None else res, out,
        x.shape[0], n, count, args.k, 0.0 if norm is None else norm.eps, pairs.stride(0),
        words.stride(0), own.scales.stride(0), 0 if res is None else res.stride(0), out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, WARPS=plan.warps, COUNT=plan.stages, SINGLE=count <= step, EVEN=count % step == 0,
        BITS=bits, ASM=INSTRUCTIONS[args.weight.dtype, x.dtype], FP16=x.dtype == torch.float16,
        PER_GROUP=own.group // chunk_inputs(bits), HAS_ZEROS=own.has_zeros, GLU=args.gated,
        ACT=args.act_name, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        APART=args.apart, PDL=pdl, EAGER=plan.eager, NORM=norm is not None,
        BLOCKS=max(1, plan.bm // 8), num_warps=plan.warps, num_stages=1,
    )  # fmt: skip
    rows = 8 if args.gated else 16
    return Launch(mma_gemv_kernel, (triton.cdiv(n, rows),), operands, named)
