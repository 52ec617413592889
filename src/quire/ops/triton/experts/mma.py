"""Launches of experts' products on tensor cores, with weights unpacked in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from quire.ops.experts import ExpertWeights, Swiglu
from quire.ops.triton.experts.mma_kernels import mma_rows_kernel, mma_sum_kernel
from quire.ops.triton.experts.plan import MmaTile
from quire.ops.triton.experts.route import Sorted
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.plan import CHUNK_WORDS
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.thread_words import PRODUCT, TYPES, UNPACK
from quire.ops.weight import Weight

_WORDS = 4
"""Words that a thread loads at once. The words of a row must be a multiple of it."""
_WHOLE_ROW = 1 << 28
"""Words of a group if a whole row shares a scale: more words than any row has."""


def multiplies(weight: Weight, x: Tensor) -> bool:
    """Whether these kernels support a weight and rows like x [T, K], on cards that have their
    instruction."""
    format = weight.format
    values = weight.values
    if x.dtype not in TYPES or not aligned(x) or not aligned(values) or weight.first:
        return False
    if format.scales is None or format.ordered:
        return False
    if (format.code, format.values, x.dtype) not in UNPACK:
        return False
    if format.code == "e2m1":
        # Each thread has the 32 inputs that share a scale.
        return format.group == 32 and format.scales is torch.float8_e8m0fnu
    if format.zeros and not format.bits:
        return False
    inputs = CHUNK_WORDS * 32 // (format.bits or 8)
    return format.group % inputs == 0 and bool(format.group or not format.bits)


def aligned(x: Tensor) -> bool:
    """Whether rows are contiguous and begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(1) == 1


def _constants(own: Operands, weight: Weight, x: Tensor) -> dict[str, Any]:
    """Returns the compile-time constants of a weight."""
    format = weight.format
    bits = own.bits or 8
    return {
        "PAIRS": 16 // bits, "UNPACK": UNPACK[format.code, format.values, x.dtype],
        "PRODUCT": PRODUCT[x.dtype],
        "FP16": x.dtype == torch.float16, "E2M1": own.e2m1, "GROUP": own.group * bits // 32,
        "HAS_ZEROS": own.has_zeros,
    }  # fmt: skip


def mma_rows(
    tile: MmaTile, x: Tensor, ids: Tensor, order: Sorted | None, weights: Tensor,
    linear: ExpertWeights, act: Swiglu | None, out: Tensor, rows_per_x: int,
) -> None:  # fmt: skip
    """Computes one product of assignments and their experts.

    With an activation the result is gated units, otherwise weighted outputs. `order` is None if
    each assignment is computed by itself."""
    own, n, pdl = Operands(linear.weight), out.shape[1], traits(x.device).pdl
    words, pairs = own.values.view(torch.int32), x.view(torch.int32)
    count, step = words.shape[1], tile.warps * tile.chunks * CHUNK_WORDS
    gated, given = act is not None, act or Swiglu()
    blocks = ids.numel() if order is None else order.most
    launch(mma_rows_kernel, (triton.cdiv(n, tile.rows * (8 if gated else 16)), blocks))(
        pairs, ids, ids if order is None else order.order, ids if order is None else order.blocks,
        blocks, weights, words, own.scales, own.zeros, x if linear.bias is None else linear.bias,
        out, n, count, pairs.stride(0), words.stride(0), own.scales.stride(0),
        SORTED=order is not None, ROWS_PER_X=rows_per_x, GATED=gated, WARPS=tile.warps,
        COUNT=tile.chunks, R=tile.rows, NT=1 if order is None else tile.columns,
        SINGLE=count <= step, EVEN=count % step == 0, HAS_SCALES=own.has_scales,
        HAS_BIAS=linear.bias is not None, ALPHA=given.alpha, LIMIT=given.limit, SHIFT=given.shift,
        CUBIC=given.cubic, EARLY=tile.early, PDL=pdl, **_constants(own, linear.weight, x),
        **options(pdl, num_warps=tile.warps, num_stages=1),
    )  # fmt: skip


def mma_sum(
    tile: MmaTile, inner: Tensor, ids: Tensor, weights: Tensor, down: ExpertWeights,
    residual: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Computes the weighted sum of the outputs of each token's experts."""
    own, n, (tokens, top_k) = Operands(down.weight), down.outputs, ids.shape
    pdl = traits(inner.device).pdl
    words, pairs = own.values.view(torch.int32), inner.view(torch.int32)
    chunks = triton.cdiv(words.shape[1], CHUNK_WORDS)
    known = _constants(own, down.weight, inner)
    if own.has_scales:
        known["GROUP"] = _WHOLE_ROW
    launch(mma_sum_kernel, (triton.cdiv(n, 16 * tile.rows), tokens))(
        pairs, ids, weights, words, own.scales, own.zeros,
        inner if down.bias is None else down.bias, inner if residual is None else residual, out,
        n, words.shape[1], chunks, pairs.stride(0), words.stride(0), own.scales.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        TOP_K=top_k, WARPS=tile.warps, COUNT=tile.chunks, R=tile.rows,
        SINGLE=top_k * chunks <= tile.warps * tile.chunks, HAS_BIAS=down.bias is not None,
        HAS_RES=residual is not None, PDL=pdl, **known,
        **options(pdl, num_warps=tile.warps, num_stages=1),
    )  # fmt: skip
