"""8-bit keys and values inside kernels: their numbers as fp16, and back.

A stored byte is an e4m3 float or an integer. Attention reads bytes two at a time as int16,
and takes the even and the odd dimensions of a head apart: both then have the layout of a 16-bit
type, so that tiles of them come out of shared memory, transposed or not, as fast as bf16 does.

Newer cards make fp16 of e4m3 themselves. Elsewhere an e4m3 float, shifted into an fp16's bits, is
its value / 256. An integer is stored plus 128, and that byte is a tiny fp16 as it is: one
multiply-add makes it the value / 512. `unit` is what is then missing, and is part of the scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.kv import LARGEST_VALUE, SMALLEST_TOP, KVFormat
from quire.ops.triton.launch import INTERPRETED, DeviceTraits

E4M3 = tl.constexpr(1)
INT8 = tl.constexpr(2)
E4M3_NATIVE = tl.constexpr(3)
SMALLEST = tl.constexpr(SMALLEST_TOP)
LARGEST = tl.constexpr(LARGEST_VALUE)
LIFT = tl.constexpr(128.0)
"""A further factor of attention weights that were multiplied by scales of values. It keeps them
well within what fp16 holds."""

LOW_E4M3 = tl.constexpr("""{
    .reg .b32 a, b;
    shl.b32 a, $1, 8;
    shl.b32 b, $1, 7;
    lop3.b32 a, a, b, 0x80008000, 0xE4;
    and.b32 $0, a, 0xbf80bf80;
}""")
HIGH_E4M3 = tl.constexpr("""{
    .reg .b32 a;
    shr.u32 a, $1, 1;
    lop3.b32 a, $1, a, 0x80008000, 0xE4;
    and.b32 $0, a, 0xbf80bf80;
}""")
LOW_E4M3_NATIVE = tl.constexpr("""{
    .reg .b32 a;
    .reg .b16 lo, hi;
    prmt.b32 a, $1, 0, 0x4420;
    mov.b32 {lo, hi}, a;
    cvt.rn.f16x2.e4m3x2 $0, lo;
}""")
HIGH_E4M3_NATIVE = tl.constexpr("""{
    .reg .b32 a;
    .reg .b16 lo, hi;
    prmt.b32 a, $1, 0, 0x4431;
    mov.b32 {lo, hi}, a;
    cvt.rn.f16x2.e4m3x2 $0, lo;
}""")
LOW_INT8 = tl.constexpr("""{
    .reg .b32 a, scale, offset;
    mov.b32 scale, 0x78007800;
    mov.b32 offset, 0xb400b400;
    prmt.b32 a, $1, 0, 0x4240;
    fma.rn.f16x2 $0, a, scale, offset;
}""")
HIGH_INT8 = tl.constexpr("""{
    .reg .b32 a, scale, offset;
    mov.b32 scale, 0x78007800;
    mov.b32 offset, 0xb400b400;
    prmt.b32 a, $1, 0, 0x4341;
    fma.rn.f16x2 $0, a, scale, offset;
}""")
"""Two int16 pairs in a register to two fp16."""


def constants(kv_format: KVFormat, card: DeviceTraits) -> dict[str, int]:
    """Returns the constants of a format for kernels. KIND: one of the above, 0 where it is not in 8
    bits. OWN_SCALES: each token has its own, rather than each head. PACKED: two pairs are taken
    apart at a time, by instructions that the compiler does not find, and an interpreter does not
    know."""
    kind = 0
    if kv_format.dtype == torch.uint8:
        kind = INT8.value
    elif kv_format.dtype == torch.float8_e4m3fn:
        kind = (E4M3_NATIVE if card.capability >= (8, 9) else E4M3).value
    return {
        "KIND": kind,
        "OWN_SCALES": kv_format.scales == "token",
        "PACKED": card is not INTERPRETED,
    }


@triton.jit
def unit(KIND: tl.constexpr):
    """Returns the number that `low_bytes` and `high_bytes` divide by."""
    if KIND == E4M3:
        return 256.0
    elif KIND == INT8:
        return 512.0
    else:
        return 1.0


@triton.jit
def fp16(x):
    """x in fp16, cut to what that holds."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def low_bytes(pairs, KIND: tl.constexpr, PACKED: tl.constexpr):
    """The low bytes of int16 `pairs`, over `unit`, in fp16."""
    if KIND == E4M3_NATIVE:
        return _assembled(pairs, LOW_E4M3_NATIVE)
    elif KIND == E4M3:
        return _assembled(pairs, LOW_E4M3) if PACKED else _e4m3(pairs << 8)
    else:
        return _assembled(pairs, LOW_INT8) if PACKED else _int8(pairs)


@triton.jit
def high_bytes(pairs, KIND: tl.constexpr, PACKED: tl.constexpr):
    """The high bytes, likewise."""
    if KIND == E4M3_NATIVE:
        return _assembled(pairs, HIGH_E4M3_NATIVE)
    elif KIND == E4M3:
        return _assembled(pairs, HIGH_E4M3) if PACKED else _e4m3(pairs)
    else:
        return _assembled(pairs, HIGH_INT8) if PACKED else _int8(pairs >> 8)


@triton.jit
def _assembled(pairs, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(TEXT, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _e4m3(x):
    """Decodes the high bytes of int16 x: sign, four bits of exponent, three of mantissa."""
    return ((x & -0x8000) | ((x >> 1) & 0x3F80)).to(tl.float16, bitcast=True)


@triton.jit
def _int8(x):
    """Decodes the low bytes of int16 x."""
    return (x & 0xFF).to(tl.float16) * 0.001953125 - 0.25


@triton.jit
def widened(x, like, KIND: tl.constexpr):
    """Bytes x, int8, as numbers of the dtype of `like`, which has at least 8 bits of mantissa."""
    if KIND == INT8:
        return (x ^ -128).to(tl.float32).to(like.dtype)
    elif KIND == E4M3_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:
        return (_e4m3(x.to(tl.int16) << 8).to(tl.float32) * 256.0).to(like.dtype)


@triton.jit
def largest(KIND: tl.constexpr):
    """The largest number that a byte holds."""
    return 127.0 if KIND == INT8 else 448.0


@triton.jit
def encode(x, KIND: tl.constexpr):
    """float32 x to the nearest that a byte holds, ties to even; int8."""
    top = largest(KIND)
    x = tl.minimum(tl.maximum(x, -top), top)
    if KIND == INT8:
        # Adding 1.5 * 2^23 leaves the integer in the low bits; and 128 more.
        return (x + 12583040.0).to(tl.int32, bitcast=True).to(tl.int8)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Twenty of 23 bits of mantissa go; the exponent's bias falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9, which is what a float32 near 2^14 holds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(bits < 0x3C800000, small, normal)
    return (byte | sign).to(tl.int8)


@triton.jit
def inverse_scale(top, scale_at, live, KIND: tl.constexpr, OWN_SCALES: tl.constexpr):
    """1 / scale of heads [H] whose largest magnitudes are `top`. scale_at: where their scales are,
    or, with OWN_SCALES, go."""
    if OWN_SCALES:
        scale = tl.minimum(tl.maximum(top, SMALLEST), LARGEST) / largest(KIND)
        tl.store(scale_at, scale, mask=live)
    else:
        scale = tl.load(scale_at, mask=live, other=1.0)
    return 1.0 / scale


@triton.jit
def store(at, x, inside, inverse_scale, KIND: tl.constexpr):
    """Stores float x [H, n], as bytes where that is asked for. inverse_scale: [H]."""
    if KIND:
        tl.store(at, encode(x * inverse_scale[:, None], KIND), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)
