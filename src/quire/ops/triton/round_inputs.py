"""The rounding of a layer's inputs to the 8 bits of its weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.quantized import LARGEST
from quire.ops.triton.gemm_common import wait_for_predecessor
from quire.ops.triton.launch import launch, options, traits
from quire.ops.weight import Weight


@triton.jit
def _round_kernel(
    x_ptr, scale_ptr, out_ptr, K, first, stride_xm, stride_om,
    TOP: tl.constexpr, INTEGERS: tl.constexpr, FIXED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds a token's inputs from program * WIDTH - first on, WIDTH of them, which share a scale.
    TOP: the largest rounded number. BLOCK: WIDTH or more."""
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ks = tl.program_id(1) * WIDTH - first + at
    mask = (at < WIDTH) & (ks >= 0) & (ks < K)
    x = tl.load(x_ptr + row * stride_xm + ks, mask=mask, other=0.0).to(tl.float32)
    low = -TOP
    if FIXED:
        scale = tl.load(scale_ptr)
        if INTEGERS:
            low = -128.0
    else:
        top = tl.max(tl.abs(x), 0)
        scale = tl.where(top == 0, 1.0, tl.div_rn(top, TOP))
    y = tl.minimum(tl.maximum(tl.div_rn(x, scale), low), TOP)
    step = tl.full([BLOCK], 1.0, tl.float32)
    if not INTEGERS:
        # Neighbouring 8-bit floats are an eighth of their power of two apart, 2^-9 at the least.
        power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
    # Adding and taking away 1.5 * 2^23 leaves no fraction, and rounds halves to even.
    y = ((y / step + 12582912.0) - 12582912.0) * step
    tl.store(out_ptr + row * stride_om + ks, (y * scale).to(out_ptr.dtype.element_ty), mask=mask)


def round_inputs(x: Tensor, weight: Weight) -> Tensor:
    """Returns x [T, inputs] as it is after quantization, see `reference.quantized.round_inputs`."""
    format = weight.format
    tokens, inputs = x.shape
    out = torch.empty(tokens, inputs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    first, width = 0, triton.next_power_of_2(inputs)
    if format.inputs == "group":
        first, width = weight.first, format.group
    scale = x if weight.input_scale is None else weight.input_scale
    pdl = traits(x.device).pdl
    launch(_round_kernel, (tokens, triton.cdiv(first + inputs, width)))(
        x, scale, out, inputs, first, x.stride(0), out.stride(0), TOP=LARGEST[format.values],
        INTEGERS=not format.values.is_floating_point, FIXED=weight.input_scale is not None,
        BLOCK=triton.next_power_of_2(width), WIDTH=width, PDL=pdl,
        **options(pdl, num_warps=min(max(width // 512, 1), 16)),
    )  # fmt: skip
    return out
