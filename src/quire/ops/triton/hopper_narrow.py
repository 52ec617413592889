"""Products of 17 to 32 rows with weights of 16 bits on Hopper cards: the launch of
`hopper_narrow_kernel.py`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.errors import ConfigError
from quire.ops.triton.gemm import default_workspace
from quire.ops.triton.gemm_plan import Launch, LinearArgs
from quire.ops.triton.hopper_narrow_kernel import narrow_kernel
from quire.ops.triton.launch import options, traits

_ROWS = 64
"""Weight rows of a tile."""
_INPUTS = 64
"""Inputs of a chunk."""
_STAGES = 9
"""Chunks in flight: as many as leave room for a second program on a multiprocessor."""
_REGISTERS = 128
"""The most of a thread, for the same reason."""
_MOST_PARTS = 5
"""Programs that share a tile at most: one has to add all their sums."""
FEWEST, MOST = 17, 32
"""Rows for which this was the fastest within a layer; up to 16 and 64 others are as fast."""


def takes(args: LinearArgs) -> bool:
    """Whether the kernel is for a layer: 17 to 32 rows, weights of x's 16 bits, in rows that TMA
    takes, a residual and no norm or activation, and so few outputs that programs share tiles."""
    x, values = args.x, args.weight.values
    if not FEWEST <= len(x) <= MOST or args.norm is not None or args.act is not None:
        return False
    if args.residual is None or args.weight.scales is not None or x.dtype != values.dtype:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or parts_of(args) < 2:
        return False
    return all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (x, values))


def parts_of(args: LinearArgs) -> int:
    """Returns how many programs share a tile: as many as run at once, each of two chunks or more;
    0 where there are more tiles."""
    tiles = triton.cdiv(args.n, _ROWS)
    most = min(_MOST_PARTS, triton.cdiv(args.k, _INPUTS) // 2)
    return min(traits(args.x.device).num_sms // tiles, most)


def product(args: LinearArgs) -> Tensor:
    """Returns y [M, N], see `LinearArgs`, of a layer that `takes` says yes to."""
    x = args.x
    out = torch.empty(len(x), args.n, dtype=x.dtype, device=x.device)
    counters = default_workspace(x.device).counters
    narrow(args, out, parts_of(args), counters, pdl=traits(x.device).pdl).run()
    return out


def narrow(args: LinearArgs, out: Tensor, parts: int, counters: Tensor, *, pdl: bool) -> Launch:
    """`args`, which have a residual, but neither norm nor activation, into `out` [M, N].

    parts: programs that share a tile. counters: int32, zero between kernels, one for each
    program."""
    x, values, res = args.x, args.weight.values, args.residual
    if res is None:
        raise ConfigError("the kernel adds a residual", "residual")
    m_tiles = triton.cdiv(len(x), MOST)
    chunks = triton.cdiv(args.k, _INPUTS)
    tiles = triton.cdiv(args.n, _ROWS) * m_tiles
    programs = tiles * min(parts, chunks)
    sums = torch.empty(2 * programs * _ROWS * MOST, dtype=torch.float32, device=x.device)
    operands = (
        _describe(x, MOST), _describe(values, _ROWS), x if args.bias is None else args.bias, res,
        out, sums, counters, len(x), args.n, m_tiles, chunks, tiles * chunks, res.stride(0),
        out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, BN=MOST, STAGES=_STAGES, BIAS=args.bias is not None, PDL=pdl, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    return Launch(narrow_kernel, (programs,), operands, named)


def _describe(values: Tensor, rows: int) -> TensorDescriptor:
    """Describes boxes of a matrix's rows."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        values, list(values.shape), list(values.stride()), [rows, _INPUTS], layout
    )
