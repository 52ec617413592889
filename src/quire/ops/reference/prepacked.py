"""Weights in the memory orders that PyTorch's CPU kernels multiply fastest.

For one row, reading the weights takes most of the time. For a few rows, executing instructions
does, and products in these orders need fewer instructions."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.ops.reference.quantized import dequantize
from quire.ops.weight import Weight

_TOP = 15
"""Values are scaled until the largest is below 2 to this exponent, one below fp16's limit."""
_ULP = 2.0**-24
"""The step between fp16's smallest numbers."""
_DIGIT = 63
"""The largest digit of an input, 7 bits. CPUs without VNNI add pairs of 8-bit products in 16 bits,
which overflow with larger digits."""
_BASE = 2 * _DIGIT + 1
"""The value of a digit, in units of the next lower digit."""
_LEAST = 1e-30
"""A row counts as zeros up to this magnitude, because the inverse of its unit would overflow."""
_CHUNK = 256
"""Rows that are split into digits at once, which bounds their memory."""
_FEW = 12 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2
"""Up to this many rows, products read 4-bit values. With more rows, widening them takes longer than
reading 8 or 16 bits."""
_PACKED_GROUPS = 32, 64, 128, 256
"""Sizes of groups of inputs that PyTorch's 4-bit order supports. It stores outputs in blocks of
16."""
_COARSE = 0.25
"""Upper limit for the root mean square of 8-bit steps divided by 4-bit steps."""


class Prepacked(Protocol):
    """A weight in an order for fast products."""

    def product(self, x: Tensor) -> Tensor:
        """Returns x [T, inputs] @ weightᵀ, fp32 [T, outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class Halves:
    """Values in fp16, times a power of two. Products and sums are fp32.

    A power of two first scales values into fp16's range. Then bfloat16 values and integers of few
    bits are exact in fp16.

    Attributes:
        values: PyTorch's handle.
        scale: factor of the products, fp32 [outputs] or [].
    """

    values: Any
    scale: Tensor

    def product(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.values)
        return out.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of 8 bits with a scale for each output. Products and sums are exact integers.

    Inputs are rounded to two digits, in steps of 1 / 8001 of the row's largest. This causes less
    error than the weights' 8 bits. Inputs that are multiples of 1 / 127 of the largest are exact.

    Attributes:
        values: PyTorch's handle, scales included.
        outputs: number of outputs.
    """

    values: Any
    outputs: int

    def product(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return self._row(x)
        if len(x) <= _CHUNK:
            return self._chunk(x)
        starts = range(0, len(x), _CHUNK)
        return torch.cat([self._chunk(x[start : start + _CHUNK]) for start in starts])

    def _row(self, x: Tensor) -> Tensor:
        """Multiplies one row, with half as many operations as `_chunk`."""
        low, high = x.aminmax()
        top = max(-low.item(), high.item())
        if not _LEAST < top < math.inf:
            return x.new_full((1, self.outputs), top * 0.0)
        unit = top / _DIGIT
        first = torch.fake_quantize_per_tensor_affine(x, unit, 0, -_DIGIT, _DIGIT)
        digits = torch.mm(_SPLIT, torch.cat((first, x)))
        return torch.mm(_JOIN, _MULTIPLY(digits, unit, _DIGIT + 1, self.values))

    def _chunk(self, x: Tensor) -> Tensor:
        unit = x.abs().amax(1, keepdim=True).div_(_DIGIT)
        scaled = x / torch.where(unit == 0, 1.0, unit)
        first = scaled.round()
        digits = torch.cat((first, scaled.sub_(first).mul_(_BASE)))
        # The product also rounds the digits, by adding a number that makes them positive.
        out: Tensor = _MULTIPLY(digits, 1.0, _DIGIT + 1, self.values)
        return out[: len(x)].add_(out[len(x) :], alpha=1 / _BASE).mul_(unit)


_MULTIPLY = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_SPLIT = torch.tensor([[1.0, 0.0], [-_BASE, _BASE]])
"""Factors that compute both digits from the high digit and the whole number."""
_JOIN = torch.tensor([[1.0, 1 / _BASE]])
"""Weights that recombine the digit products."""


@dataclass(frozen=True, slots=True)
class FourBits:
    """Values of 4 bits in groups, and the same values in another order for more than a few rows.

    Products of a few rows round inputs and outputs to bfloat16, and sum in fp32.

    Attributes:
        values: 4-bit values in PyTorch's order.
        scales: bfloat16 [groups, outputs, 2], factors and addends.
        group: inputs that share a scale.
        wider: the weight for more rows, rounded to 8 bits. If the scales of an output's groups
            differ so much that one 8-bit scale would be much coarser, it has 16 bits.
    """

    values: Tensor
    scales: Tensor
    group: int
    wider: Integers | Halves

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] > _FEW:
            return self.wider.product(x)
        rows = x.to(torch.bfloat16, memory_format=torch.contiguous_format)
        out = torch._weight_int4pack_mm_for_cpu(rows, self.values, self.group, self.scales)
        return out.float()


