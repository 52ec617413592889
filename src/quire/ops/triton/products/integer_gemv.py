"""GEMV of one to four rows and a weight of 4 or 8 bits: tensor cores multiply integers.

Unpacking 512 weights of 4 bits to pairs of 16-bit floats takes 28 instructions. Unpacking them to
bytes takes six: a mask for the even ones, a shift and a mask for the odd ones. Inputs therefore
become integers too, of 15 bits relative to the largest input of their group. An integer is stored
as two bytes, `256 high + low`, which are two columns of the product. `mma.sync` (m16n8k32) sums
products of bytes exactly. A group's sum is multiplied by its scale in fp32.

Weights of 8 bits are bytes already. They have one scale for each output, which is applied to the
output's sum.

A tile is 16 weight rows. A program's warps share K, and each has neighbouring groups of inputs. A
warp requests its weights before the preceding kernel has ended. Then it rounds its own share of x
to bytes, each input once, and stores them in shared memory. For a norm, a reduction over the warps
gives the sum of a row's squares. If a row has more groups than registers and shared memory hold, it
is read in segments. A program computes one segment of all its tiles, then the next segment."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.activation import activate
from quire.ops.triton.launch import options
from quire.ops.triton.products.common import gdc_launch_dependents, wait_for_predecessor
from quire.ops.triton.products.mma_gemv import (
    keep_order,
    load_residual,
    load_words,
    store_outputs,
    times,
)
from quire.ops.triton.products.plan import (
    CHUNK_WORDS,
    INTEGER_INPUTS,
    GemmPlan,
    Launch,
    LinearArgs,
    integer_bytes,
    integer_segments,
    shape_of,
)
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.thread_words import (
    add_squares,
    high_halves,
    keep_float,
    keep_four,
    keep_two,
    kept_float,
    kept_four,
    kept_two,
    larger,
    load_four,
    load_one,
    load_two,
    low_halves,
    of_lane,
    of_other_lane,
    of_quarter,
    sum_of_lanes,
    sum_of_warps,
)

CHUNK: tl.constexpr = tl.constexpr(CHUNK_WORDS)
INPUTS: tl.constexpr = tl.constexpr(INTEGER_INPUTS)
MAGIC: tl.constexpr = tl.constexpr(12583040.0)
"""1.5 * 2^23 + 128. Added to an integer, it leaves the integer plus 128 in the low 16 bits. The
high byte is then the nearest multiple of 256, and the low byte minus 128 is the remainder."""
SUM_OF_MAGIC: tl.constexpr = tl.constexpr(0x68001000)
"""32 times the bits of `MAGIC`, modulo 2^32."""

_MULTIPLY = tl.constexpr("""{
.reg .b32 a<4>, t;
and.b32 a0, $4, 0x0F0F0F0F; shr.u32 t, $4, 4; and.b32 a2, t, 0x0F0F0F0F;
and.b32 a1, $5, 0x0F0F0F0F; shr.u32 t, $5, 4; and.b32 a3, t, 0x0F0F0F0F;
mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$6, $7},
{$8, $9, $10, $11};
}""")
_MULTIPLY8 = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
    " {$10, $11, $12, $13};"
)
_BYTES = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140;
prmt.b32 $0, a, b, 0x5410; xor.b32 $0, $0, 0x80808080; prmt.b32 $1, a, b, 0x7632;
}""")


