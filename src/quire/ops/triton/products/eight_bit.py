"""Matrix products of 8-bit inputs and 8-bit weights, for many rows.

int8 products are summed exactly, in int32. Products of 8-bit floats are summed in fp32. Scales are
applied to the whole sum, or to the sum of each group of inputs that has a scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.activation import run as activate
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.common import load_k, tile_rows, wait_for_predecessor
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.triton.products.round_inputs import quantize_inputs
from quire.ops.triton.products.skinny import reduce_split_k, store_tile
from quire.ops.triton.products.small import default_workspace
from quire.ops.weight import Weight

_LIBRARY_ROWS = 128
"""Up to this number of rows the kernel of this file, with its epilogue, is as fast as cuBLAS."""
_LONG = 8192
"""With more inputs than this, there are two programs per multiprocessor to share them."""
_MOST_SPLITS = 4
_BAND = 8
"""Tiles of rows that run at the same time, so that a tile of the weight stays in L2."""


class EightBitTile(NamedTuple):
    """The tile of a program, and the number of programs that share its K.

    Attributes:
        bm: rows of x.
        bn: weight rows. In a gated layer a tile has bn gate rows and bn up rows.
        bk: inputs of a step.
        warps: warps of a program.
        stages: tiles in flight.
        splits: number of programs that share a tile's inputs (split-K).
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    splits: int = 1


