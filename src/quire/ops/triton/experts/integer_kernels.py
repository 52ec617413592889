"""Products of one token and its experts on tensor cores, with inputs rounded to integers.

As in `integer_gemv`, weights of 4 bits become bytes. Inputs become numbers of 15 bits relative to
the largest of 32, stored as two bytes, `256 high + low`. One token needs two of the eight columns
of a product. So each of the four threads that share a weight row gets two columns, in which the
inputs of the other threads are 0. A thread then gets the sum of its own 32 inputs, and groups of 32
weights need no more instructions than groups of 128. Twice a 4-bit float is an integer too, and
`prmt` finds its byte in a table. Integers of 8 bits need no unpacking. 8-bit floats become fp16.
Their inputs become fp16 relative to the largest of 128, and all columns are equal.

A program's warps share the inputs, in the second product those of all experts. Each warp has
neighbouring pieces of 256 inputs. It rounds its share of x to bytes while its weights are loaded.
"""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, misc, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.experts.kernels import swiglu
from quire.ops.triton.products.common import wait_for_predecessor
from quire.ops.triton.products.integer_gemv import digits_of, exponent_of, factor_of, unit_of
from quire.ops.triton.products.mma_gemv import keep_order, load_residual, load_words, store_outputs
from quire.ops.triton.products.thread_words import (
    MULTIPLY,
    high_halves,
    keep_float,
    keep_four,
    keep_two,
    kept_four,
    kept_two,
    load_four,
    low_halves,
    of_lane,
    of_other_lane,
    sum_of_warps,
)

PART_BYTES = 288
"""Bytes of shared memory of a part. A part is four times 32 inputs of two bytes. Each of the four
also stores the value of the integer 1 and the sum of the integers."""
_DIGITS: tl.constexpr = tl.constexpr(256)
_ABOUT: tl.constexpr = tl.constexpr(32)

_SUMS = "{$0, $1, $2, $3}, {a0, a1, a2, a3}, {$8, $9}, {$10, $11, $12, $13};"
_INTEGER = "mma.sync.aligned.m16n8k32.row.col.s32.{}.s8.s32 " + _SUMS


def _four_bit_instructions() -> str:
    """Returns instructions for a word of each of two rows, $4 and $6. $5 and $7 are unused."""
    lines = []
    for word, even, odd in (("$4", "a0", "a2"), ("$6", "a1", "a3")):
        lines.append(f"and.b32 {even}, {word}, 0x0F0F0F0F; shr.u32 t, {word}, 4;")
        lines.append(f"and.b32 {odd}, t, 0x0F0F0F0F;")
    return _scope([*lines, _INTEGER.replace("{}", "u8")])


def _four_bit_float_instructions() -> str:
    """Returns instructions that unpack a word of each of two rows to bytes of 192 + twice the
    value.

    If a selector's sign bit is set, `prmt` fills a byte with copies of the selected byte's sign
    bit. One `prmt` looks values up in the table of positive numbers. It gives all ones where the
    sign is set. The other one uses the table of negative numbers and gives all ones elsewhere.
    Combined by AND, the two results are the bytes."""
    lines = []
    for word, first, last in (("$4", "a0", "a2"), ("$6", "a1", "a3")):
        lines.append(f"xor.b32 s, {word}, 0x88888888;")
        for out, positive, negative in ((first, word, "s"), (last, "t", "u")):
            if out == last:
                lines.append(f"shr.u32 t, {word}, 16; shr.u32 u, s, 16;")
            lines.append(f"prmt.b32 v, 0xC3C2C1C0, 0xCCC8C6C4, {positive};")
            lines.append(f"prmt.b32 {out}, 0xBDBEBFC0, 0xB4B8BABC, {negative};")
            lines.append(f"and.b32 {out}, {out}, v;")
    return _scope([*lines, _INTEGER.replace("{}", "u8")])


def _eight_bit_instructions() -> str:
    """Returns instructions for two words of each of two rows, $4 and $5, $6 and $7."""
    lines = [
        f"mov.b32 {out}, ${word};" for out, word in (("a0", 4), ("a2", 5), ("a1", 6), ("a3", 7))
    ]
    return _scope([*lines, _INTEGER.replace("{}", "s8")])


