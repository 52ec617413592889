"""8-bit keys and values inside kernels: decodes them to fp16, and encodes them.

A stored byte is an e4m3 float or an integer. Attention reads bytes two at a time as int16. The low
bytes are the even dimensions of a head, the high bytes the odd ones. Both then have the layout of a
16-bit type, so their tiles are read from shared memory, transposed or not, as fast as bf16.

Newer cards convert e4m3 to fp16 by an instruction. On older ones the bits of an e4m3 float are
shifted into an fp16, which gives value / 256. Integers are stored plus 128. The bits of such a byte
are a tiny fp16, and one multiply-add makes value / 512 of it. `unit` returns the missing factor,
which the kernels include in the scale.
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
"""Attention weights are multiplied by the scales of values and by this factor, which keeps them
within the range of fp16."""

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
"""Instructions that decode the low or the high bytes of two int16 pairs to two fp16."""


def constants(kv_format: KVFormat, card: DeviceTraits) -> dict[str, int]:
    """Returns the compile-time constants of a format for kernels.

    KIND is one of the kinds above, or 0 for KV that is not in 8 bits. With OWN_SCALES each token
    has a scale; otherwise each head has one. With PACKED two pairs are decoded at a time, by inline
    assembly: the compiler does not find these instructions. The interpreter cannot run them."""
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
    """Returns the number by which `low_bytes` and `high_bytes` divide values."""
    if KIND == E4M3:
        return 256.0
    elif KIND == INT8:
        return 512.0
    else:
        return 1.0


@triton.jit
def fp16(x):
    """Returns x in fp16, clamped to its range."""
    return tl.minimum(tl.maximum(x.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def low_bytes(pairs, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Returns the values of the low bytes of int16 `pairs`, divided by `unit`, in fp16."""
    if KIND == E4M3_NATIVE:
        return _assembled(pairs, LOW_E4M3_NATIVE)
    elif KIND == E4M3:
        return _assembled(pairs, LOW_E4M3) if PACKED else _e4m3(pairs << 8)
    else:
        return _assembled(pairs, LOW_INT8) if PACKED else _int8(pairs)


@triton.jit
def high_bytes(pairs, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Returns the values of the high bytes of int16 `pairs`, divided by `unit`, in fp16."""
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
    """Decodes bytes x, int8, to the dtype of `like`, which must have at least 8 mantissa bits."""
    if KIND == INT8:
        return (x ^ -128).to(tl.float32).to(like.dtype)
    elif KIND == E4M3_NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:
        return (_e4m3(x.to(tl.int16) << 8).to(tl.float32) * 256.0).to(like.dtype)


@triton.jit
def largest(KIND: tl.constexpr):
    """Returns the largest number that a byte holds."""
    return 127.0 if KIND == INT8 else 448.0


@triton.jit
def encode(x, KIND: tl.constexpr):
    """Encodes float32 x as bytes, int8. Rounds to the nearest number, ties to even."""
    top = largest(KIND)
    x = tl.minimum(tl.maximum(x, -top), top)
    if KIND == INT8:
        # Adding 1.5 * 2^23 + 128 leaves the integer plus 128 in the low bits.
        return (x + 12583040.0).to(tl.int32, bitcast=True).to(tl.int8)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # 20 of the 23 mantissa bits are rounded off, and the exponent's bias falls from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is also the step of float32 numbers near 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(bits < 0x3C800000, small, normal)
    return (byte | sign).to(tl.int8)


@triton.jit
def inverse_scale(top, scale_at, live, KIND: tl.constexpr, OWN_SCALES: tl.constexpr):
    """Returns 1 / scale of heads [H] whose largest magnitudes are `top`.

    `scale_at` points to the stored scales. With OWN_SCALES the scales are computed and written
    there."""
    if OWN_SCALES:
        scale = tl.minimum(tl.maximum(top, SMALLEST), LARGEST) / largest(KIND)
        tl.store(scale_at, scale, mask=live)
    else:
        scale = tl.load(scale_at, mask=live, other=1.0)
    return 1.0 / scale


@triton.jit
def store(at, x, inside, inverse_scale, KIND: tl.constexpr):
    """Stores float x [H, n], as bytes if KIND is not 0.

    Args:
        inverse_scale: [H].
    """
    if KIND:
        tl.store(at, encode(x * inverse_scale[:, None], KIND), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)
