"""Launches `hopper_gemm_kernel.py`.

It multiplies weights of 4 and 8 bits on Hopper cards, for more than a few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.triton.launch import options, traits
from quire.ops.triton.products.hopper_gemm_kernel import multiply_steps, step_inputs
from quire.ops.triton.products.plan import Launch, LinearArgs
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.round_inputs import LIFT, order_inputs
from quire.ops.triton.products.small import default_workspace
from quire.ops.triton.products.thread_words import TYPES

_ROWS = 64
"""Weight rows of a warpgroup."""
_PART = 64
"""Inputs of a copy of x, 128 bytes."""
_WORDS = 32
"""Words of a weight row in a step."""
_CHUNK = 128
"""Inputs that share a scale, or a divisor of that number."""
_MOST_ROWS = 512
"""With more rows of x, dequantizing the whole weight for cuBLAS is as fast."""
_TOGETHER = 8
"""The most programs that share a tile, if the same number shares each tile."""
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_SHARED = 226 << 10
"""Bytes of shared memory for the ring."""


class HopperTile(NamedTuple):
    """The tile of a program.

    Attributes:
        groups: warpgroups that multiply, 2 or 3.
        bn: rows of x.
    """

    groups: int
    bn: int

    @property
    def rows(self) -> int:
        """Weight rows."""
        return self.groups * _ROWS

    def stages(self, bits: int) -> int:
        """Returns the number of steps in flight."""
        return min(8, _SHARED // (self.bn * step_inputs(bits) * 2 + self.rows * _WORDS * 4))


def _four_bits(dtype: torch.dtype) -> str:
    """Returns instructions that unpack words $8 and $9 of a row to pairs of values 4 places apart.

    4 bits are read as the low bits of a bf16, which is subnormal or has the lowest exponent. Its
    value is the integer times 2^-133. Subtracting the zero is exact, and multiplying by the scale
    rounds once. $10 is the factor for values in the lowest bits, and $11 for values 4 bits higher.
    $12 and $13 are the zeros. fp16 cannot hold such factors, so its instructions put the bits into
    the mantissa of 1024, which the zeros include."""
    lines = ["{", ".reg .b32 t;"]
    for word in range(2):
        for place in range(4):
            out, odd = f"${4 * word + place}", place % 2
            if dtype == torch.bfloat16:
                mask = "0x00F000F0" if odd else "0x000F000F"
                if place == 2:
                    lines.append(f"shr.u32 t, ${8 + word}, 8;")
                source = f"${8 + word}" if place < 2 else "t"
                lines.append(f"and.b32 {out}, {source}, {mask};")
            else:
                lines.append(f"shr.u32 t, ${8 + word}, {4 * place};")
                lines.append(f"lop3.b32 {out}, t, 0x000F000F, 0x64006400, 0xEA;")
            lines.append(f"sub.rn.{TYPES[dtype]}x2 {out}, {out}, ${12 + odd};")
            lines.append(f"mul.rn.{TYPES[dtype]}x2 {out}, {out}, ${10 + odd};")
    return "\n".join([*lines, "}"])


def _integers(dtype: torch.dtype) -> str:
    """Returns instructions that unpack words $4 and $5 to pairs of bytes 2 places apart.

    Signed bytes plus 128 are converted like 4-bit integers. $6 is the factor, and $7 is the zero,
    128."""
    above = "0" if dtype == torch.bfloat16 else "0x64646464"
    lines = ["{", ".reg .b32 t;"]
    for word in range(2):
        lines.append(f"xor.b32 t, ${4 + word}, 0x80808080;")
        for place, bytes_ in enumerate(("0x4240", "0x4341")):
            out = f"${2 * word + place}"
            lines.append(f"prmt.b32 {out}, t, {above}, {bytes_};")
            lines.append(f"sub.rn.{TYPES[dtype]}x2 {out}, {out}, $7;")
            lines.append(f"mul.rn.{TYPES[dtype]}x2 {out}, {out}, $6;")
    return "\n".join([*lines, "}"])


def _floats(dtype: torch.dtype) -> str:
    """Returns instructions that unpack 8-bit floats.

    Exponent and mantissa are shifted into place. The factor corrects the difference of the
    exponents' biases."""
    shift, mask = (4, "0x07F007F0") if dtype == torch.bfloat16 else (1, "0x3F803F80")
    lines = ["{", ".reg .b32 t, high;"]
    for word in range(2):
        for place in range(2):
            out = f"${2 * word + place}"
            source = f"${4 + word}"
            if not place:
                lines.append(f"shl.b32 high, {source}, 8;")
                source = "high"
            lines.append(f"shr.u32 t, {source}, {shift};")
            lines.append(f"and.b32 t, t, {mask};")
            lines.append(f"lop3.b32 {out}, {source}, 0x80008000, t, 0xEA;")
            lines.append(f"mul.rn.{TYPES[dtype]}x2 {out}, {out}, $6;")
    return "\n".join([*lines, "}"])


INSTRUCTIONS = {
    (values, dtype): build(dtype)
    for values, build in (
        (torch.uint8, _four_bits), (torch.int8, _integers), (torch.float8_e4m3fn, _floats)
    )
    for dtype in TYPES
}  # fmt: skip
"""Instructions that unpack a word, by the dtype of stored values and the dtype of x."""


def factor_of(values: torch.dtype, dtype: torch.dtype) -> float:
    """Returns the factor by which scales are multiplied to correct the unpacking and the inputs'
    lift."""
    if dtype == torch.bfloat16:
        return 2.0 ** (120 if values.is_floating_point else 133) / LIFT
    return 2.0**8 if values.is_floating_point else 1.0


