"""Weights rounded to 8-bit integers while an unquantized checkpoint is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.ops import Weight, WeightFormat
from quire.ops.reference.quantized import quantize_rows, row_scales
from quire.quantization.stored_tensor import FLOATS, Range, StoredTensor
from quire.quantization.unquantized import Unquantized


@dataclass(frozen=True, slots=True)
class _Rounded(StoredTensor):
    """Floats that are rounded to integers, such that the largest of an output is 127.

    A rank reads whole outputs, whatever its share of the inputs, so that every rank has the scales,
    and with them the weights, of the whole layer.
    """

    def ranges(self, rows: Range, columns: Range, inputs: int) -> tuple[Range, ...]:
        return rows, (0, inputs)

    def write(self, weight: Weight, part: Tensor, start: int, rows: Range, columns: Range) -> None:
        scales = row_scales(part, weight.dtype)
        values = quantize_rows(part, scales, weight.dtype)
        own = weight.rows(start, start + len(part))
        own.values.copy_(values[:, columns[0] : columns[1]])
        if own.scales is not None:
            own.scales.copy_(scales)


class Int8(Unquantized):
    """Stores the layers' weights in 8 bits with a scale per output; the head stays as it is."""

    def format_for(self, name: str, dtype: torch.dtype) -> WeightFormat:
        if name == "head":
            return super().format_for(name, dtype)
        return WeightFormat(torch.int8, scales=torch.float32)

    def stored(self, format: WeightFormat) -> Sequence[StoredTensor]:
        if format.scales is None:
            return super().stored(format)
        return (_Rounded("weight", "values", FLOATS),)

    def finish(self, name: str, weight: Weight) -> None:
        if weight.scales is not None and not weight.scales.isfinite().all():
            raise ModelError(f"{name} has weights that are not finite numbers")