@triton.jit
def eight_bit_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr, M, N,
    K, stride_xm, stride_xsm, stride_xsg, stride_wn, stride_wsn, stride_rm, stride_ym, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr, GROUP: tl.constexpr,
    INTEGERS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]).

    Grid: tiles of the result, in bands of BAND tiles of rows; splits.

    Args:
        x_scale_ptr: [M, 1] or [M, groups].
        w_scale_ptr: [N, 1] or [N, groups].
        share: inputs of a split.
    """
    R: tl.constexpr = 2 * BN if GLU else BN
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first = tl.program_id(0) // (BAND * tiles_n) * BAND
    height = tl.minimum(tiles_m - first, BAND)
    place = tl.program_id(0) % (BAND * tiles_n)
    pid_m = first + place % height
    pid_n = place // height
    rows = tile_rows(pid_n, N, BN, GLU)
    cols = pid_n * BN + tl.arange(0, BN)
    ms = pid_m * BM + tl.arange(0, BM)
    held = tl.minimum(ms, M - 1).to(tl.int64)
    ks = tl.arange(0, BK)
    x_ptrs = x_ptr + held[:, None] * stride_xm
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    x_scales = x_scale_ptr + held * stride_xsm
    w_scales = w_scale_ptr + rows.to(tl.int64) * stride_wsn
    if PDL:
        wait_for_predecessor(False)
    acc = tl.zeros([BM, R], tl.float32 if GROUP > 0 else SUM)
    begin = 0
    end = K
    if SPLIT:
        begin = tl.program_id(1) * share
        end = tl.minimum(K, begin + share)
    for k0 in range(begin, end, BK):
        k = (k0 + ks)[None, :]
        x = load_k(x_ptrs + k, k, K, EVEN_K)
        w = load_k(w_ptrs + k, k, K, EVEN_K)
        if GROUP > 0:
            part = tl.dot(x, tl.trans(w), out_dtype=SUM).to(tl.float32)
            group = k0 // GROUP
            part *= tl.load(x_scales + group * stride_xsg)[:, None]
            acc += part * tl.load(w_scales + group)[None, :]
        else:
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=SUM)
    last = True
    if SPLIT:
        part, parts = tl.program_id(1), tl.num_programs(1)
        acc, last = reduce_split_k(
            acc, parts_ptr, counters_ptr, tl.program_id(0), part, parts, BM, R
        )
    if last:
        y = acc.to(tl.float32)
        if GROUP == 0:
            y *= tl.load(x_scales)[:, None]
        store_tile(
            y, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_wsn, stride_rm,
            stride_ym, GLU, ACT, GROUP == 0, HAS_BIAS, HAS_RES, False,
        )  # fmt: skip


def takes(weight: Weight) -> bool:
    """Whether a layer with this weight multiplies inputs in 8 bits."""
    form = weight.format
    if form.inputs == "none" or form.bits or form.zeros or form.ordered or weight.first:
        return False
    if form.values not in (torch.int8, torch.float8_e4m3fn) or weight.inputs % 16:
        return False
    return not form.group or form.group % 128 == 0


def tile_for(rows: int, args: LinearArgs) -> EightBitTile:
    """Returns the tile for `rows` rows, from a sweep over an 8B model's layers."""
    gated, grouped = args.gated, bool(args.weight.format.group)
    if gated and (rows <= 64 or grouped):
        tile = EightBitTile(64, 32 if rows <= 128 else 64, 128, 4, 3)
    elif gated:
        tile = EightBitTile(128, 64, 128, 4 if rows <= 128 else 8, 3)
    elif rows <= 512 or grouped:
        tile = EightBitTile(64, 64 if rows <= 64 else 128, 128, 4, 4)
    else:
        tile = EightBitTile(128, 128, 128, 8, 3)
    programs = triton.cdiv(rows, tile.bm) * triton.cdiv(args.n, tile.bn)
    # Too few programs leave most of the card idle. But a split of few inputs does not pay off.
    wanted = traits(args.x.device).num_sms * (2 if grouped or args.k > _LONG else 1)
    splits = min(wanted // programs, args.k // (4 * tile.bk), _MOST_SPLITS)
    return tile._replace(splits=max(1, splits))


def product(args: LinearArgs) -> Tensor:
    """Returns y [T, N], see `LinearArgs`, for a weight that passes `takes`."""
    q, scales = quantize_inputs(args.x, args.weight, args.norm)
    if not _library_takes(args):
        return eight_bit_gemm(q, scales, args, tile_for(len(q), args))
    weight, bias = args.weight, args.bias
    assert weight.scales is not None
    out = torch._scaled_mm(
        q, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(), bias=bias,
        out_dtype=args.x.dtype, use_fast_accum=True,
    )  # fmt: skip
    if args.act is not None:
        out = activate(out, args.act)
    return out if args.residual is None else out.add_(args.residual)


def _library_takes(args: LinearArgs) -> bool:
    """Whether cuBLAS computes the product.

    It does for 8-bit floats with one scale per output and enough rows. With fewer rows the separate
    kernels around it cost more than it gains."""
    weight = args.weight
    assert weight.scales is not None
    floats = weight.dtype == torch.float8_e4m3fn and not weight.format.group
    wide = args.x.dtype == torch.bfloat16 and weight.scales.dtype == torch.float32
    many = args.x.is_cuda and len(args.x) > _LIBRARY_ROWS
    return many and floats and wide and weight.outputs % 16 == 0


def eight_bit_gemm(
    q: Tensor, scales: Tensor, args: LinearArgs, tile: EightBitTile, pdl: bool | None = None
) -> Tensor:
    """Returns y [T, N] for inputs in 8 bits.

    Args:
        q: [T, inputs], in the dtype of the weight.
        scales: fp32 [T, 1] or [T, groups], or [1, 1] for all rows.
        args: the layer. Only the dtype of its x is used, for y.
    """
    rows, n, k = len(q), args.n, args.k
    weight, res = args.weight, args.residual
    assert weight.scales is not None
    pdl = traits(q.device).pdl if pdl is None else pdl
    out = torch.empty(rows, n, dtype=args.x.dtype, device=q.device)
    tiles = triton.cdiv(rows, tile.bm) * triton.cdiv(n, tile.bn)
    share = triton.cdiv(triton.cdiv(k, tile.bk), tile.splits) * tile.bk
    splits = triton.cdiv(k, share)
    integers, group = weight.dtype == torch.int8, weight.format.group
    parts = out
    if splits > 1:
        size = tiles * splits * tile.bm * tile.bn * (2 if args.gated else 1)
        exact = torch.int32 if integers and not group else torch.float32
        parts = torch.empty(size, dtype=exact, device=q.device)
    launch(eight_bit_kernel, (tiles, splits))(
        q, scales, weight.values, weight.scales, q if args.bias is None else args.bias,
        q if res is None else res, out, parts, default_workspace(q.device).counters, rows, n, k,
        q.stride(0),
        scales.stride(0) if len(scales) > 1 else 0, scales.stride(1), weight.values.stride(0),
        weight.scales.stride(0), 0 if res is None else res.stride(0), out.stride(0),
        share, BM=tile.bm, BN=tile.bn, BK=tile.bk, BAND=_BAND, SPLIT=splits > 1,
        EVEN_K=k % tile.bk == 0, GLU=args.gated, ACT=args.act_name, GROUP=group,
        INTEGERS=integers, HAS_BIAS=args.bias is not None,
        HAS_RES=res is not None, PDL=pdl,
        **options(pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip
    return out
