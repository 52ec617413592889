"""Products of more than a few rows with weights of 4 bits on Hopper cards: the launch of
`hopper_gemm_kernel.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.triton.gemm import default_workspace
from quire.ops.triton.gemm_plan import Launch, LinearArgs
from quire.ops.triton.hopper_gemm_kernel import multiply_chunks
from quire.ops.triton.launch import options, traits
from quire.ops.triton.mma_unpack import FOUR_BITS, TYPES
from quire.ops.triton.order_inputs import order_inputs
from quire.ops.triton.quantized_tiles import Operands

_ROWS = 64
"""Weight rows of a warpgroup."""
INPUTS = 128
"""Inputs of a chunk."""
_WORDS = 16
_MOST_ROWS = 512
"""Rows of x from which on cuBLAS and the whole weight dequantized are as fast."""
_MANY_OUTPUTS = 16384
"""Weight rows from which on tiles of four warpgroups are enough to share the work."""
_SHARED = 220 << 10
"""Bytes of shared memory for the ring."""


class HopperTile(NamedTuple):
    """groups: warpgroups that multiply, 2 or 4. bn: rows of x; 4 groups have registers for 64."""

    groups: int
    bn: int

    @property
    def rows(self) -> int:
        """Weight rows."""
        return self.groups * _ROWS

    @property
    def stages(self) -> int:
        """Chunks in flight."""
        return min(8, _SHARED // (self.bn * INPUTS * 2 + self.rows * _WORDS * 4))


def _instructions(dtype: torch.dtype) -> str:
    """Returns instructions for words $8 and $9 of a row: pairs of the values at each place, plus
    $11, times $10. A value in the mantissa of a power of two is exact in 16 bits."""
    t, (magic, one) = TYPES[dtype], FOUR_BITS[dtype]
    lines = ["{", ".reg .b32 t, one;", f"mov.b32 one, {one};"]
    for byte in range(4):
        lines.append(f"prmt.b32 t, $8, $9, 0x{byte + 4}{byte + 4}{byte}{byte};")
        for half in range(2):
            out = f"${2 * byte + half}"
            if half:
                lines.append("shr.u32 t, t, 4;")
            lines.append(f"lop3.b32 {out}, t, 0x000F000F, {magic}, 0xEA;")
            lines.append(f"fma.rn.{t}x2 {out}, {out}, one, $11;")
            lines.append(f"mul.rn.{t}x2 {out}, {out}, $10;")
    return "\n".join([*lines, "}"])


INSTRUCTIONS = {dtype: _instructions(dtype) for dtype in TYPES}


def takes(args: LinearArgs) -> bool:
    """Whether the kernel is for a layer: words of 4-bit integers, whole chunks of inputs and of
    groups, rows that TMA takes, and not too many of x."""
    weight, dtype = args.weight, args.x.dtype
    form, values, scales = weight.format, weight.values, weight.scales
    if form.bits != 4 or form.code != "integer" or form.ordered or weight.first or scales is None:
        return False
    if args.gated and weight.outputs % 16:
        return False
    if weight.inputs % INPUTS or form.group % INPUTS or (form.zeros and not form.group):
        return False
    # Scales apply to pairs of x's type; fp16 does not hold all that others may be.
    fits = not form.group or scales.dtype == dtype or dtype == torch.bfloat16
    aligned = values.data_ptr() % 16 == 0 and values.stride(0) % 16 == 0
    return dtype in TYPES and fits and aligned and len(args.x) <= _MOST_ROWS


def tile_for(rows: int, args: LinearArgs) -> HopperTile:
    """Returns the tile of a product of `rows` rows, by a sweep over an 8B model's layers."""
    bn = min(max(16, triton.next_power_of_2(rows)), 128)
    return HopperTile(4 if bn <= 32 and args.weight.outputs > _MANY_OUTPUTS else 2, bn)


def programs_for(tile: HopperTile, args: LinearArgs) -> int:
    """Returns the number of programs. Where each tile is shared by two or more, all tiles are cut
    alike: a program then has a share of one tile only."""
    most = traits(args.x.device).num_sms
    tiles = triton.cdiv(args.weight.outputs, tile.rows) * triton.cdiv(len(args.x), tile.bn)
    return most // tiles * tiles if 2 * tiles <= most else most


def product(args: LinearArgs) -> Tensor:
    """Returns y [M, N], see `LinearArgs`, of a weight that `takes` says yes to."""
    x, card = args.x, traits(args.x.device)
    out = torch.empty(len(x), args.n, dtype=x.dtype, device=x.device)
    if out.numel():
        tile, counters = tile_for(len(x), args), default_workspace(x.device).counters
        args = replace(args, x=order_inputs(x, args.norm), norm=None)
        hopper_gemm(args, out, tile, counters, programs_for(tile, args), pdl=card.pdl).run()
    return out


def hopper_gemm(
    args: LinearArgs, out: Tensor, tile: HopperTile, counters: Tensor, programs: int, *, pdl: bool
) -> Launch:
    """`args`, whose x is in the order of `order_inputs` and has no norm, into `out` [M, N].

    counters: int32, zero between kernels, one for each warpgroup of all programs."""
    x, own, res, n = args.x, Operands(args.weight), args.residual, args.n
    m_tiles = triton.cdiv(len(x), tile.bn)
    chunks = args.k // INPUTS
    total = triton.cdiv(args.weight.outputs, tile.rows) * m_tiles * chunks
    programs = min(programs, total)
    sums = torch.empty(2 * programs * tile.rows * tile.bn, dtype=torch.float32, device=x.device)
    described = TensorDescriptor(
        x, list(x.shape), list(x.stride()), [tile.bn, INPUTS], _layout(128, 16, 2)
    )
    operands = (
        described, _describe(own.values, tile.rows, gated=args.gated), own.scales,
        own.zeros, x if args.bias is None else args.bias, x if res is None else res, out, sums,
        counters, len(x), n, m_tiles, chunks, total, own.scales.stride(0),
        0 if res is None else res.stride(0), out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, CONSUMERS=tile.groups, BN=tile.bn, STAGES=tile.stages,
        GROUP=own.group // INPUTS, ASM=INSTRUCTIONS[x.dtype], ZEROS=own.has_zeros,
        SCALED=own.has_scales, GLU=args.gated, ACT=args.act_name, BIAS=args.bias is not None,
        RES=res is not None, APART=args.apart, PDL=pdl, num_warps=4,
    )  # fmt: skip
    return Launch(multiply_chunks, (programs,), operands, named)


def _layout(swizzle: int, bits: int, rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _describe(words: Tensor, rows: int, *, gated: bool) -> TensorDescriptor:
    """Describes boxes of a weight's rows; of a gated layer 8 gate rows, their 8 up rows, and so
    on."""
    (outputs, count), stride = words.shape, words.stride(0)
    if not gated:
        return TensorDescriptor(
            words, [outputs, count], [stride, 1], [rows, _WORDS], _layout(64, 32, 2)
        )
    return TensorDescriptor(
        words, [outputs // 16, 2, 8, count], [8 * stride, outputs // 2 * stride, stride, 1],
        [rows // 16, 2, 8, _WORDS], _layout(64, 32, 4),
    )  # fmt: skip
