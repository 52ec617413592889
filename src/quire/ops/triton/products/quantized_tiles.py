"""Widens tiles of weights of few bits in registers, and whole weights for products of many rows.

Weights of 4 bits are loaded as int32 words of eight neighbouring inputs. A value's bits in the
mantissa of 2^23 form an exact float. So a value takes a mask, a subtraction and a product with the
scale. It needs no conversion instruction, which a multiprocessor runs at half the rate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import launch
from quire.ops.triton.products.common import load_k
from quire.ops.weight import Weight

LIFT = tl.constexpr(2.0**63)
"""Square root of the factor by which unpacked 4-bit floats are too small in fp32."""


@triton.jit
def load_tile(w_ptrs, k0, K, BK: tl.constexpr, BITS: tl.constexpr, EVEN_K: tl.constexpr):
    """Returns the stored values of inputs [k0, k0 + BK), 0 from K on.

    The result is [R, BK], or [R, BK / 8] words of 4-bit values. w_ptrs [R, 1] point to the starts
    of the rows."""
    if BITS == 4:
        words = k0 // 8 + tl.arange(0, BK // 8)[None, :]
        w = load_k(w_ptrs + words, words, K // 8, EVEN_K)
    else:
        ks = k0 + tl.arange(0, BK)[None, :]
        w = load_k(w_ptrs + ks, ks, K, EVEN_K)
    return w


@triton.jit
def load_groups(ptrs, k0, K, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr):
    """Returns scales or zeros of the groups of inputs [k0, k0 + BK), fp32 [R, groups].

    Args:
        ptrs: [R, 1]. They point to bytes if scales are stored as exponents.
        GROUP: inputs of a group; 0 stands for all inputs.
    """
    if GROUP == 0:
        groups = tl.arange(0, 1)[None, :]
        value = tl.load(ptrs + groups)
    else:
        groups = k0 // GROUP + tl.arange(0, BK // GROUP if BK > GROUP else 1)[None, :]
        value = load_k(ptrs + groups, groups * GROUP, K, EVEN_K)
    if ptrs.dtype.element_ty == tl.uint8:
        # The byte is the exponent of a float, except that 0 stands for 2^-127, which fp32
        # has only as a subnormal number.
        exponent = value.to(tl.int32)
        wide = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        wide = value.to(tl.float32)
    return wide


@triton.jit
def _spread(x, R: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """Repeats [R, GROUPS] to [R, GROUPS * EACH]."""
    if GROUPS > 1:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], [R, GROUPS, EACH]), [R, GROUPS * EACH])
    return x


@triton.jit
def _nibble(words, zeros, scales, PLACE: tl.constexpr):
    """Returns (value - zero) * scale of the 4 bits at PLACE of each word.

    The bits are not shifted but scaled by a power of 16, which is exact."""
    SHIFT: tl.constexpr = 16.0**PLACE
    bits = (words & (15 << (4 * PLACE))) | 0x4B000000
    return (bits.to(tl.float32, bitcast=True) - (8388608.0 + zeros * SHIFT)) * (scales / SHIFT)


@triton.jit
def _float4(words, scales, PLACE: tl.constexpr):
    """Returns value * scale of the 4-bit float at PLACE of each word.

    Exponent and mantissa are moved to the low ends of those of fp32. This makes every value 2^126
    times smaller, including subnormal numbers."""
    small = ((words << (22 - 4 * PLACE)) & 0x1C00000) | ((words << (28 - 4 * PLACE)) & -0x80000000)
    return small.to(tl.float32, bitcast=True) * scales


@triton.jit
def _number(words, zeros, scales, PLACE: tl.constexpr, E2M1: tl.constexpr):
    if E2M1:
        value = _float4(words, scales, PLACE)
    else:
        value = _nibble(words, zeros, scales, PLACE)
    return value


def _unpack_pairs() -> str:
    """Returns instructions that convert words $8 and $9, with the pair of their scales $10.

    Their results are pairs of the values at each place, times the scales. A value in the mantissa
    of 2^7 is exact in bf16."""
    lines = []
    for byte in range(4):
        lines.append(f"prmt.b32 t, $8, $9, 0x{byte + 4}{byte + 4}{byte}{byte};")
        for half in range(2):
            out = f"${2 * byte + half}"
            if half:
                lines.append("shr.u32 t, t, 4;")
            lines.append(f"lop3.b32 {out}, t, 0x000F000F, 0x43004300, 0xEA;")
            lines.append(f"fma.rn.bf16x2 {out}, {out}, one, zero;")
            lines.append(f"mul.rn.bf16x2 {out}, {out}, $10;")
    text = "\n".join(lines)
    return (
        "{\n.reg .b32 t, one, zero;\nmov.b32 one, 0x3F803F80;\nmov.b32 zero, 0xC308C308;\n"
        f"{text}\n}}"
    )


_UNPACK: tl.constexpr = tl.constexpr(_unpack_pairs())


@triton.jit
def widen_pairs(w, scales, R: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Returns (value - 8) * scale, rounded to bf16 [R, BK], from words of 4-bit values.

    Scales are bf16 and are widened first."""
    GROUPS: tl.constexpr = BK // GROUP if BK > GROUP else 1
    s = tl.broadcast_to(_spread(scales.to(tl.bfloat16), R, GROUPS, BK // 8 // GROUPS), [R, BK // 8])
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [w, s],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True, pack=2,
    )  # fmt: skip
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), [R, BK])


