"""Launches the kernel that rounds inputs to integers and multiplies one token by its experts."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.experts import ExpertWeights, Swiglu
from quire.ops.triton.experts.integer_kernels import PART_BYTES, PRODUCTS, integer_experts_kernel
from quire.ops.triton.experts.mma import aligned
from quire.ops.triton.experts.plan import PIECE, IntegerTile
from quire.ops.triton.launch import DeviceTraits, launch, options, traits
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.weight import Weight, WeightFormat

_MOST_BYTES = 46 << 10
"""Bytes of shared memory that a program may use in addition to Triton's own."""


def kind_of(format: WeightFormat) -> str | None:
    """Returns the kind of instructions that multiply weights of a format, or None."""
    if format.scales is None or format.ordered:
        return None
    if format.code == "e2m1":
        return "e2m1" if format.group == 32 and format.scales is torch.float8_e8m0fnu else None
    if format.code != "integer" or format.scales is torch.float8_e8m0fnu:
        return None
    if format.bits == 4:
        return "int4" if format.group and format.group % 32 == 0 else None
    if format.bits or format.zeros or format.group % 128:
        return None
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(format.values)


def counts(weight: Weight, x: Tensor, experts: int) -> bool:
    """Whether the kernel supports a weight and rows like x [T, K], on cards that have its
    instructions.

    Args:
        experts: number of experts over which the product sums.
    """
    kind = kind_of(weight.format)
    if kind is None or x.dtype != torch.bfloat16 or weight.first:
        return False
    if weight.inputs % (32 if weight.format.bits else 16):
        return False
    if not aligned(x) or not aligned(weight.values):
        return False
    pieces = experts * triton.cdiv(weight.inputs, PIECE)
    # The tile with the most warps shares the pieces among 16 of them.
    return _shared_bytes(16, triton.cdiv(pieces, 16)) <= _MOST_BYTES


def has_instructions(format: WeightFormat, card: DeviceTraits) -> bool:
    """Whether a card has the instructions for a format that the kernel supports."""
    return card.capability >= ((8, 9) if kind_of(format) == "fp8" else (8, 6))


def _shared_bytes(warps: int, total: int) -> int:
    """Returns the bytes of shared memory of a program. Each warp has `total` pieces."""
    return warps * (total * 2 * PART_BYTES + 32 + 256)


def integer_product(
    tile: IntegerTile, x: Tensor, ids: Tensor, weights: Tensor, linear: ExpertWeights,
    act: Swiglu | None, residual: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Computes gated units of each assignment, or without an activation the weighted sum over each
    token's experts."""
    own, (tokens, top_k), n = Operands(linear.weight), ids.shape, out.shape[1]
    gated, given, pdl = act is not None, act or Swiglu(), traits(x.device).pdl
    kind = kind_of(linear.weight.format)
    bits = own.bits or 8
    words, pairs = own.values.view(torch.int32), x.view(torch.int32)
    pieces = triton.cdiv(linear.weight.inputs, PIECE)
    total = triton.cdiv(pieces * (1 if gated else top_k), tile.warps)
    size = _shared_bytes(tile.warps, total)
    shared = f"{{\n.shared .align 16 .b8 kept[{size}];\nmov.u32 $0, kept;\n}}"
    scales, zeros = own.scales, own.zeros
    paired = bits == 4 and own.group == 128 and linear.weight.inputs % PIECE == 0
    paired = paired and scales.itemsize == 2 and scales.is_contiguous() and zeros.is_contiguous()
    if paired:
        scales = scales.view(torch.int32)
        zeros = zeros.view(torch.int16) if own.has_zeros else scales
    tiles = triton.cdiv(n, 8 if gated else 16)
    launch(integer_experts_kernel, (tiles, ids.numel() if gated else tokens))(
        pairs, ids, weights, words, scales, zeros, x if linear.bias is None else linear.bias,
        x if residual is None else residual, out, n, linear.weight.inputs, words.shape[1],
        pairs.stride(0), words.stride(0), scales.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        SHARED=shared, GATED=gated, TOP_K=top_k, WARPS=tile.warps, PIECES=pieces, TOTAL=total,
        AHEAD=min(tile.ahead, total), KIND=kind, ASM=PRODUCTS[kind or ""], BITS=bits,
        GROUP=own.group * bits // 32, HAS_ZEROS=own.has_zeros, PAIRED=paired,
        FP16=scales.dtype == torch.float16 or own.scales.dtype == torch.float16,
        EVEN=linear.weight.inputs % PIECE == 0, HAS_BIAS=linear.bias is not None,
        HAS_RES=residual is not None, ALPHA=given.alpha, LIMIT=given.limit, SHIFT=given.shift,
        CUBIC=given.cubic, PDL=pdl, **options(pdl, num_warps=tile.warps, num_stages=1),
    )  # fmt: skip
