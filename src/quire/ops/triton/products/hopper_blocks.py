"""Launches `hopper_blocks_kernel.py`.

It computes products in 8-bit floats with a scale for each 128 inputs, on Hopper cards, for more
than a few rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.triton.launch import options, traits
from quire.ops.triton.products.hopper_blocks_kernel import multiply_blocks
from quire.ops.triton.products.plan import Launch, LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.triton.products.small import default_workspace

INPUTS = 128
"""Inputs of a chunk, which share a scale."""
_ROWS = 128
"""Weight rows of a tile."""
_SHARED = 166 << 10
"""Bytes of shared memory for the ring. The rest is for outputs before they are written."""
_BUSY = 0.7
"""With this many tiles per multiprocessor, each program gets whole tiles."""


class BlockTile(NamedTuple):
    """The tile of a program.

    Attributes:
        bn: rows of x.
        shared: programs share tiles. Otherwise each program has whole tiles.
    """

    bn: int
    shared: bool

    @property
    def stages(self) -> int:
        """The number of chunks in flight."""
        return min(8, _SHARED // ((self.bn + _ROWS) * INPUTS + 4 * self.bn))


def takes(args: LinearArgs) -> bool:
    """Whether the kernel supports a layer.

    It needs weights in 8-bit floats with a scale for each 128 inputs, x rounded in the same way,
    and rows that TMA can copy."""
    weight, values = args.weight, args.weight.values
    form, scales = weight.format, weight.scales
    if form.values != torch.float8_e4m3fn or form.inputs != "group" or form.group != INPUTS:
        return False
    if form.zeros or form.ordered or weight.first or weight.inputs % INPUTS or scales is None:
        return False
    if args.apart or (args.gated and weight.outputs % 16):
        return False
    aligned = values.data_ptr() % 16 == 0 and values.stride(0) % 16 == 0
    return scales.dtype == torch.float32 and aligned


def tile_for(rows: int, args: LinearArgs) -> BlockTile:
    """Returns the tile for `rows` rows, from a sweep over an 8B model's layers.

    It is the largest tile that leaves few multiprocessors idle. If there is none, programs share
    tiles."""
    most = min(max(32, triton.next_power_of_2(rows)), 128)
    enough = _BUSY * traits(args.x.device).num_sms
    for bn in (most, max(32, most // 2)):
        if _tiles(rows, bn, args) >= enough:
            return BlockTile(bn, False)
    return BlockTile(bn, True)


def programs_for(tile: BlockTile, args: LinearArgs) -> int:
    """Returns the number of programs.

    If two or more programs share each tile, all tiles are cut in the same way, so that a program
    has a share of only one tile."""
    most, tiles = traits(args.x.device).num_sms, _tiles(len(args.x), tile.bn, args)
    if not tile.shared:
        return min(most, tiles)
    return most // tiles * tiles if 2 * tiles <= most else most


def _tiles(rows: int, bn: int, args: LinearArgs) -> int:
    return triton.cdiv(args.weight.outputs, _ROWS) * triton.cdiv(rows, bn)


def product(args: LinearArgs) -> Tensor:
    """Returns y [M, N], see `LinearArgs`, for a layer that passes `takes`."""
    q, scales = quantize_inputs(args.x, args.weight, args.norm)
    out = torch.empty(len(q), args.n, dtype=args.x.dtype, device=q.device)
    if out.numel():
        tile, counters = tile_for(len(q), args), default_workspace(q.device).counters
        programs = programs_for(tile, args)
        pdl = traits(q.device).pdl
        hopper_blocks(q, scales, args, out, tile, counters, programs, pdl=pdl).run()
    return out


def hopper_blocks(
    q: Tensor, scales: Tensor, args: LinearArgs, out: Tensor, tile: BlockTile, counters: Tensor,
    programs: int, *, pdl: bool,
) -> Launch:  # fmt: skip
    """Returns the launch that writes the layer `args` to `out` [M, N].

    Args:
        q: x as rounded by `quantize_inputs`, 8-bit floats [M, K].
        scales: fp32 [M, K / 128]. Neighbours in M are adjacent in memory.
        counters: int32, two for each program, zero between kernels.
    """
    weight, res, n = args.weight, args.residual, args.n
    assert weight.scales is not None
    m_tiles, n_tiles = triton.cdiv(len(q), tile.bn), triton.cdiv(weight.outputs, _ROWS)
    chunks = args.k // INPUTS
    total = m_tiles * n_tiles * chunks
    programs = min(programs, total if tile.shared else m_tiles * n_tiles)
    sums = counters
    if tile.shared:
        size = 2 * programs * _ROWS * tile.bn
        sums = torch.empty(size, dtype=torch.float32, device=q.device)
    described = TensorDescriptor(
        q, list(q.shape), list(q.stride()), [tile.bn, INPUTS], _layout(128, 8, 2)
    )
    across = scales.t()
    scales_of_x = TensorDescriptor(
        across, list(across.shape), list(across.stride()), [1, tile.bn], _layout(0, 32, 2)
    )
    operands = (
        described, scales_of_x, _describe(weight.values, gated=args.gated), weight.scales,
        out if args.bias is None else args.bias, out if res is None else res, out, sums, counters,
        len(q), n, m_tiles, n_tiles, chunks, total, weight.scales.stride(0),
        0 if res is None else res.stride(0), out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, BN=tile.bn, STAGES=tile.stages, SHARED=tile.shared, GLU=args.gated, ACT=args.act_name,
        BIAS=args.bias is not None, RES=res is not None, PDL=pdl, num_warps=4,
    )  # fmt: skip
    return Launch(multiply_blocks, (programs,), operands, named)


def _layout(swizzle: int, bits: int, rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _describe(values: Tensor, *, gated: bool) -> TensorDescriptor:
    """Describes boxes of a weight's rows to TMA.

    In a gated layer a box has 8 gate rows, the 8 matching up rows, and so on."""
    (outputs, inputs), stride = values.shape, values.stride(0)
    if not gated:
        return TensorDescriptor(
            values, [outputs, inputs], [stride, 1], [_ROWS, INPUTS], _layout(128, 8, 2)
        )
    return TensorDescriptor(
        values, [outputs // 16, 2, 8, inputs], [8 * stride, outputs // 2 * stride, stride, 1],
        [_ROWS // 16, 2, 8, INPUTS], _layout(128, 8, 4),
    )  # fmt: skip