def _eight_bit_float_instructions() -> str:
    """Returns instructions for a word of each of two rows, $4 and $6, with fp32 sums."""
    lines = []
    for word, first, last in (("$4", "a0", "a2"), ("$6", "a1", "a3")):
        lines.append(f"mov.b32 {{h0, h1}}, {word};")
        lines.append(f"cvt.rn.f16x2.e4m3x2 {first}, h0; cvt.rn.f16x2.e4m3x2 {last}, h1;")
    product = MULTIPLY.format(t="f16") + "{a0, a1, a2, a3}, {$8, $9}, {$10, $11, $12, $13};"
    return _scope([*lines, product])


def _scope(lines: list[str]) -> str:
    text = "\n".join(lines)
    return f"{{\n.reg .b32 a<4>, s, t, u, v;\n.reg .b16 h<2>;\n{text}\n}}"


PRODUCTS = {
    "int4": _four_bit_instructions(),
    "e2m1": _four_bit_float_instructions(),
    "int8": _eight_bit_instructions(),
    "fp8": _eight_bit_float_instructions(),
}
"""Instructions that unpack words of two rows and multiply, by the kind of weights. Operands are the
words, $4 to $7, two words of inputs, $8 and $9, and sums, $10 to $13."""


@triton.jit
def _product(ASM: tl.constexpr, a0, a1, b0, b1, x0, x1, sums):
    """Returns int32 sums plus products of words a0, a1 of one row and b0, b1 of another."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, b0, b1, x0, x1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _float_product(ASM: tl.constexpr, a, b, x0, x1, sums):
    """Returns fp32 sums plus products of a word of each of two rows."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [a, a, b, b, x0, x1, sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _halves(low, high):
    """Returns two fp32 numbers as a pair of fp16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _load_32(x_ptrs, at, wanted, K, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Returns the 32 inputs of each thread's part, as pairs. Inputs past the last one, or that are
    not `wanted`, are 0.

    `at` is the thread's first pair. With 8 bits the other 16 inputs are 64 inputs after the first.
    """
    pairs = ()
    for quad in tl.static_range(4):
        own = at + (quad * 4 if BITS == 4 else quad // 2 * 32 + quad % 2 * 4)
        inside = wanted
        if not EVEN:
            inside = wanted & (own < K // 2).to(tl.int32)
        p0, p1, p2, p3 = load_four(x_ptrs + own, inside, False)
        pairs = pairs + (p0, p1, p2, p3)
    return pairs


@triton.jit
def _keep_digits(pairs, share, address, about, own, IN_TURNS: tl.constexpr):
    """Stores the low bytes of 32 inputs, then the high bytes, at `address`.

    It stores their sum, and `share` times the value of the integer 1, at `about`. With IN_TURNS the
    even ones of each eight inputs come first."""
    exponent = exponent_of(pairs, False)
    kept, total = digits_of(pairs, exponent, IN_TURNS)
    for half in tl.static_range(2):
        a = kept[2 * half]
        b = kept[2 * half + 1]
        keep_four(address + 16 * half, own, a[0], a[1], b[0], b[1])
        keep_four(address + 16 * half + 32, own, a[2], a[3], b[2], b[3])
    one = unit_of(exponent).to(tl.float32, bitcast=True) * share
    keep_two(about, own, total, one.to(tl.int32, bitcast=True))


@triton.jit
def _keep_halves(pairs, share, address, about, own):
    """Stores 32 inputs as fp16 at `address`, and `share` times the value of 1 at `about`."""
    exponent = exponent_of(pairs, True)
    factor = factor_of(exponent)
    for quad in tl.static_range(4):
        kept = ()
        for each in tl.static_range(4):
            pair = pairs[4 * quad + each]
            kept = kept + (_halves(low_halves(pair) * factor, high_halves(pair) * factor),)
        keep_four(address + 16 * quad, own, kept[0], kept[1], kept[2], kept[3])
    one = unit_of(exponent).to(tl.float32, bitcast=True) * share
    keep_two(about, own, exponent, one.to(tl.int32, bitcast=True))


@triton.jit
def _chosen(piece, ids_ptr, PIECES: tl.constexpr, CHOICES: tl.constexpr):
    """Returns four values for each piece: the index of its expert among the program's experts, the
    expert, the piece's index in the expert's row, and whether the piece exists."""
    if CHOICES == 1:
        known = tl.zeros(piece.shape, tl.int32)
        expert = tl.load(ids_ptr) + known
        inside = piece < PIECES
    else:
        choice = piece // PIECES
        known = tl.minimum(choice, CHOICES - 1)
        expert = tl.load(ids_ptr + known)
        inside = (choice < CHOICES) & (expert >= 0)
    return known, tl.maximum(expert, 0), tl.minimum(piece - known * PIECES, PIECES - 1), inside


@triton.jit
def _places(
    begin, x_ptr, ids_ptr, weights_ptr, stride_xm, eighth, quarter, TOTAL: tl.constexpr,
    PIECES: tl.constexpr, CHOICES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Returns four values for each thread, for eight parts at a time: the pointer to the inputs of
    one part, the part's index, whether it exists, and the expert's routing weight.

    `x_ptr` points to the first of the program's rows."""
    places = ()
    for eight in tl.static_range((TOTAL + 3) // 4):
        place = eight * 8 + eighth
        known, _, local, inside = _chosen(begin + place // 2, ids_ptr, PIECES, CHOICES)
        inside &= place < 2 * TOTAL
        share = 1.0
        if CHOICES > 1:
            share = tl.where(inside, tl.load(weights_ptr + known), 0.0)
        first = (local * 2 + place % 2) * 64 + quarter * (16 if BITS == 4 else 8)
        places = places + ((x_ptr + known.to(tl.int64) * stride_xm, first, inside, share),)
    return places


@triton.jit
def _inputs(places, COUNT: tl.constexpr, K, BITS: tl.constexpr, EVEN: tl.constexpr):
    """Returns the inputs at `_places`."""
    inputs = ()
    for eight in tl.static_range(COUNT):
        rows, first, inside, _ = places[eight]
        inputs = inputs + (_load_32(rows, first, inside.to(tl.int32), K, BITS, EVEN),)
    return inputs


@triton.jit
def _load_or_clear(pointers, wanted):
    """Returns the words of `load_words`, with 0 for words that are not `wanted`."""
    return tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $5, 0;\n"
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;\n"
        "@p ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];\n}",
        "=&r,=&r,=&r,=&r,l,r", [pointers, wanted],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_piece(
    w_ptr, s_ptr, z_ptr, low, high, local, inside, quarter, W, stride_wn, stride_sn,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PAIRED: tl.constexpr,
    EVEN: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Returns words of a piece of two weight rows, and scales and zeros of its two parts.

    Args:
        low: the first row's index among the rows of all experts.
        high: the second row's index among the rows of all experts.
        PAIRED: load two scales, or two zeros, at once.
        CLEAR: words past the end are 0. Otherwise they are undefined.
    """
    words = ()
    scales = ()
    zeros = ()
    for part in tl.static_range(2):
        own = ()
        for half in tl.static_range(BITS // 4):
            at = (local * 2 + part) * (4 * BITS) + half * 16 + quarter * 4
            wanted = inside
            if not EVEN:
                wanted = inside & (at < W)
                at = tl.minimum(at, W - 4)
            wanted = wanted.to(tl.int32)
            if CLEAR:
                first = _load_or_clear(w_ptr + low * stride_wn + at, wanted)
                second = _load_or_clear(w_ptr + high * stride_wn + at, wanted)
            else:
                first = load_words(w_ptr + low * stride_wn + at, wanted)
                second = load_words(w_ptr + high * stride_wn + at, wanted)
            own = own + ((first, second),)
        words = words + (own,)
        if not PAIRED and (GROUP > 0 or part == 0):
            group = tl.zeros(low.shape, tl.int32)
            if GROUP > 0:
                group = tl.minimum((local * 2 + part) * (4 * BITS) + quarter * 4, W - 4) // GROUP
            at0 = low * stride_sn + group
            at1 = high * stride_sn + group
            scales = scales + ((tl.load(s_ptr + at0), tl.load(s_ptr + at1)),)
            if HAS_ZEROS:
                zeros = zeros + ((tl.load(z_ptr + at0), tl.load(z_ptr + at1)),)
    if PAIRED:
        at0 = low * stride_sn + local
        at1 = high * stride_sn + local
        scales = (tl.load(s_ptr + at0), tl.load(s_ptr + at1))
        if HAS_ZEROS:
            zeros = (tl.load(z_ptr + at0), tl.load(z_ptr + at1))
    return words, scales, zeros


@triton.jit
def _scale_of(
    scales, PART: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    PAIRED: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    """Returns the scale of a part of one row in fp32."""
    if PAIRED:
        pair = scales[ROW]
        if FP16:
            half = (pair >> (16 * PART)).to(tl.int16)
            scale = half.to(tl.float16, bitcast=True).to(tl.float32)
        elif PART == 0:
            scale = low_halves(pair)
        else:
            scale = high_halves(pair)
    else:
        scale = scales[PART if GROUP > 0 else 0][ROW]
        if KIND == "e2m1":
            bits = scale.to(tl.int32)
            scale = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
        else:
            scale = scale.to(tl.float32)
    return scale


@triton.jit
def _zero_of(zeros, PART: tl.constexpr, ROW: tl.constexpr, KIND: tl.constexpr,
             HAS_ZEROS: tl.constexpr, PAIRED: tl.constexpr):  # fmt: skip
    """Returns the number to add to one row's bytes of a part."""
    if not HAS_ZEROS:
        zero = 192 if KIND == "e2m1" else 8
    elif PAIRED:
        zero = (zeros[ROW].to(tl.int32) >> (8 * PART)) & 0xFF
    else:
        zero = zeros[PART][ROW].to(tl.int32)
    return zero


@triton.jit
def _add_piece(
    sums, piece, digits, step, about, FIRST: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PAIRED: tl.constexpr, FP16: tl.constexpr,
):  # fmt: skip
    """Returns sums of two weight rows plus products of a piece.

    The piece has two parts: number FIRST of the warp, and the next one. `digits` points to the
    inputs of the warp's part 0. Parts are `step` bytes apart."""
    words, scales, zeros = piece
    y0, y1 = sums
    for part in tl.static_range(2):
        own = words[part]
        at = digits + (FIRST + part) * step
        total, one = kept_two(about + (FIRST + part) * _ABOUT)
        if KIND == "fp8":
            none = tl.zeros(at.shape, tl.float32)
            new = (none, none, none, none)
            for half in tl.static_range(2):
                low, high = own[half]
                b0, b1, b2, b3 = kept_four(at + half * 32)
                c0, c1, c2, c3 = kept_four(at + half * 32 + 16)
                new = _float_product(ASM, low[0], high[0], b0, b1, new)
                new = _float_product(ASM, low[1], high[1], b2, b3, new)
                new = _float_product(ASM, low[2], high[2], c0, c1, new)
                new = _float_product(ASM, low[3], high[3], c2, c3, new)
            z0 = new[0]
            z1 = new[2]
        else:
            none = tl.zeros(at.shape, tl.int32)
            new = (none, none, none, none)
            b0, b1, b2, b3 = kept_four(at)
            c0, c1, c2, c3 = kept_four(at + 16)
            low, high = own[0]
            if KIND == "int8":
                new = _product(ASM, low[0], low[1], high[0], high[1], b0, b1, new)
                new = _product(ASM, low[2], low[3], high[2], high[3], b2, b3, new)
                low, high = own[1]
                new = _product(ASM, low[0], low[1], high[0], high[1], c0, c1, new)
                new = _product(ASM, low[2], low[3], high[2], high[3], c2, c3, new)
            else:
                new = _product(ASM, low[0], low[0], high[0], high[0], b0, b1, new)
                new = _product(ASM, low[1], low[1], high[1], high[1], b2, b3, new)
                new = _product(ASM, low[2], low[2], high[2], high[2], c0, c1, new)
                new = _product(ASM, low[3], low[3], high[3], high[3], c2, c3, new)
            i0 = new[0] + 256 * new[1]
            i1 = new[2] + 256 * new[3]
            if KIND != "int8":
                i0 -= total * _zero_of(zeros, part, 0, KIND, HAS_ZEROS, PAIRED)
                i1 -= total * _zero_of(zeros, part, 1, KIND, HAS_ZEROS, PAIRED)
            z0 = i0.to(tl.float32)
            z1 = i1.to(tl.float32)
        unit = one.to(tl.float32, bitcast=True)
        y0 += z0 * (_scale_of(scales, part, 0, KIND, GROUP, PAIRED, FP16) * unit)
        y1 += z1 * (_scale_of(scales, part, 1, KIND, GROUP, PAIRED, FP16) * unit)
    return y0, y1


@triton.jit
def _four_lanes(x):
    """Returns sums of fp32 over four neighbouring threads."""
    x += of_other_lane(x.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    return x + of_other_lane(x.to(tl.int32, bitcast=True), 2).to(tl.float32, bitcast=True)


@triton.jit
def integer_experts_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, res_ptr, y_ptr, N, K, W,
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    SHARED: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, WARPS: tl.constexpr,
    PIECES: tl.constexpr, TOTAL: tl.constexpr, AHEAD: tl.constexpr, KIND: tl.constexpr,
    ASM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PAIRED: tl.constexpr, FP16: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RES: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    CUBIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the first or the second product of experts.

    With GATED it computes the gated units y [T * k, N] of x [T, K] for each assignment. Grid: tiles
    of 8 units, assignments. Otherwise x [T * k, K] are units, and it computes y [T, N]: the
    weighted sum of the outputs of a token's experts, plus the residual. Grid: tiles of 16 outputs,
    tokens.

    Args:
        x_ptr: int32 pairs of inputs. `stride_xm` counts pairs.
        W: words of a weight row.
        PIECES: pieces of an expert's row.
        TOTAL: pieces of a warp.
        AHEAD: pieces that a warp has in flight.
        GROUP: words that share a scale; 0 if a row has one scale.
        PAIRED: scales and zeros are loaded as pairs, and `stride_sn` counts pairs.
        EVEN: every piece is whole.
    """
    CHOICES: tl.constexpr = 1 if GATED else TOP_K
    if PDL and GATED:
        wait_for_predecessor(False)
    pid, block = tl.program_id(0), tl.program_id(1)
    ids_ptr += block * CHOICES
    weights_ptr += block * CHOICES
    x_ptr += (block // TOP_K if GATED else block * TOP_K).to(tl.int64) * stride_xm
    thread = tl.arange(0, 32 * WARPS)
    turn = thread // 32
    eighth = thread % 32 // 4
    quarter = thread % 4
    begin = turn * TOTAL
    missing = False
    if GATED:
        missing = tl.load(ids_ptr) < 0
    if missing:
        return
    if GATED:
        low_row = tl.minimum(pid * 8 + eighth, N - 1)
        high_row = low_row + N
    else:
        low_row = tl.minimum(pid * 16 + eighth, N - 1)
        high_row = tl.minimum(pid * 16 + 8 + eighth, N - 1)
    ROWS = 2 * N if GATED else N
    ALL: tl.constexpr = EVEN and WARPS * TOTAL == CHOICES * PIECES
    pieces = ()
    for index in tl.static_range(AHEAD):
        if index == 0 or PIECES % TOTAL != 0:
            known, expert, local, inside = _chosen(begin + index, ids_ptr, PIECES, CHOICES)
            base = expert.to(tl.int64) * ROWS
            low = base + low_row
            high = base + high_row
        else:
            local = tl.minimum(begin + index - known * PIECES, PIECES - 1)
        pieces = pieces + (
            _load_piece(
                w_ptr, s_ptr, z_ptr, low, high, local,
                tl.full(thread.shape, 1, tl.int1) if ALL and GATED else inside, quarter, W,
                stride_wn, stride_sn, BITS, GROUP, HAS_ZEROS, PAIRED, EVEN,
                KIND == "fp8" and not (ALL and GATED),
            ),
        )  # fmt: skip
    cols = pid * (8 if GATED else 16) + eighth
    b0 = tl.zeros(thread.shape, tl.float32)
    b1 = tl.zeros(thread.shape, tl.float32)
    if HAS_BIAS:
        for choice in tl.static_range(CHOICES):
            own = tl.load(ids_ptr + choice)
            part = 1.0
            if not GATED:
                part = tl.where(own >= 0, tl.load(weights_ptr + choice), 0.0)
            own_bias = bias_ptr + tl.maximum(own, 0).to(tl.int64) * ROWS
            b0 += part * tl.load(own_bias + low_row).to(tl.float32)
            b1 += part * tl.load(own_bias + high_row).to(tl.float32)
    EIGHTS: tl.constexpr = (TOTAL + 3) // 4
    places = _places(
        begin, x_ptr, ids_ptr, weights_ptr, stride_xm, eighth, quarter, TOTAL, PIECES, CHOICES, BITS
    )
    m = tl.where((turn == 0) & (quarter == 0), 0, 1)
    r0 = 0.0
    r1 = 0.0
    if GATED:
        # Without the barrier, loads of weights would alternate with code that waits for inputs.
        tl.debug_barrier()
    elif PDL:
        wait_for_predecessor(False)
    inputs = _inputs(places, EIGHTS, K, BITS, EVEN)
    if not GATED:
        residual = res_ptr + block.to(tl.int64) * stride_rm
        r0 = load_residual(residual, 0, m, cols, 1, N, HAS_RES)
        r1 = load_residual(residual, 0, m, cols + 8, 1, N, HAS_RES)
    shared = of_lane(thread, SHARED)
    notes = shared + WARPS * TOTAL * (2 * _DIGITS)
    nothing = notes + WARPS * TOTAL * (2 * _ABOUT)
    sums_at = nothing + WARPS * 32
    for eight in tl.static_range(EIGHTS):
        kept = (eight * 8 + eighth < 2 * TOTAL).to(tl.int32)
        home = begin * 2 + eight * 8 + eighth
        address = shared + home * _DIGITS + quarter * 64
        about = notes + home * _ABOUT + quarter * 8
        share = places[eight][3]
        if KIND == "fp8":
            _keep_halves(inputs[eight], share, address, about, kept)
        else:
            _keep_digits(inputs[eight], share, address, about, kept, KIND == "int4")
    zero = tl.zeros(thread.shape, tl.int32)
    keep_four(
        nothing + turn * 32 + thread % 2 * 16, (thread % 32 < 2).to(tl.int32), zero, zero, zero,
        zero,
    )  # fmt: skip
    keep_order(thread)
    digits = shared + begin * (2 * _DIGITS) + quarter * 64
    step = zero + _DIGITS
    if KIND != "fp8":
        # A thread's inputs are in two of the eight columns.
        mine = eighth // 2 == quarter
        digits = tl.where(mine, digits + eighth % 2 * 32, nothing + turn * 32)
        step = tl.where(mine, _DIGITS, 0)
    about = notes + begin * (2 * _ABOUT) + quarter * 8
    none = tl.zeros(thread.shape, tl.float32)
    sums = (none, none)
    for index in tl.static_range(TOTAL):
        sums = _add_piece(
            sums, pieces[index], digits, step, about, 2 * index, KIND, ASM, GROUP, HAS_ZEROS,
            PAIRED, FP16,
        )  # fmt: skip
        if index + AHEAD < TOTAL:
            known, expert, local, inside = _chosen(begin + index + AHEAD, ids_ptr, PIECES, CHOICES)
            base = expert.to(tl.int64) * ROWS
            pieces = pieces + (
                _load_piece(
                    w_ptr, s_ptr, z_ptr, base + low_row, base + high_row, local, inside, quarter,
                    W, stride_wn, stride_sn, BITS, GROUP, HAS_ZEROS, PAIRED, EVEN, KIND == "fp8",
                ),
            )  # fmt: skip
            keep_order(thread)
    y0, y1 = sums
    if WARPS > 1:
        keep_float(sums_at + thread * 4, y0)
        keep_float(sums_at + WARPS * 128 + thread * 4, y1)
        tl.debug_barrier()
        y0 = sum_of_warps(sums_at, thread, WARPS)
        y1 = sum_of_warps(sums_at + WARPS * 128, thread, WARPS)
    y0 = _four_lanes(y0)
    y1 = _four_lanes(y1)
    if KIND == "fp8":
        y0 *= 0.25
        y1 *= 0.25
    elif KIND == "e2m1":
        y0 *= 0.5
        y1 *= 0.5
    y0 += b0
    y1 += b1
    if GATED:
        y = swiglu(y0, y1, ALPHA, LIMIT, SHIFT, CUBIC)
        store_outputs(y, y_ptr + block.to(tl.int64) * N, 0, m, cols, 1, N)
    else:
        out = y_ptr + block.to(tl.int64) * stride_ym
        store_outputs(y0 + r0, out, 0, m, cols, 1, N)
        store_outputs(y1 + r1, out, 0, m, cols + 8, 1, N)