@triton.jit
def _multiply(low, high, b0, b1, sums):
    """Returns int32 `sums` plus the products of bytes of 8 inputs and a word of two rows each."""
    return tl.inline_asm_elementwise(
        _MULTIPLY, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [low, high, b0, b1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _multiply8(low0, high0, low1, high1, b0, b1, sums):
    """Returns int32 `sums` plus the products of the bytes of 8 inputs and two words of two rows
    each."""
    return tl.inline_asm_elementwise(
        _MULTIPLY8, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [low0, high0, low1, high1, b0, b1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def bytes_of(i0, i1, i2, i3):
    """Returns the four low bytes and the four high bytes of integers to which `MAGIC` was added."""
    return tl.inline_asm_elementwise(
        _BYTES, "=&r,=&r,r,r,r,r", [i0, i1, i2, i3], dtype=(tl.int32, tl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def exponent_of(pairs, WIDE: tl.constexpr):
    """Returns the exponent of the largest of a thread's 32 inputs, at least 14. With WIDE it covers
    the inputs of four neighbouring threads."""
    largest = larger(pairs[0], pairs[1])
    for each in tl.static_range(2, 16):
        largest = larger(largest, pairs[each])
    largest = tl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF)
    if WIDE:
        largest = tl.maximum(largest, of_other_lane(largest, 1))
        largest = tl.maximum(largest, of_other_lane(largest, 2))
    return tl.maximum(largest >> 7, 14)


@triton.jit
def factor_of(exponent):
    """Returns the factor from inputs to 15-bit integers, by the exponent of the largest input."""
    return ((267 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unit_of(exponent):
    """Returns the fp32 bits of the value of the integer 1, NaN if an input is NaN or infinite."""
    return tl.where(exponent == 255, 0x7FC00000, (exponent - 13) << 23)


@triton.jit
def digits_of(pairs, exponent, IN_TURNS: tl.constexpr):
    """Returns 32 inputs as bytes, and the sum of the integers. Each eight inputs have two words of
    low bytes and two words of high bytes.

    With IN_TURNS the even ones of each eight inputs come first."""
    factor = factor_of(exponent)
    total = tl.full(exponent.shape, -SUM_OF_MAGIC, tl.int32)
    kept = ()
    for eight in tl.static_range(4):
        even = ()
        odd = ()
        for each in tl.static_range(4):
            pair = pairs[4 * eight + each]
            first = tl.fma(low_halves(pair), factor, MAGIC).to(tl.int32, bitcast=True)
            second = tl.fma(high_halves(pair), factor, MAGIC).to(tl.int32, bitcast=True)
            total += first + second
            even = even + (first,)
            odd = odd + (second,)
        if IN_TURNS:
            low0, high0 = bytes_of(even[0], even[1], even[2], even[3])
            low1, high1 = bytes_of(odd[0], odd[1], odd[2], odd[3])
        else:
            low0, high0 = bytes_of(even[0], odd[0], even[1], odd[1])
            low1, high1 = bytes_of(even[2], odd[2], even[3], odd[3])
        kept = kept + ((low0, low1, high0, high1),)
    return kept, total


@triton.jit
def _keep_inputs(
    x_ptrs, g_ptrs, wanted, own, address, about, leads,
    ROWS: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Stores bytes of 32 inputs of each thread, of one row of x, in shared memory at `address`.

    For the group of each four threads it stores, at `about`, the sum of the integers and the value
    of the integer 1. It returns the sum of squares of the thread's inputs. `own` says whether the
    thread has a place.

    The inputs match 16 neighbouring bytes of a weight row of 4 bits, or 16 bytes in each half of a
    group of 8 bits."""
    pairs = ()
    squares = tl.zeros(wanted.shape, tl.float32)
    for part in tl.static_range(4):
        place = 4 * part + (24 if BITS == 8 and part >= 2 else 0)
        four = load_four(x_ptrs + place, wanted, EVEN)
        if NORM:
            gains = load_four(g_ptrs + place, wanted, EVEN)
            for each in tl.static_range(4):
                squares = add_squares(squares, four[each])
            four = (
                times(four[0], gains[0]), times(four[1], gains[1]),
                times(four[2], gains[2]), times(four[3], gains[3]),
            )  # fmt: skip
        pairs = pairs + (four[0], four[1], four[2], four[3])
    exponent = exponent_of(pairs, True)
    kept, total = digits_of(pairs, exponent, BITS == 4)
    for half in tl.static_range(2):
        a = kept[2 * half]
        b = kept[2 * half + 1]
        at = address + half * ROWS * 128
        keep_four(at, own, a[0], a[1], b[0], b[1])
        keep_four(at + 64, own, a[2], a[3], b[2], b[3])
    if BITS == 4:
        total += of_other_lane(total, 1)
        total += of_other_lane(total, 2)
    keep_two(about, leads, total, unit_of(exponent))
    return squares


@triton.jit
def _wanted(begin, INDEX: tl.constexpr, CHUNKS, more, QUADS: tl.constexpr, EVEN: tl.constexpr):
    """Returns whether a chunk exists, int32. With QUADS it tests the first one of its four."""
    wanted = more
    if not EVEN:
        wanted = (begin + (INDEX // 4 * 4 if QUADS else INDEX) < CHUNKS).to(tl.int32) & more
    return wanted


@triton.jit
def _load_chunk(
    low_ptrs, high_ptrs, begin, INDEX: tl.constexpr, CHUNKS, more, QUADS: tl.constexpr,
    EVEN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Returns four words of each of two rows, in tuples. With 8 bits a row has eight words."""
    wanted = _wanted(begin, INDEX, CHUNKS, more, QUADS, EVEN)
    if EVEN:
        wanted = tl.full(begin.shape, 1, tl.int32)
    at = INDEX * (CHUNK * BITS // 4)
    words = (load_words(low_ptrs + at, wanted), load_words(high_ptrs + at, wanted))
    if BITS == 8:
        at += CHUNK
        words = words + (load_words(low_ptrs + at, wanted), load_words(high_ptrs + at, wanted))
    return words


@triton.jit
def _load_scales(
    low_scale, high_scale, low_zero, high_zero, begin, PART: tl.constexpr, CHUNKS, more,
    HAS_ZEROS: tl.constexpr, QUADS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the scales and zeros of four groups of both rows.

    With QUADS each thread gets pairs of scales and words of four zeros. Otherwise each of four
    threads gets the scale and the zero of one group."""
    zeros = ()
    if QUADS:
        wanted = _wanted(begin, 4 * PART, CHUNKS, more, True, EVEN)
        scales = (
            load_two(low_scale + 2 * PART, wanted, EVEN),
            load_two(high_scale + 2 * PART, wanted, EVEN),
        )  # fmt: skip
        if HAS_ZEROS:
            zeros = (
                load_one(low_zero + PART, wanted, EVEN), load_one(high_zero + PART, wanted, EVEN),
            )  # fmt: skip
    else:
        at = 4 * PART + tl.arange(0, begin.shape[0]) % 4
        real = (begin + at < CHUNKS) & (more != 0)
        scales = (
            tl.load(low_scale + at, mask=real, other=0),
            tl.load(high_scale + at, mask=real, other=0),
        )  # fmt: skip
        if HAS_ZEROS:
            zeros = (
                tl.load(low_zero + at, mask=real, other=0),
                tl.load(high_zero + at, mask=real, other=0),
            )  # fmt: skip
    return scales, zeros


@triton.jit
def _places(
    w_ptr, s_ptr, z_ptr, stride_wn, stride_sn, stride_zn, row, begin, QUADS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Returns pointers to words, scales and zeros of a row from a chunk on."""
    words = w_ptr + row.to(tl.int64) * stride_wn + begin * (CHUNK * BITS // 4)
    scales = s_ptr + row * stride_sn + (begin // 2 if QUADS else begin)
    zeros = z_ptr + row * stride_zn + (begin // 4 if QUADS else begin)
    return words, scales, zeros


@triton.jit
def _load_tile(
    low, high, begin, CHUNKS, COUNT: tl.constexpr, HAS_ZEROS: tl.constexpr, QUADS: tl.constexpr,
    EVEN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Returns COUNT chunks in tuples of up to four, with their scales and zeros.

    `low` and `high` are the `_places` of the two rows."""
    parts = ()
    for part in tl.static_range((COUNT + 3) // 4):
        chunks = ()
        for index in tl.static_range(4):
            if 4 * part + index < COUNT:
                chunks = chunks + (_load_chunk(
                    low[0], high[0], begin, 4 * part + index, CHUNKS, 1, QUADS, EVEN, BITS,
                ),)  # fmt: skip
        scales = ()
        if BITS == 4:
            scales = _load_scales(
                low[1], high[1], low[2], high[2], begin, part, CHUNKS, 1, HAS_ZEROS, QUADS, EVEN,
            )  # fmt: skip
        parts = parts + ((chunks, scales),)
    return parts


@triton.jit
def _scale_and_zero(
    scales, zeros, ROW: tl.constexpr, INDEX: tl.constexpr, FP16: tl.constexpr,
    HAS_ZEROS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Returns the scale, fp32, and the zero, int32, of one of four groups of a row."""
    shift: tl.constexpr = 16 * (INDEX % 2) if QUADS else 0
    zero = 8
    if QUADS:
        pair = scales[ROW][INDEX // 2]
        if HAS_ZEROS:
            zero = (zeros[ROW] >> (8 * INDEX)) & 0xFF
    else:
        pair = scales[ROW].to(tl.int32) & 0xFFFF
        if HAS_ZEROS:
            pair |= zeros[ROW].to(tl.int32) << 16
        pair = of_quarter(pair, INDEX)
        if HAS_ZEROS:
            zero = pair >> 16
    if FP16:
        half = (pair >> shift).to(tl.int16)
        scale = half.to(tl.float16, bitcast=True).to(tl.float32)
    elif shift:
        scale = high_halves(pair)
    else:
        scale = low_halves(pair)
    return scale, zero


@triton.jit
def _add_chunk(
    sums, chunk, scales, zeros, digits, about, INDEX: tl.constexpr, ROWS: tl.constexpr,
    FP16: tl.constexpr, HAS_ZEROS: tl.constexpr, QUADS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Returns the sums of two weight rows plus the products of a chunk."""
    b0, b1, b2, b3 = kept_four(digits)
    c0, c1, c2, c3 = kept_four(digits + ROWS * 128)
    total, unit = kept_two(about)
    low = chunk[0]
    high = chunk[1]
    none = tl.zeros(low[0].shape, tl.int32)
    new = (none, none, none, none)
    if BITS == 8:
        low1 = chunk[2]
        high1 = chunk[3]
        new = _multiply8(low[0], high[0], low[1], high[1], b0, b1, new)
        new = _multiply8(low[2], high[2], low[3], high[3], b2, b3, new)
        new = _multiply8(low1[0], high1[0], low1[1], high1[1], c0, c1, new)
        new = _multiply8(low1[2], high1[2], low1[3], high1[3], c2, c3, new)
    else:
        new = _multiply(low[0], high[0], b0, b1, new)
        new = _multiply(low[1], high[1], b2, b3, new)
        new = _multiply(low[2], high[2], c0, c1, new)
        new = _multiply(low[3], high[3], c2, c3, new)
    y0 = new[0] + 256 * new[1]
    y1 = new[2] + 256 * new[3]
    s0 = unit.to(tl.float32, bitcast=True)
    s1 = s0
    if BITS == 4:
        scale0, zero0 = _scale_and_zero(scales, zeros, 0, INDEX, FP16, HAS_ZEROS, QUADS)
        scale1, zero1 = _scale_and_zero(scales, zeros, 1, INDEX, FP16, HAS_ZEROS, QUADS)
        y0 -= total * zero0
        y1 -= total * zero1
        s0 = scale0 * s0
        s1 = scale1 * s1
    return sums[0] + y0.to(tl.float32) * s0, sums[1] + y1.to(tl.float32) * s1


@triton.jit
def rows_of_tile(tile, eighth, N, GLU: tl.constexpr):
    """Returns each thread's two weight rows of a tile. Rows past the last are clamped to it."""
    if GLU:
        low = tl.minimum(tile * 8 + eighth, N - 1)
        high = low + N
    else:
        low = tl.minimum(tile * 16 + eighth, N - 1)
        high = tl.minimum(tile * 16 + 8 + eighth, N - 1)
    return low, high


@triton.jit(do_not_specialize=["M"])
def integer_gemv_kernel(
    x_ptr, g_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, M, N, CHUNKS, K, eps,
    stride_xm, stride_wn, stride_sn, stride_zn, stride_rm, stride_ym, TILES,
    SHARED: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr, SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, EVEN: tl.constexpr, LOOP: tl.constexpr, BITS: tl.constexpr,
    FP16: tl.constexpr, HAS_ZEROS: tl.constexpr, QUADS: tl.constexpr, GLU: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, APART: tl.constexpr,
    PDL: tl.constexpr, EAGER: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K BITS / 32 words]; a gated layer has 2 N weight
    rows.

    A tile is 16 weight rows. Grid: one program per tile, or with LOOP fewer programs, which stride
    over the tiles. Strides count elements of the type that a pointer points to.

    Args:
        x_ptr: int32 pairs of inputs.
        g_ptr: int32 pairs of norm weights.
        w_scale_ptr: with QUADS int32 words of two scales, otherwise 16-bit scales. Weights of 8
            bits have a float for each output.
        w_zero_ptr: with QUADS int32 words of four zeros, otherwise int8.
        COUNT: chunks of each warp in a segment.
        SEGMENTS: segments of a row. More than one needs LOOP.
        ROWS: rows of x, 1, 2 or 4, at least M.
        EVEN: all warps have the same number of chunks.
    """
    if PDL and EAGER:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    thread = tl.arange(0, 32 * WARPS)
    turn = thread // 32
    eighth = thread % 32 // 4
    quarter = thread % 4
    begin = turn * COUNT
    first = w_ptr + quarter * 4
    low0, high0 = rows_of_tile(pid, eighth, N, GLU)
    parts = _load_tile(
        _places(
            first, w_scale_ptr, w_zero_ptr, stride_wn, stride_sn, stride_zn, low0, begin, QUADS,
            BITS,
        ),
        _places(
            first, w_scale_ptr, w_zero_ptr, stride_wn, stride_sn, stride_zn, high0, begin, QUADS,
            BITS,
        ),
        begin, CHUNKS, COUNT, HAS_ZEROS, QUADS, EVEN, BITS,
    )  # fmt: skip
    # The epilogue's operands are loaded early, because no work would hide their latency at the end.
    m = quarter
    mine = tl.where(turn == 0, M, 0)
    if PDL:
        wait_for_predecessor(EAGER)
    shared = of_lane(thread, SHARED)
    notes = shared + WARPS * COUNT * ROWS * 256
    sums_at = notes + WARPS * COUNT * ROWS * 8
    squares = tl.zeros([32 * WARPS], tl.float32)
    own_digits = shared + turn * COUNT * ROWS * 256
    own_notes = notes + turn * COUNT * ROWS * 8
    digits = own_digits + tl.minimum(eighth, 2 * ROWS - 1) * 64 + quarter * 16
    about = own_notes + tl.minimum(quarter, ROWS - 1) * 8
    parity = 0
    for segment in range(SEGMENTS):
        begin = (segment * WARPS + turn) * COUNT
        # Four threads compute the bytes of x for a chunk.
        for part in tl.static_range((COUNT + 7) // 8):
            chunk = 8 * part + eighth
            own = chunk < COUNT
            real = own & (begin + chunk < CHUNKS)
            at = (begin + chunk) * (INPUTS // 2) + quarter * (64 // BITS)
            for row in tl.static_range(ROWS):
                squares += _keep_inputs(
                    x_ptr + tl.minimum(row, M - 1) * stride_xm + at, g_ptr + at, real.to(tl.int32),
                    own.to(tl.int32), own_digits + chunk * ROWS * 256 + row * 128 + quarter * 16,
                    own_notes + (chunk * ROWS + row) * 8, (own & (quarter == 0)).to(tl.int32),
                    ROWS, NORM, EVEN and COUNT % 8 == 0, BITS,
                )  # fmt: skip
        if NORM:
            keep_float(sums_at + WARPS * 512 + thread * 4, sum_of_lanes(squares))
        keep_order(thread)
        tile = pid
        partial = sums_at + WARPS * 640 + thread * 8
        for _ in range(0, tl.cdiv(TILES - pid, programs) if LOOP else 1):
            cols = tile * (8 if GLU else 16) + eighth
            low1, high1 = rows_of_tile(tile, eighth, N, GLU)
            b0 = 0.0
            b1 = 0.0
            if HAS_BIAS:
                b0 = tl.load(bias_ptr + low1).to(tl.float32)
                b1 = tl.load(bias_ptr + high1).to(tl.float32)
            s0 = 1.0
            s1 = 1.0
            if BITS == 8:
                s0 = tl.load(w_scale_ptr + low1 * stride_sn).to(tl.float32)
                s1 = tl.load(w_scale_ptr + high1 * stride_sn).to(tl.float32)
            r0 = load_residual(res_ptr, stride_rm, m, cols, mine, N, HAS_RES)
            r1 = load_residual(res_ptr, stride_rm, m, cols + 8, mine, N, HAS_RES and not GLU)
            follow = tile + programs
            more = (follow < TILES).to(tl.int32)
            next_tile = follow
            next_begin = begin
            if SEGMENTS > 1:
                # After the last tile comes the first tile with the next segment.
                next_tile = tl.where(follow < TILES, follow, pid)
                next_begin = begin + tl.where(follow < TILES, 0, WARPS * COUNT)
                more = more | (begin < (SEGMENTS - 1) * WARPS * COUNT).to(tl.int32)
            low2, high2 = rows_of_tile(next_tile, eighth, N, GLU)
            low = _places(
                first, w_scale_ptr, w_zero_ptr, stride_wn, stride_sn, stride_zn, low2, next_begin,
                QUADS, BITS,
            )  # fmt: skip
            high = _places(
                first, w_scale_ptr, w_zero_ptr, stride_wn, stride_sn, stride_zn, high2, next_begin,
                QUADS, BITS,
            )  # fmt: skip
            none = tl.zeros([32 * WARPS], tl.float32)
            sums = (none, none)
            following = ()
            for part in tl.static_range((COUNT + 3) // 4):
                chunks, more_of = parts[part]
                scales = ()
                zeros = ()
                if BITS == 4:
                    scales, zeros = more_of
                loaded = ()
                for index in tl.static_range(4):
                    if 4 * part + index < COUNT:
                        place = 4 * part + index
                        sums = _add_chunk(
                            sums, chunks[index], scales, zeros, digits + place * ROWS * 256,
                            about + place * ROWS * 8, index, ROWS, FP16, HAS_ZEROS, QUADS, BITS,
                        )  # fmt: skip
                        if LOOP:
                            loaded = loaded + (_load_chunk(
                                low[0], high[0], next_begin, place, CHUNKS, more, QUADS, EVEN, BITS
                            ),)  # fmt: skip
                if LOOP:
                    keep_order(thread)
                    new = ()
                    if BITS == 4:
                        new = _load_scales(
                            low[1], high[1], low[2], high[2], next_begin, part, CHUNKS, more,
                            HAS_ZEROS, QUADS, EVEN,
                        )  # fmt: skip
                    following = following + ((loaded, new),)
            if LOOP:
                parts = following
            y0, y1 = sums
            if SEGMENTS > 1:
                y0 += tl.where(begin < WARPS * COUNT, 0.0, kept_float(partial))
                y1 += tl.where(begin < WARPS * COUNT, 0.0, kept_float(partial + 4))
                keep_float(partial, y0)
                keep_float(partial + 4, y1)
            if segment == SEGMENTS - 1:
                at0 = sums_at + parity * WARPS * 256
                inverse = 1.0
                if WARPS > 1 or NORM:
                    keep_float(at0 + thread * 4, y0)
                    keep_float(at0 + WARPS * 128 + thread * 4, y1)
                    tl.debug_barrier()
                    y0 = sum_of_warps(at0, thread, WARPS)
                    y1 = sum_of_warps(at0 + WARPS * 128, thread, WARPS)
                    if NORM:
                        total = sum_of_warps(sums_at + WARPS * 512, thread, WARPS)
                        inverse = tl.rsqrt(total / K + eps)
                y0 = y0 * (inverse * s0) + b0
                y1 = y1 * (inverse * s1) + b1
                if APART:
                    store_outputs(y0, y_ptr, stride_ym, m, cols, mine, N)
                    store_outputs(y1, y_ptr + N, stride_ym, m, cols, mine, N)
                elif GLU:
                    gated = activate(y0, ACT) * y1 + r0
                    store_outputs(gated, y_ptr, stride_ym, m, cols, mine, N)
                else:
                    store_outputs(activate(y0, ACT) + r0, y_ptr, stride_ym, m, cols, mine, N)
                    store_outputs(activate(y1, ACT) + r1, y_ptr, stride_ym, m, cols + 8, mine, N)
            parity = 1 - parity
            tile = follow
            partial += WARPS * 256


def integer_gemv(args: LinearArgs, out: Tensor, plan: GemmPlan, *, pdl: bool) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N].

    The shape must pass `counts`, and with a norm also `norms_late`. `integer_bytes` of the plan
    must fit into shared memory."""
    x, own, res, norm, n = args.x, Operands(args.weight), args.residual, args.norm, args.n
    words, pairs = own.values.view(torch.int32), x.view(torch.int32)
    chunks, count, bits = args.k // INTEGER_INPUTS, plan.stages, own.bits or 8
    rows = triton.next_power_of_2(x.shape[0])
    scales, zeros = own.scales, own.zeros if own.has_zeros else words
    # The scales of four groups are two words, if rows begin at multiples of words.
    quads = bits == 4 and count % 4 == chunks % 4 == scales.stride(0) % 4 == 0
    quads = quads and (scales.data_ptr() | 2 * zeros.data_ptr()) % 8 == 0
    if bits == 4:
        scales = scales.view(torch.int32 if quads else torch.int16)
    if quads and own.has_zeros:
        zeros = zeros.view(torch.int32)
    size, segments = integer_bytes(shape_of(args), plan), integer_segments(args.k, plan)
    shared = f"{{\n.shared .align 16 .b8 kept[{size}];\nmov.u32 $0, kept;\n}}"
    tiles = triton.cdiv(n, 8 if args.gated else 16)
    operands = (
        pairs, pairs if norm is None else norm.weight.view(torch.int32), words, scales, zeros,
        x if args.bias is None else args.bias, x if res is None else res, out, x.shape[0], n,
        chunks, args.k, 0.0 if norm is None else norm.eps, pairs.stride(0), words.stride(0),
        scales.stride(0), zeros.stride(0), 0 if res is None else res.stride(0), out.stride(0),
        tiles,
    )  # fmt: skip
    named = options(
        pdl, SHARED=shared, WARPS=plan.warps, COUNT=count, SEGMENTS=segments, ROWS=rows,
        EVEN=chunks == plan.warps * count * segments,
        LOOP=segments > 1 or 0 < plan.programs < tiles, BITS=bits,
        FP16=own.scales.dtype == torch.float16, HAS_ZEROS=own.has_zeros, QUADS=quads,
        GLU=args.gated, ACT=args.act_name, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        APART=args.apart, PDL=pdl, EAGER=plan.eager, NORM=norm is not None,
        num_warps=plan.warps, num_stages=1,
    )  # fmt: skip
    return Launch(integer_gemv_kernel, (min(plan.programs or tiles, tiles),), operands, named)
