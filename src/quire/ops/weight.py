"""Formats of a linear layer's weights: the model's dtype, or few bits with scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Inputs = Literal["none", "token", "tensor", "group"]
Code = Literal["integer", "e2m1"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Describes stored weights. A weight is (value - zero) * scale.

    Attributes:
        values: dtype of the stored values. With 4 `bits`, a uint8 holds two unsigned values. The
            value of the even input is in the low bits.
        bits: bits of one value; 0 stands for all bits of its dtype.
        code: meaning of 4 bits. They are an integer or a float with one sign bit, two exponent bits
            and one mantissa bit (OCP Microscaling formats, "MXFP4"). Magnitudes are 0 to 6.
        scales: dtype of the scales, one per output and group of inputs. None means no scales, and
            the model computes in the dtype `values`. If a checkpoint shares scales among outputs,
            loading repeats them.
        group: number of inputs that share a scale; 0 stands for all. Groups are counted from the
            first input of the whole layer.
        zeros: whether each scale has an int8 zero. Otherwise the zero of unsigned 4-bit integers is
            8, and the zero of other values is 0.
        ordered: whether each input has its own group index, in any order ("act order").
        inputs: how the layer's inputs are rounded to the dtype `values`. They are not rounded, or
            have a scale per token, one fixed scale, or a scale per token and group.
    """

    values: torch.dtype
    bits: int = 0
    scales: torch.dtype | None = None
    group: int = 0
    zeros: bool = False
    ordered: bool = False
    inputs: Inputs = "none"
    code: Code = "integer"

    @property
    def packed(self) -> int:
        """Values that one stored element holds."""
        return self.values.itemsize * 8 // self.bits if self.bits else 1

    @property
    def zero(self) -> int:
        """The stored value that means 0 if `zeros` is False."""
        return 8 if self.bits == 4 and self.code == "integer" else 0

    @property
    def key(self) -> str:
        """A name for tables, e.g. "bfloat16", "int8", "uint4-g128-zeros"."""
        name = str(self.values).removeprefix("torch.")
        if self.bits:
            name = f"uint{self.bits}" if self.code == "integer" else self.code
        parts = [name]
        parts += [f"g{self.group}"] if self.group else []
        parts += ["zeros"] if self.zeros else []
        parts += ["ordered"] if self.ordered else []
        parts += [f"inputs-{self.inputs}"] if self.inputs != "none" else []
        return "-".join(parts)

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of a weight of this format."""
        groups = -(-inputs // self.group) if self.group else 1
        own = 0 if self.scales is None else self.scales.itemsize + self.zeros
        order = 4 * inputs if self.ordered else 0
        return outputs * (inputs * self.values.itemsize // self.packed + groups * own) + order


@dataclass(frozen=True, slots=True)
class Weight:
    """The stored weights of a layer, or of some of its outputs: `outputs` x `inputs` weights.

    Attributes:
        format: the storage format.
        values: [outputs, inputs / format.packed].
        scales: [outputs, groups], or None. These are the groups of this weight's inputs. With an
            `ordered` format they are all groups of the layer.
        zeros: int8 [outputs, groups], or None.
        groups: int32 [inputs], the group of each input if the format is `ordered`, else None.
        input_scale: fp32 [stacked projections], the fixed scale of inputs, or None. All entries are
            equal after loading.
        prepacked: the weight in an order for fast products on a CPU (`reference/prepacked.py`), or
            None. With it, `values` is on the device "meta" and has only a shape.
        first: index of the first input within its group. It is not 0 if a rank's share of the
            inputs begins inside a group.
    """

    format: WeightFormat
    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    first: int = 0
    groups: Tensor | None = None
    input_scale: Tensor | None = None
    prepacked: Any = None

    @classmethod
    def plain(cls, values: Tensor) -> Weight:
        """Returns the weight of values [outputs, inputs] without scales."""
        return cls(WeightFormat(values.dtype), values)

    @classmethod
    def empty(
        cls, format: WeightFormat, outputs: int, inputs: int, device: torch.device, *,
        before: int = 0, whole: int | None = None, stacked: int = 1,
    ) -> Weight:  # fmt: skip
        """Returns a weight without content.

        Args:
            format: the storage format.
            outputs: number of outputs.
            inputs: number of inputs.
            device: device of the tensors.
            before: number of the layer's inputs before the first one of this weight.
            whole: number of inputs of the whole layer; by default the last one is this weight's.
            stacked: number of projections that share the weight.
        """
        first = before % format.group if format.group else 0
        groups = -(-(first + inputs) // format.group) if format.group else 1
        if format.ordered:
            first, groups = 0, -(-(whole or before + inputs) // format.group)

        def tensor(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(outputs, width, dtype=dtype, device=device)

        order, scale = None, None
        if format.ordered:
            order = torch.empty(inputs, dtype=torch.int32, device=device)
        if format.inputs == "tensor":
            scale = torch.empty(stacked, dtype=torch.float32, device=device)
        return cls(
            format,
            tensor(inputs // format.packed, format.values),
            None if format.scales is None else tensor(groups, format.scales),
            tensor(groups, torch.int8) if format.zeros else None,
            first,
            order,
            scale,
        )

    def clear(self) -> None:
        """Sets every weight to 0."""
        for tensor in (self.values, self.scales, self.zeros):
            if tensor is not None:
                # Scales that are stored as exponents cannot be zero, but values can.
                tensor.view(torch.uint8).zero_()

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * self.format.packed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored values."""
        return self.format.values

    def rows(self, start: int, end: int, projection: int | None = None) -> Weight:
        """Returns the weight of outputs [start, end), a view.

        Args:
            projection: index of the stacked projection to which the outputs belong. The view gets
                that projection's fixed scale of inputs.
        """
        scale = self.input_scale
        if scale is not None and projection is not None:
            scale = scale[projection : projection + 1]
        return replace(
            self,
            values=self.values[start:end],
            scales=None if self.scales is None else self.scales[start:end],
            zeros=None if self.zeros is None else self.zeros[start:end],
            input_scale=scale,
        )
