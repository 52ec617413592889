"""Prepares a layer's inputs: their order for `hopper_gemm_kernel.py`, and rounding to 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.arguments import RmsScale
from quire.ops.reference.quantized import LARGEST
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.common import normalise, wait_for_predecessor
from quire.ops.weight import Weight

LIFT = 2.0**64
"""Factor of bf16 inputs. It makes up for the kernel's weights, which are smaller by this factor."""
_BLOCK = 1024
"""Inputs of a program without a norm."""


@triton.jit
def _order_kernel(
    x_ptr, g_ptr, out_ptr, K, width, eps, stride_xm, VALUES: tl.constexpr, NORM: tl.constexpr,
    LIFT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reorders and lifts inputs. Grid: rows, blocks of inputs.

    Args:
        VALUES: number of values in a word.
        NORM: RMSNorm is applied first, and a program has a whole row.
    """
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The axes of a step are a thread of four, a word of the thread, and a place in the word.
    STEP: tl.constexpr = 32 * VALUES
    thread, word = at % 8 // 2, at % STEP // (4 * VALUES)
    place = at % (4 * VALUES) // 8 + VALUES // 2 * (at % 2)
    source = at // STEP * STEP + 8 * VALUES * thread + VALUES * word + place
    x = tl.load(x_ptr + row * stride_xm + source, mask=source < K, other=0.0)
    if NORM:
        g = tl.load(g_ptr + source, mask=source < K, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        x = normalise(x, inverse, g, x_ptr.dtype.element_ty, g_ptr.dtype.element_ty)
    x = (x.to(tl.float32) * LIFT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + at, x, mask=at < width)


def order_inputs(x: Tensor, norm: RmsScale | None = None, bits: int = 4) -> Tensor:
    """Returns norm(x) times LIFT as bf16, [rows, K rounded up to a step], in the kernel's order.

    The product with LIFT is exact, because inputs are below 2^63. Zeros fill the last step. A step
    is 32 words of a weight row. Thread q of four reads 8 words of v = 32 / bits neighbouring
    weights. It unpacks pairs of values that are v / 2 places apart in a word. So input
    8 v q + v w + v e / 2 + c of a step is stored at place 4 v w + 8 c + 2 q + e.

    Args:
        x: [rows, K].
        norm: RMSNorm applied first, or None.
        bits: bits of a weight.
    """
    rows, inputs = x.shape
    step = 1024 // bits
    width = triton.cdiv(inputs, step) * step
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = _BLOCK if norm is None else triton.next_power_of_2(width)
    pdl = traits(x.device).pdl
    launch(_order_kernel, (rows, triton.cdiv(width, block)))(
        x, x if norm is None else norm.weight, out, inputs, width,
        0.0 if norm is None else norm.eps, x.stride(0), VALUES=32 // bits, NORM=norm is not None,
        LIFT=LIFT if x.dtype == torch.bfloat16 else 1.0, BLOCK=block, PDL=pdl,
        **options(pdl, num_warps=min(max(block // 512, 1), 16)),
    )  # fmt: skip
    return out


# -- rounding of a layer's inputs to the 8 bits of its weights ---------------------------------

_ELEMENTS = 4096
"""Inputs of a program without a norm. It may have several groups."""
_MOST = 16384
"""The most inputs of a program with a norm, which has a whole token."""


SMALLEST: tl.constexpr = tl.constexpr(2.0**-120)
"""The smallest scale of inputs. Its reciprocal is still finite."""


@triton.jit
def quotient(x, scale, reciprocal):
    """Returns x / scale with the rounding of a division, in a third of its instructions."""
    y = x * reciprocal
    return tl.fma(tl.fma(-y, scale, x), reciprocal, y)


@triton.jit
def scale_for(largest, TOP: tl.constexpr):
    """Returns the scale that maps the largest input to TOP, or 1 if that input is 0."""
    return tl.where(largest == 0, 1.0, tl.maximum(tl.div_rn(largest, TOP), SMALLEST))


@triton.jit
def _round_kernel(
    x_ptr, scale_ptr, g_ptr, out_ptr, scales_ptr, K, first, groups, eps, stride_xm, stride_om,
    stride_sm, stride_sg, TOP: tl.constexpr, INTEGERS: tl.constexpr, FIXED: tl.constexpr,
    NORM: tl.constexpr, STORED: tl.constexpr, CAST: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds GROUPS groups of a token's inputs. A group is WIDTH inputs that share a scale.

    Args:
        first: number of inputs of the first group that come before this rank's first input.
        TOP: the largest rounded number.
        NORM: RMSNorm is applied first, and a program has a whole token.
        STORED: store rounded numbers and scales. Otherwise store their product.
        CAST: the card can convert to 8-bit floats, and a store rounds.
        BLOCK: size of a block, at least WIDTH.
    """
    if PDL:
        wait_for_predecessor(False)
    row = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = tl.arange(0, BLOCK)
    ks = (own * WIDTH - first)[:, None] + at[None, :]
    mask = (at < WIDTH)[None, :] & (ks >= 0) & (ks < K)
    x = tl.load(x_ptr + row * stride_xm + ks, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        g = tl.load(g_ptr + ks, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / K + eps)
        x = normalise(x, inverse, g, x_ptr.dtype.element_ty, g_ptr.dtype.element_ty)
    low = -TOP
    if FIXED:
        scale = tl.full([GROUPS], 1.0, tl.float32) * tl.load(scale_ptr)
        if INTEGERS:
            low = -128.0
        y = tl.div_rn(x, scale[:, None])
    else:
        scale = scale_for(tl.max(tl.abs(x), 1), TOP)
        reciprocal = tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)
        y = quotient(x, scale[:, None], reciprocal[:, None])
    y = tl.minimum(tl.maximum(y, low), TOP)
    # Adding and subtracting 1.5 * 2^23 rounds to an integer, halves to even.
    if INTEGERS:
        y = (y + 12582912.0) - 12582912.0
    elif not CAST:
        # Neighbouring 8-bit floats differ by an eighth of their power of two, at least by 2^-9.
        power = (y.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
        y = ((y / step + 12582912.0) - 12582912.0) * step
    if STORED:
        tl.store(scales_ptr + row * stride_sm + own * stride_sg, scale, mask=own < groups)
    else:
        y *= scale[:, None]
    tl.store(out_ptr + row * stride_om + ks, y.to(out_ptr.dtype.element_ty), mask=mask)


def round_inputs(x: Tensor, weight: Weight, norm: RmsScale | None = None) -> Tensor:
    """Returns norm(x) [T, inputs] rounded and restored, see `reference.quantized.round_inputs`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, weight, norm, out, None)
    return out


def quantize_inputs(x: Tensor, weight: Weight, norm: RmsScale | None) -> tuple[Tensor, Tensor]:
    """Returns norm(x) [T, inputs] in the weight's dtype, and its fp32 scales [T, groups].

    The scales are [T, 1] if the format has no groups. In memory, scales of neighbouring tokens are
    adjacent, and the scales of each group begin at a multiple of 16 bytes."""
    groups = _groups(weight)[0]
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    room = triton.cdiv(len(x), 4) * 4
    scales = torch.empty(groups, room, dtype=torch.float32, device=x.device)[:, : len(x)].t()
    _run(x, weight, norm, out, scales)
    return out, scales


def _groups(weight: Weight) -> tuple[int, int, int]:
    """Returns the number of groups with a scale, the inputs of a group, and the offset of the first
    input in its group."""
    if weight.format.inputs != "group":
        return 1, triton.next_power_of_2(weight.inputs), 0
    width = weight.format.group
    return triton.cdiv(weight.first + weight.inputs, width), width, weight.first


def _run(
    x: Tensor, weight: Weight, norm: RmsScale | None, out: Tensor, scales: Tensor | None
) -> None:
    tokens, inputs = x.shape
    if not out.numel():
        return
    format = weight.format
    groups, width, first = _groups(weight)
    block = triton.next_power_of_2(width)
    share = triton.next_power_of_2(groups)
    if norm is not None and groups > 1 and share * block > _MOST:
        x, norm = rms_norm(x, *norm), None
    if norm is None:
        share = min(share, max(1, _ELEMENTS // block))
    card = traits(x.device)
    cast = scales is not None and card.capability >= (8, 9)
    launch(_round_kernel, (tokens, triton.cdiv(groups, share)))(
        x, x if weight.input_scale is None else weight.input_scale,
        x if norm is None else norm.weight, out, x if scales is None else scales, inputs, first,
        groups, 0.0 if norm is None else norm.eps, x.stride(0), out.stride(0),
        *((0, 0) if scales is None else scales.stride()), TOP=LARGEST[format.values],
        INTEGERS=not format.values.is_floating_point, FIXED=weight.input_scale is not None,
        NORM=norm is not None, STORED=scales is not None, CAST=cast, GROUPS=share, WIDTH=width,
        BLOCK=block, PDL=card.pdl,
        **options(card.pdl, num_warps=min(max(share * block // 512, 1), 16)),
    )  # fmt: skip
