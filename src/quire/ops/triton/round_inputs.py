"""The rounding of a layer's inputs to the 8 bits of its weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import LARGEST
from quire.ops.triton.gemm_common import normalise, wait_for_predecessor
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.norm import rms_norm
from quire.ops.weight import Weight


@triton.jit
def _round_kernel(
    x_ptr, scale_ptr, g_ptr, out_ptr, scales_ptr, K, first, eps, stride_xm, stride_om, stride_sm,
    TOP: tl.constexpr, INTEGERS: tl.constexpr, FIXED: tl.constexpr, NORM: tl.constexpr,
    STORED: tl.constexpr, CAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rounds a token's inputs from program * WIDTH - first on, WIDTH of them, which share a scale.

    TOP: the largest rounded number. NORM: RMSNorm comes first; a program then has the whole token.
    STORED: rounded numbers and their scales are stored, else what both stand for. CAST: the card
    rounds to 8-bit floats as it stores them. BLOCK: WIDTH or more."""
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ks = tl.program_id(1) * WIDTH - first + at
    mask = (at < WIDTH) & (ks >= 0) & (ks < K)
    x = tl.load(x_ptr + row * stride_xm + ks, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        g = tl.load(g_ptr + ks, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = normalise(x, inverse, g, x_ptr.dtype.element_ty, g_ptr.dtype.element_ty)
    low = -TOP
    if FIXED:
        scale = tl.load(scale_ptr)
        if INTEGERS:
            low = -128.0
    else:
        top = tl.max(tl.abs(x), 0)
        scale = tl.where(top == 0, 1.0, tl.div_rn(top, TOP))
    y = tl.minimum(tl.maximum(tl.div_rn(x, scale), low), TOP)
    # Adding and taking away 1.5 * 2^23 leaves no fraction, and rounds halves to even.
    if INTEGERS:
        y = (y + 12582912.0) - 12582912.0
    elif not CAST:
        # Neighbouring 8-bit floats are an eighth of their power of two apart, 2^-9 at the least.
        power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
        y = ((y / step + 12582912.0) - 12582912.0) * step
    if STORED:
        tl.store(scales_ptr + row * stride_sm + tl.program_id(1), scale)
    else:
        y *= scale
    tl.store(out_ptr + row * stride_om + ks, y.to(out_ptr.dtype.element_ty), mask=mask)


def round_inputs(x: Tensor, weight: Weight) -> Tensor:
    """Returns x [T, inputs] as it is after quantization, see `reference.quantized.round_inputs`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, weight, None, out, None)
    return out


def quantize_inputs(x: Tensor, weight: Weight, norm: RmsScale | None) -> tuple[Tensor, Tensor]:
    """Returns norm(x) [T, inputs] in the dtype of the weight, and fp32 scales [T, groups] that
    restore it; [T, 1] where the format has no groups."""
    groups = 1
    if weight.format.inputs == "group":
        groups = triton.cdiv(weight.first + weight.inputs, weight.format.group)
        if norm is not None:
            x, norm = rms_norm(x, *norm), None
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    scales = torch.empty(len(x), groups, dtype=torch.float32, device=x.device)
    _run(x, weight, norm, out, scales)
    return out, scales


def _run(
    x: Tensor, weight: Weight, norm: RmsScale | None, out: Tensor, scales: Tensor | None
) -> None:
    format = weight.format
    tokens, inputs = x.shape
    if not out.numel():
        return
    first, width = 0, triton.next_power_of_2(inputs)
    if format.inputs == "group":
        first, width = weight.first, format.group
    card = traits(x.device)
    cast = scales is not None and card.capability >= (8, 9)
    launch(_round_kernel, (tokens, triton.cdiv(first + inputs, width)))(
        x, x if weight.input_scale is None else weight.input_scale,
        x if norm is None else norm.weight, out, x if scales is None else scales, inputs, first,
        0.0 if norm is None else norm.eps, x.stride(0), out.stride(0),
        0 if scales is None else scales.stride(0), TOP=LARGEST[format.values],
        INTEGERS=not format.values.is_floating_point, FIXED=weight.input_scale is not None,
        NORM=norm is not None, STORED=scales is not None, WIDTH=width,
        CAST=cast, BLOCK=triton.next_power_of_2(width), PDL=card.pdl,
        **options(card.pdl, num_warps=min(max(width // 512, 1), 16)),
    )  # fmt: skip
