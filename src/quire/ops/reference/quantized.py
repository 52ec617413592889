"""Quantized weights and inputs: rounding, dequantization and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.weight import Weight

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each dtype to which values are scaled. For int8 it is 127, because -128 has
no positive counterpart."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits in the code "e2m1"."""


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Returns the weights as [outputs, inputs] in `dtype`. Without scales the scale is 1."""
    kind = weight.format
    plain = kind.values == torch.int8 and not (kind.group or kind.zeros)
    if plain and weight.scales is not None and dtype is not torch.float64:
        # One fused pass, because the intermediate results would take more memory than the weight.
        out = torch.empty(weight.values.shape, dtype=dtype, device=weight.values.device)
        return torch.mul(weight.values, weight.scales.float(), out=out)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    values = weight.values
    if kind.packed > 1:
        shifts = torch.arange(kind.packed, dtype=torch.uint8, device=values.device) * kind.bits
        values = ((values.unsqueeze(-1) >> shifts) & (2**kind.bits - 1)).flatten(1)
    if kind.code == "e2m1":
        table = torch.tensor(E2M1, dtype=wide, device=values.device)
        out = table[values.long()]
    else:
        out = values.to(wide)
    groups = weight.groups
    if kind.group and groups is None:
        places = torch.arange(weight.inputs, device=values.device) + weight.first
        groups = torch.div(places, kind.group, rounding_mode="floor")
    if weight.zeros is not None:
        out -= _each(weight.zeros.to(wide), groups)
    elif kind.zero:
        out -= kind.zero
    if weight.scales is not None:
        out *= _each(weight.scales.to(wide), groups)
    return out.to(dtype)


def product(x: Tensor, weight: Weight, plain: Callable[[Tensor, Tensor, None], Tensor]) -> Tensor:
    """Returns x @ weightᵀ, [T, outputs], with x rounded as the weight's format says.

    If each output has one scale, it is applied to the products.

    Args:
        plain: computes a product with unquantized weights.
    """
    x = round_inputs(x, weight)
    if weight.prepacked is not None:
        out: Tensor = weight.prepacked.product(x)
        return out
    scales = weight.scales
    wide = x.dtype in (torch.float32, torch.float64)
    if scales is None or weight.format.group or weight.format.zeros or not wide:
        return plain(x, dequantize(weight, x.dtype), None)
    out = plain(x, dequantize(replace(weight, scales=None), x.dtype), None)
    return out.mul_(scales.squeeze(1))


def _each(x: Tensor, groups: Tensor | None) -> Tensor:
    """Repeats entries [outputs, groups] for each input. One group stays [outputs, 1]."""
    return x if groups is None else x.index_select(1, groups)


def row_scales(x: Tensor, values: torch.dtype) -> Tensor:
    """Returns scales, fp32 [rows, 1], that map each row's largest magnitude to the largest of dtype
    `values`.

    A row of zeros has scale 1. A row with a NaN or an infinity has a scale that is not finite.
    """
    top = x.abs().amax(1, keepdim=True).float()
    return torch.where(top == 0, 1.0, top / LARGEST[values])


def quantize_rows(x: Tensor, scales: Tensor, values: torch.dtype) -> Tensor:
    """Returns x [rows, width] / scales [rows, 1], rounded to the dtype `values`."""
    top = LARGEST[values]
    scaled = (x.float() / scales).clamp_(-top, top)
    return (scaled if values.is_floating_point else scaled.round_()).to(values)


def round_inputs(x: Tensor, weight: Weight) -> Tensor:
    """Returns x [T, inputs] rounded to the dtype of the weight's values and converted back.

    The scales follow from the weight's format. A rank with a share of the inputs rounds its share
    as if there were no other inputs."""
    kind = weight.format
    values = kind.values
    if kind.inputs == "none":
        return x
    if weight.input_scale is not None:
        scale = weight.input_scale[:1]
        top = LARGEST[values]
        scaled = (x.float() / scale).clamp_(-top if values.is_floating_point else -128.0, top)
        rounded = scaled.to(values).float() if values.is_floating_point else scaled.round_()
        return (rounded * scale).to(x.dtype)
    rows = x
    if kind.inputs == "group":
        behind = -(weight.first + x.shape[1]) % kind.group
        rows = torch.nn.functional.pad(x, (weight.first, behind)).view(-1, kind.group)
    scales = row_scales(rows, values)
    out = (quantize_rows(rows, scales, values).float() * scales).to(x.dtype)
    if kind.inputs == "group":
        out = out.view(len(x), -1)[:, weight.first : weight.first + x.shape[1]]
    return out