def prepack(weight: Weight) -> Prepacked | None:
    """Returns the weight in a faster order, or None if no order can hold it."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    kind = weight.format
    if kind.values == torch.int8 and not (kind.group or kind.zeros) and weight.scales is not None:
        return _integers(weight.values, weight.scales.squeeze(1))
    return _four_bits(weight) or _halves(weight)


def _integers(values: Tensor, scales: Tensor) -> Integers:
    zeros = torch.zeros(len(values), dtype=torch.int64)
    with warnings.catch_warnings():
        # PyTorch deprecates its quantized tensors, but not their products.
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        whole = torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0)
    return Integers(torch.ops.quantized.linear_prepack(whole, None), len(values))


def _four_bits(weight: Weight) -> FourBits | None:
    """Returns 4-bit integers in groups, or None if PyTorch does not support the groups."""
    kind, scales = weight.format, weight.scales
    if kind.bits != 4 or kind.code != "integer" or kind.ordered or scales is None:
        return None
    # A group that is cut at the end of a row becomes several smaller ones with the same scale.
    group = math.gcd(kind.group, weight.inputs, weight.first)
    if group not in _PACKED_GROUPS or weight.outputs % 16:
        return None
    starts = torch.arange(0, weight.inputs, group) + weight.first
    source = torch.div(starts, kind.group, rounding_mode="floor")
    wide = scales.float().index_select(1, source)
    wider = _rounded(weight) or _halves(weight)
    if wider is None:
        return None
    own = replace(weight, format=replace(kind, zeros=False), scales=None, zeros=None)
    stored = dequantize(own, torch.float32).add_(kind.zero).int()
    zeros: Tensor | int = kind.zero
    if weight.zeros is not None:
        zeros = weight.zeros.float().index_select(1, source)
    pairs = torch.stack((wide, wide * (8 - zeros)), 2).transpose(0, 1).bfloat16().contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored, 2)
    return FourBits(packed, pairs, group, wider)


def _rounded(weight: Weight) -> Integers | None:
    """Returns 4-bit integers rounded to 8 bits, or None if one scale for an output's groups is too
    coarse."""
    assert weight.scales is not None
    values = dequantize(weight, torch.float32)
    steps = values.abs().amax(1, keepdim=True).div_(127).clamp_(min=torch.finfo().tiny)
    if not (steps / weight.scales.float()).square_().mean() <= _COARSE**2:
        return None
    return _integers(values.div_(steps).round_().to(torch.int8), steps.squeeze(1))


def _halves(weight: Weight) -> Halves | None:
    """Returns the weight in fp16, or None if fp16 cannot hold it.

    Values without scales must be exact: errors are below 2^-38 of the layer's largest value. Values
    of few bits in groups may be rounded to fp16's 11 bits. A model in bfloat16 has only 8."""
    kind, scales = weight.format, weight.scales
    apart = scales is not None and not (kind.group or kind.zeros)
    values = dequantize(replace(weight, scales=None) if apart else weight, torch.float32)
    top = values.abs().max().item()
    if not 0.0 < top < math.inf:
        return None
    power = 2.0 ** (_TOP - math.frexp(top)[1])
    values = values * power  # Not in place, because `values` may be the weight's own tensor.
    if kind.scales is None:
        error = (values.half().float() - values).abs_().max().item()
        if error > _ULP / 2:
            return None
    own = scales.squeeze(1).float() if apart and scales is not None else torch.ones(())
    return Halves(torch.ops.quantized.linear_prepack_fp16(values, None), own / power)