def takes(args: LinearArgs) -> bool:
    """Whether the kernel supports a layer.

    It supports 4-bit integers, 8-bit integers and 8-bit floats. K must be a multiple of the chunk
    and of the group, TMA must be able to copy the rows, and x must not have too many rows."""
    weight, dtype = args.weight, args.x.dtype
    form, values, scales = weight.format, weight.values, weight.scales
    if form.code != "integer" or form.ordered or weight.first or scales is None:
        return False
    if (form.values, dtype) not in INSTRUCTIONS or scales.dtype not in _SCALES:
        return False
    if form.bits != (4 if form.values == torch.uint8 else 0) or (form.zeros and not form.bits):
        return False
    if args.gated and weight.outputs % 16:
        return False
    if weight.inputs % _CHUNK or form.group % _CHUNK or (form.zeros and not form.group):
        return False
    # Scales are converted to the dtype of x, and fp16 cannot hold all scales of other dtypes.
    fits = not form.group or scales.dtype == dtype or dtype == torch.bfloat16
    aligned = values.data_ptr() % 16 == 0 and values.stride(0) % 16 == 0
    return fits and aligned and len(args.x) <= _MOST_ROWS


def _tiles(tile: HopperTile, args: LinearArgs) -> int:
    return triton.cdiv(args.weight.outputs, tile.rows) * triton.cdiv(len(args.x), tile.bn)


def tile_for(args: LinearArgs) -> HopperTile:
    """Returns the tile for a layer, from a sweep over an 8B model's layers.

    It has three warpgroups if each program then has whole tiles, because adding the sums of several
    programs takes 3 to 8 µs."""
    bn = min(max(16, triton.next_power_of_2(len(args.x))), 128)
    wide = HopperTile(3, bn)
    whole = _tiles(wide, args) % programs_for(wide, args) == 0
    return wide if whole else HopperTile(2, bn)


def programs_for(tile: HopperTile, args: LinearArgs) -> int:
    """Returns the number of programs.

    Each tile gets the same number of programs, or each program gets whole tiles. If that leaves
    many multiprocessors idle, there is one program for each multiprocessor."""
    most = traits(args.x.device).num_sms
    tiles = _tiles(tile, args)
    if 2 * tiles <= most:
        return min(most // tiles, _TOGETHER) * tiles
    rounds = triton.cdiv(tiles, most)
    each = tiles // rounds
    return each if tiles % rounds == 0 and 10 * each >= 7 * most else most


def product(args: LinearArgs) -> Tensor:
    """Returns y [M, N], see `LinearArgs`, for a layer that passes `takes`."""
    x, card = args.x, traits(args.x.device)
    out = torch.empty(len(x), args.n, dtype=x.dtype, device=x.device)
    if out.numel():
        tile, counters = tile_for(args), default_workspace(x.device).counters
        args = replace(args, x=order_inputs(x, args.norm, _bits(args)), norm=None)
        hopper_gemm(args, out, tile, counters, programs_for(tile, args), pdl=card.pdl).run()
    return out


def _bits(args: LinearArgs) -> int:
    return args.weight.format.bits or 8


def hopper_gemm(
    args: LinearArgs, out: Tensor, tile: HopperTile, counters: Tensor, programs: int, *, pdl: bool
) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N].

    x is in the order of `order_inputs`, and its norm was applied before.

    Args:
        counters: int32, one for each warpgroup of all programs, zero between kernels.
        programs: at most one for each multiprocessor, because the programs of a tile wait for each
            other.
    """
    x, own, res, n = args.x, Operands(args.weight), args.residual, args.n
    bits, stored = _bits(args), args.weight.format.values
    words = args.weight.values.view(torch.int32)
    m_tiles = triton.cdiv(len(x), tile.bn)
    steps = x.shape[1] // step_inputs(bits)
    tiles = _tiles(tile, args)
    programs = min(programs, tiles * steps)
    together = 1 if programs % tiles else programs // tiles
    sums = torch.empty(2 * programs * tile.rows * tile.bn, dtype=torch.float32, device=x.device)
    described = TensorDescriptor(
        x, list(x.shape), list(x.stride()), [tile.bn, _PART], _layout(128, 16, 2)
    )
    operands = (
        described, _describe(words, gated=args.gated), own.scales, own.zeros,
        x if args.bias is None else args.bias, x if res is None else res, out, sums, counters,
        len(x), n, m_tiles, steps, tiles * steps, own.scales.shape[1], own.scales.stride(0),
        0 if res is None else res.stride(0), out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, CONSUMERS=tile.groups, BN=tile.bn, STAGES=tile.stages(bits), BITS=bits,
        GROUP=own.group // _CHUNK, ASM=INSTRUCTIONS[stored, x.dtype],
        FACTOR=factor_of(stored, x.dtype), ZEROS=own.has_zeros, SCALED=own.has_scales,
        GLU=args.gated, ACT=args.act_name, BIAS=args.bias is not None, RES=res is not None,
        APART=args.apart, TOGETHER=together, PDL=pdl, num_warps=4,
    )  # fmt: skip
    return Launch(multiply_steps, (programs,), operands, named)


def _layout(swizzle: int, bits: int, rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _describe(words: Tensor, *, gated: bool) -> TensorDescriptor:
    """Describes boxes of a warpgroup's rows to TMA.

    In a gated layer a box has 8 gate rows, the 8 matching up rows, and so on."""
    (outputs, count), stride = words.shape, words.stride(0)
    if not gated:
        return TensorDescriptor(
            words, [outputs, count], [stride, 1], [_ROWS, _WORDS], _layout(128, 32, 2)
        )
    return TensorDescriptor(
        words, [outputs // 16, 2, 8, count], [8 * stride, outputs // 2 * stride, stride, 1],
        [_ROWS // 16, 2, 8, _WORDS], _layout(128, 32, 4),
    )  # fmt: skip
