"""Products whose inputs are summed by segments, and the sum of segments in pairs.

A program has all segments of its tile: each runs the same loop over its own inputs, and sums meet
in registers, in pairs of neighbours. So the sum of a rank's segments is one that a single rank
makes on its way. Compilers must not fuse a product with the addition behind it, as ranks round
between the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.quantized import dequantize
from quire.ops.triton.gemm_common import tile_rows, wait_for_predecessor
from quire.ops.triton.gemm_plan import LinearArgs
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import loads
from quire.ops.triton.quantized_tiles import Operands
from quire.ops.triton.round_inputs import round_inputs
from quire.ops.triton.skinny_gemm import product, store_tile, unpacks_pairs
from quire.ops.weight import Weight

_BM, _BN, _BK = 64, 64, 64
"""The tile of every product: rows, outputs, and inputs of a step."""


@triton.jit
def _sum_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, M, N, size, stride_xm,
    stride_wn, stride_sn, stride_rm, stride_ym,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, UPCAST: tl.constexpr, IN_PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, PARTS * size] and w [N, PARTS * size], see `Operands`. Grid: N
    tiles, M tiles."""
    if PDL:
        wait_for_predecessor(False)
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    rows = tile_rows(pid_n, N, BN, False)
    cols = pid_n * BN + tl.arange(0, BN)
    ms = pid_m * BM + tl.arange(0, BM)
    x_ptrs = x_ptr + tl.minimum(ms, M - 1).to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    s_ptrs = w_scale_ptr + rows.to(tl.int64)[:, None] * stride_sn
    z_ptrs = w_zero_ptr + rows.to(tl.int64)[:, None] * stride_sn
    none = tl.full([BM], 1.0, tl.float32)
    total = tl.zeros([BM, BN], tl.float32)
    one, two, four = total, total, total
    for part in range(PARTS):  # not unrolled, which would take long to compile
        end = (part + 1) * size
        total = product(
            x_ptrs, w_ptrs, s_ptrs, z_ptrs, x_ptr, none, part * size, end, end, 0.0, BM, BN, BK,
            EVEN, "none", False, UPCAST, BITS, GROUP, HAS_ZEROS, False, IN_PAIRS,
        )  # fmt: skip
        if HAS_SCALES:
            total *= tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)[None, :]
        if part % 2 == 0:
            one = total
        else:
            total = one + total
            if part % 4 == 1:
                two = total
            else:
                total = two + total
                if part % 8 == 3:
                    four = total
                else:
                    total = four + total
    store_tile(
        total, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn, stride_rm,
        stride_ym, False, "", False, HAS_BIAS, HAS_RES, False,
    )  # fmt: skip


def segment_sum(
    x: Tensor, weight: Weight, segments: int, dtype: torch.dtype, bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `reference.segments.segment_sum`."""
    if weight.format.inputs != "none":
        x = round_inputs(x, weight)
    if weight.scales is not None and not loads(weight):
        weight = Weight.plain(dequantize(weight, x.dtype))
    m, n, size = len(x), weight.outputs, weight.inputs // segments
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if not m:
        return out
    card, own = traits(x.device), Operands(weight)
    launch(_sum_kernel, (triton.cdiv(n, _BN), triton.cdiv(m, _BM)))(
        x, own.values, own.scales, own.zeros, x if bias is None else bias,
        x if residual is None else residual, out, m, n, size, x.stride(0), own.values.stride(0),
        own.scales.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        PARTS=segments, BM=_BM, BN=_BN, BK=_BK, EVEN=size % _BK == 0, HAS_SCALES=own.has_scales,
        HAS_BIAS=bias is not None, HAS_RES=residual is not None, BITS=own.bits, GROUP=own.group,
        HAS_ZEROS=own.has_zeros, UPCAST=x.dtype == torch.bfloat16 and not card.bf16,
        IN_PAIRS=unpacks_pairs(LinearArgs(x, weight), own), PDL=card.pdl,
        **options(card.pdl, num_warps=4, num_stages=3, enable_fp_fusion=False),
    )  # fmt: skip
    return out


@triton.jit
def _pairs_kernel(
    parts_ptr, bias_ptr, res_ptr, out_ptr, N, stride_p, stride_rm,
    PARTS: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [T, N] of parts [PARTS, T, N]. Grid: tokens, tiles of outputs."""
    if PDL:
        wait_for_predecessor(False)
    t, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    mask = cols < N
    at = parts_ptr + t * N + cols
    total = tl.zeros([BN], tl.float32)
    one, two, four = total, total, total
    for part in tl.static_range(PARTS):
        total = tl.load(at + part * stride_p, mask=mask, other=0.0)
        if part % 2 == 0:
            one = total
        else:
            total = one + total
            if part % 4 == 1:
                two = total
            else:
                total = two + total
                if part % 8 == 3:
                    four = total
                else:
                    total = four + total
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_RES:
        total += tl.load(res_ptr + t * stride_rm + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * N + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_pairs(
    parts: Tensor, dtype: torch.dtype, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `reference.segments.add_pairs`; of at most 8 parts."""
    count, tokens, n = parts.shape
    out = torch.empty(tokens, n, dtype=dtype, device=parts.device)
    if not tokens:
        return out
    bn, pdl = min(1024, triton.next_power_of_2(n)), traits(parts.device).pdl
    launch(_pairs_kernel, (tokens, triton.cdiv(n, bn)))(
        parts, parts if bias is None else bias, parts if residual is None else residual, out, n,
        parts.stride(0), 0 if residual is None else residual.stride(0),
        PARTS=count, BN=bn, HAS_BIAS=bias is not None, HAS_RES=residual is not None, PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip
    return out