@triton.jit
def widen(
    w, scales, zeros, R: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr = False,
):  # fmt: skip
    """Returns (value - zero) * scale of a tile, fp32 [R, BK].

    Args:
        scales: scales of the tile's groups. Not read if GROUP is 0.
        zeros: not read without HAS_ZEROS. The zero of 4-bit integers is then 8.
        E2M1: 4 bits are floats. The results are divided by LIFT, because correcting each value
            would cost one more product.
    """
    GROUPS: tl.constexpr = BK // GROUP if GROUP > 0 and BK > GROUP else 1
    if BITS == 4:
        z = zeros if HAS_ZEROS else 8.0
        s = scales if GROUP > 0 else 1.0
        if HAS_ZEROS:
            z = _spread(zeros, R, GROUPS, BK // 8 // GROUPS)
        if GROUP > 0:
            s = _spread(scales * LIFT if E2M1 else scales, R, GROUPS, BK // 8 // GROUPS)
        high = w >> 20
        even = tl.join(
            tl.join(_number(w, z, s, 0, E2M1), _number(w, z, s, 4, E2M1)),
            tl.join(_number(w, z, s, 2, E2M1), _number(high, z, s, 1, E2M1)),
        )
        odd = tl.join(
            tl.join(_number(w, z, s, 1, E2M1), _number(high, z, s, 0, E2M1)),
            tl.join(_number(w, z, s, 3, E2M1), _number(high, z, s, 2, E2M1)),
        )
        # The axes are word, place / 4, place / 2 % 2, place % 2.
        wide = tl.reshape(tl.join(even, odd), [R, BK])
    else:
        wide = w.to(tl.float32)
        if HAS_ZEROS:
            wide -= _spread(zeros, R, GROUPS, BK // GROUPS)
        if GROUP > 0:
            wide *= _spread(scales, R, GROUPS, BK // GROUPS)
    return wide


@triton.jit
def _dequantize_kernel(
    w_ptr, s_ptr, z_ptr, out_ptr, N, K, stride_wn, stride_sn, stride_on,
    BN: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """Dequantizes a weight to out [N, K]. Grid: tiles of outputs, tiles of inputs."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(cols, N - 1).to(tl.int64)[:, None]
    k0 = tl.program_id(1) * BK
    w = load_tile(w_ptr + rows * stride_wn, k0, K, BK, BITS, False)
    scales = 1.0
    zeros = 0.0
    if GROUP > 0:
        scales = load_groups(s_ptr + rows * stride_sn, k0, K, BK, GROUP, False)
    if HAS_ZEROS:
        zeros = load_groups(z_ptr + rows * stride_sn, k0, K, BK, GROUP, False)
    wide = widen(w, scales, zeros, BN, BK, BITS, GROUP, HAS_ZEROS, E2M1)
    if E2M1:
        wide *= LIFT
    if HAS_SCALES:
        wide *= tl.load(s_ptr + rows * stride_sn).to(tl.float32)
    ks = k0 + tl.arange(0, BK)[None, :]
    mask = (cols < N)[:, None] & (ks < K)
    tl.store(out_ptr + rows * stride_on + ks, wide.to(out_ptr.dtype.element_ty), mask=mask)


class Operands:
    """A weight as arguments of kernels, and the compile-time constants of its format.

    Attributes:
        values: [outputs, inputs], or int32 [outputs, inputs / 8].
        scales: [outputs, groups]. Without scales it is `values`, and kernels do not read it.
        zeros: [outputs, groups]. Without zeros it is `values`, and kernels do not read it.
        bits: 4 for words, else 0.
        group: inputs that share a scale; 0 stands for all inputs.
        has_scales: each output has one scale, which is applied to its sum.
        has_zeros: whether the format has zeros.
        e2m1: 4 bits are floats.
    """

    __slots__ = ("bits", "e2m1", "group", "has_scales", "has_zeros", "scales", "values", "zeros")

    def __init__(self, weight: Weight) -> None:
        format = weight.format
        self.bits = format.bits
        self.values = weight.values.view(torch.int32) if format.bits else weight.values
        self.scales = self.values if weight.scales is None else weight.scales
        if self.scales.dtype == torch.float8_e8m0fnu:
            self.scales = self.scales.view(torch.uint8)
        self.e2m1 = format.code == "e2m1"
        self.zeros = self.values if weight.zeros is None else weight.zeros
        self.group = format.group
        self.has_scales = weight.scales is not None and not format.group
        self.has_zeros = format.zeros

    @property
    def step(self) -> int:
        """The number of inputs in a stored element."""
        return 8 if self.bits else 1


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weights as [outputs, inputs] in `dtype`. Kernels must support the format."""
    n, k = weight.outputs, weight.inputs
    out = torch.empty(n, k, dtype=dtype, device=weight.values.device)
    own = Operands(weight)
    bn, bk = 16, 256
    launch(_dequantize_kernel, (triton.cdiv(n, bn), triton.cdiv(k, bk)))(
        own.values, own.scales, own.zeros, out, n, k, own.values.stride(0), own.scales.stride(0),
        out.stride(0), BN=bn, BK=bk, BITS=own.bits, GROUP=own.group, HAS_SCALES=own.has_scales,
        HAS_ZEROS=own.has_zeros, E2M1=own.e2m1, num_warps=4,
    )  # fmt: skip
    return out
