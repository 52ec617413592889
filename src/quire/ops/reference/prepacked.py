"""Weights as a CPU multiplies them fastest: fp16, in the order in which FBGEMM reads them.

Products and sums are fp32. One row of tokens is bound by the bytes of the weights, half of fp32's;
a few rows by instructions, of which this order takes fewer. Values of bfloat16 and integers of few
bits are exact in fp16 once a power of two has brought them into its range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.ops.reference.quantized import dequantize
from quire.ops.weight import Weight

_TOP = 15
"""The power of two that a layer's largest value is brought below: one less than fp16 ends at."""
_ULP = 2.0**-24
"""The distance of fp16's smallest numbers."""


@dataclass(frozen=True, slots=True)
class Prepacked:
    """A weight's values, times a power of two.

    values: PyTorch's handle. scale: what products are multiplied by, fp32 [outputs] or [].
    """

    values: Any
    scale: Tensor

    def product(self, x: Tensor) -> Tensor:
        """Returns x [T, inputs] @ weightᵀ, fp32 [T, outputs]."""
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.values)
        return out.mul_(self.scale)


def prepack(weight: Weight) -> Prepacked | None:
    """Returns the weight as it is multiplied by, None where fp16 cannot hold it.

    What is stored as it is must be exact: errors are below 2^-38 of the layer's largest value.
    What is stored in few bits may be rounded to fp16's 11, where groups of inputs have scales: that
    is more than the 8 of a model in bfloat16.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    kind, scales = weight.format, weight.scales
    apart = scales is not None and not (kind.group or kind.zeros)
    values = dequantize(replace(weight, scales=None) if apart else weight, torch.float32)
    top = values.abs().max().item()
    if not 0.0 < top < math.inf:
        return None
    power = 2.0 ** (_TOP - math.frexp(top)[1])
    values = values * power  # they may be the weight's own
    if kind.scales is None:
        error = (values.half().float() - values).abs_().max().item()
        if error > _ULP / 2:
            return None
    own = scales.squeeze(1).float() if apart and scales is not None else torch.ones(())
    return Prepacked(torch.ops.quantized.linear_prepack_fp16(values, None), own / power)
