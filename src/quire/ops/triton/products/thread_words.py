"""Functions on words of single threads, in inline assembly.

They load neighbouring words, use shared memory that Triton does not manage, and exchange words
between the lanes of a warp. Addresses of shared memory are int32 offsets, as the instructions need
them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """Returns the larger magnitudes of two pairs of bf16 numbers, or NaN if one of them is NaN."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def of_lane(x, ASM: tl.constexpr):
    """Returns the result of an instruction on each thread's int32 x."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def of_other_lane(x, BIT: tl.constexpr):
    """Returns int32 x of the lane whose number differs from this lane's in one bit."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r",
        [x, tl.full(x.shape, BIT, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def of_quarter(x, INDEX: tl.constexpr):
    """Returns int32 x of thread INDEX of each four threads."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;", "=r,r,r",
        [x, tl.full(x.shape, INDEX, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def _load(count: int, space: str, when: bool) -> str:
    """Returns instructions that load neighbouring words of each thread.

    With `when`, they return 0 for threads whose last operand is 0."""
    outs = [f"${index}" for index in range(count)]
    vector = f"v{count}.b32 {{{', '.join(outs)}}}" if count > 1 else "b32 $0"
    load = f"ld.{space}.{vector}, [${count}];"
    if not when:
        return load
    zero = " ".join(f"mov.b32 {out}, 0;" for out in outs)
    return f"{{\n.reg .pred p;\nsetp.ne.s32 p, ${count + 1}, 0;\n{zero}\n@p {load}\n}}"


_LOAD4 = tl.constexpr(_load(4, "global", False))
_LOAD4_IF = tl.constexpr(_load(4, "global", True))
_LOAD2 = tl.constexpr(_load(2, "global", False))
_LOAD2_IF = tl.constexpr(_load(2, "global", True))
_LOAD1 = tl.constexpr(_load(1, "global", False))
_LOAD1_IF = tl.constexpr(_load(1, "global", True))
_SHARED4 = tl.constexpr(_load(4, "shared", False))
_SHARED2 = tl.constexpr(_load(2, "shared", False))
_SHARED1 = tl.constexpr(_load(1, "shared", False))


@triton.jit
def load_four(pointers, wanted, EVEN: tl.constexpr):
    """Returns four neighbouring words. Unless EVEN, words that are not `wanted` are 0."""
    if EVEN:
        words = tl.inline_asm_elementwise(
            _LOAD4, "=r,=r,=r,=r,l", [pointers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            _LOAD4_IF, "=&r,=&r,=&r,=&r,l,r", [pointers, wanted],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load_two(pointers, wanted, EVEN: tl.constexpr):
    """Returns two neighbouring words. Unless EVEN, words that are not `wanted` are 0."""
    if EVEN:
        words = tl.inline_asm_elementwise(
            _LOAD2, "=r,=r,l", [pointers], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        words = tl.inline_asm_elementwise(
            _LOAD2_IF, "=&r,=&r,l,r", [pointers, wanted], dtype=(tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load_one(pointers, wanted, EVEN: tl.constexpr):
    """Returns a word. Unless EVEN, a word that is not `wanted` is 0."""
    if EVEN:
        word = tl.inline_asm_elementwise(
            _LOAD1, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        word = tl.inline_asm_elementwise(
            _LOAD1_IF, "=&r,l,r", [pointers, wanted], dtype=tl.int32, is_pure=False, pack=1
        )
    return word


@triton.jit
def kept_four(address):
    """Returns four neighbouring words of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED4, "=r,=r,=r,=r,r", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def kept_two(address):
    """Returns two neighbouring words of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED2, "=r,=r,r", [address], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def kept_float(address):
    """Returns a float32 of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED1, "=r,r", [address], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def keep_float(address, x):
    """Stores a float32 in shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, x], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep_four(address, wanted, a, b, c, d):
    """Stores four neighbouring words in shared memory, for threads that are `wanted`."""
    tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p st.shared.v4.b32 [$1], {$3, $4, $5, $6};\n"
        "mov.u32 $0, 0;\n}",
        "=r,r,r,r,r,r,r", [address, wanted, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep_two(address, wanted, a, b):
    """Stores two neighbouring words in shared memory, for threads that are `wanted`."""
    tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p st.shared.v2.b32 [$1], {$3, $4};\n"
        "mov.u32 $0, 0;\n}",
        "=r,r,r,r,r", [address, wanted, a, b], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def low_halves(pairs):
    """Returns the first of each pair of bf16 numbers, as fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_halves(pairs):
    """Returns the second of each pair of bf16 numbers, as fp32."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_squares(squares, pairs):
    """Returns `squares` plus the squares of pairs of bf16 numbers."""
    low = low_halves(pairs)
    high = high_halves(pairs)
    return squares + low * low + high * high


@triton.jit
def sum_of_warps(shared, thread, WARPS: tl.constexpr):
    """Adds the values of all warps' threads through shared memory. Each warp gets the sum."""
    total = kept_float(shared + thread % 32 * 4)
    for warp in tl.static_range(1, WARPS):
        total += kept_float(shared + warp * 128 + thread % 32 * 4)
    return total


@triton.jit
def sum_of_lanes(x):
    """Returns the fp32 sum over the lanes of each warp."""
    for step in tl.static_range(5):
        bits = x.to(tl.int32, bitcast=True)
        x += of_other_lane(bits, 1 << step).to(tl.float32, bitcast=True)
    return x


# -- instructions that convert words of stored weights to pairs of 16-bit floats, for `mma.sync` -

MULTIPLY = "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{$0, $1, $2, $3}}, "
"""The start of the instruction for 16 weight rows, 8 rows of x and 16 inputs. {t} is their type."""

# Signed bytes plus 128 are put into the mantissa of 2^23. After a subtraction the float is exact in
# 16 bits.
_INT8_TO_BF16 = """
xor.b32 t, w, 0x80808080;
prmt.b32 o0, t, 0x4B000000, 0x7440; prmt.b32 o1, t, 0x4B000000, 0x7441;
prmt.b32 o2, t, 0x4B000000, 0x7442; prmt.b32 o3, t, 0x4B000000, 0x7443;
sub.f32 o0, o0, 0f4B000080; sub.f32 o1, o1, 0f4B000080;
sub.f32 o2, o2, 0f4B000080; sub.f32 o3, o3, 0f4B000080;
prmt.b32 o0, o0, o1, 0x7632; prmt.b32 o1, o2, o3, 0x7632;
"""
_INT8_TO_FP16 = """
xor.b32 t, w, 0x80808080; mov.b32 y0, 0x64646464; mov.b32 y1, 0x64806480;
prmt.b32 o0, t, y0, 0x4140; prmt.b32 o1, t, y0, 0x4342;
sub.rn.f16x2 o0, o0, y1; sub.rn.f16x2 o1, o1, y1;
"""
# Exponent and mantissa move to their places in 16 bits. A factor corrects the exponent's bias.
_FP8 = """
mov.b32 y0, {factor}; prmt.b32 o0, w, 0, 0x1404; prmt.b32 o1, w, 0, 0x3424;
shr.u32 t, o0, {shift}; and.b32 t, t, {mask}; lop3.b32 o0, o0, 0x80008000, t, 0xEA;
shr.u32 t, o1, {shift}; and.b32 t, t, {mask}; lop3.b32 o1, o1, 0x80008000, t, 0xEA;
mul.rn.{t}x2 o0, o0, y0; mul.rn.{t}x2 o1, o1, y0;
"""
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
FOUR_BITS = {
    torch.bfloat16: ("0x43004300", "0x3F803F80"),
    torch.float16: ("0x64006400", "0x3C003C00"),
}
"""By dtype, a pair of the power of two whose mantissa can hold a value, and a pair of ones."""
EIGHT_BITS = {
    (torch.int8, torch.bfloat16): (_INT8_TO_BF16, 4),
    (torch.int8, torch.float16): (_INT8_TO_FP16, 2),
    (torch.float8_e4m3fn, torch.bfloat16): (
        _FP8.format(factor="0x7B807B80", shift=4, mask="0x07F007F0", t="bf16"), 2
    ),
    (torch.float8_e4m3fn, torch.float16): (
        _FP8.format(factor="0x5C005C00", shift=1, mask="0x3F803F80", t="f16"), 2
    ),
}  # fmt: skip
"""Instructions that convert a word w to pairs o0 and o1, and the number of registers o0, o1... that
they need."""


def registers(count: int, text: str) -> str:
    """Returns instructions in a scope with registers a0, a1..., b0, b1..., y0 to y3 and t."""
    lines = "\n".join(line.strip() for line in text.strip().splitlines())
    return f"{{\n.reg .b32 a<{count}>, b<{count}>, y<4>, t;\n{lines}\n}}"


def four_bit_integers(t: str, magic: str, word: str, outs: list[str], zero: str) -> list[str]:
    """Returns instructions that unpack a word. Values 4 places apart form a pair.

    A value first becomes the power of two in `magic` + value. `zero` is then added; it is minus the
    sum of that power and the value's zero. y0 holds a pair of ones."""
    lines = []
    for pair, out in enumerate(outs):
        place = word
        if pair:
            lines.append(f"shr.u32 t, {word}, {4 * pair};")
            place = "t"
        lines.append(f"lop3.b32 {out}, {place}, 0x000F000F, {magic}, 0xEA;")
        lines.append(f"fma.rn.{t}x2 {out}, {out}, y0, {zero};")
    return lines


def _four_bit_floats(word: str, outs: list[str], factor: str) -> list[str]:
    """Returns instructions that unpack a word of 4-bit floats.

    Their bits, moved to the places of bf16, are 2^126 times too small, also for subnormal numbers.
    `factor`, a pair of powers of two, corrects that. A multiplication makes two copies of the 4
    bits: one with the sign in its place, the other with exponent and mantissa in theirs."""
    lines = []
    for pair, out in enumerate(outs):
        place = word
        if pair >= 2:
            place = "t"
        if pair == 2:
            lines.append(f"shr.u32 t, {word}, 8;")
        odd = pair % 2
        lines.append(f"and.b32 {out}, {place}, {'0x00F000F0' if odd else '0x000F000F'};")
        lines.append(f"mul.lo.u32 {out}, {out}, {'0x104' if odd else '0x1040'};")
        lines.append(f"and.b32 {out}, {out}, 0x81C081C0;")
        lines.append(f"mul.rn.bf16x2 {out}, {out}, {factor};")
    return lines


def _of_four_bits(dtype: torch.dtype) -> str:
    magic, one = FOUR_BITS[dtype]
    lines = [f"mov.b32 y0, {one};"]
    lines += four_bit_integers(TYPES[dtype], magic, "$4", ["$0", "$1", "$2", "$3"], "$5")
    return registers(1, "\n".join(lines))


def _of_eight_bits(text: str) -> str:
    for name, register in (("o0", "$0"), ("o1", "$1"), ("o2", "a2"), ("o3", "a3"), ("w,", "$2,")):
        text = text.replace(name, register)
    return registers(4, text)


UNPACK = {
    **{("integer", torch.uint8, dtype): _of_four_bits(dtype) for dtype in TYPES},
    **{
        ("integer", torch.int8, dtype): _of_eight_bits(EIGHT_BITS[torch.int8, dtype][0])
        for dtype in TYPES
    },
    ("e2m1", torch.uint8, torch.bfloat16): registers(
        1, "\n".join(_four_bit_floats("$4", ["$0", "$1", "$2", "$3"], "$5"))
    ),
}
"""Instructions that unpack a word of one row, by code and dtype of stored values and dtype of x.
With 4 bits, word $4 becomes pairs $0 to $3, and pair $5 is added or multiplied. With 8 bits, word
$2 becomes pairs $0 and $1."""
PRODUCT = {
    dtype: MULTIPLY.format(t=name) + "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    for dtype, name in TYPES.items()
}
"""The instruction of a product. Its operands are a pair of a row and of the row 8 further, then the
next pairs of both ($4 to $7), pairs of x ($8, $9), and sums ($10 to $13)."""
