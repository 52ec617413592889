"""The tensors that checkpoints store for a projection, and how they become parts of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.ops import Weight

Range = tuple[int, int]

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes of float tensors in checkpoints. They are converted to the model's dtype."""
FP8 = frozenset({torch.float8_e4m3fn})


@dataclass(frozen=True, slots=True)
class ProjectionShare:
    """The part of a projection that a rank holds.

    Attributes:
        rows: [first, end) of the outputs.
        columns: [first, end) of the inputs.
        outputs: number of outputs of the whole projection.
        inputs: number of inputs of the whole projection.
    """

    rows: Range
    columns: Range
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor that a checkpoint stores for each projection, with the outputs first.

    Attributes:
        name: after the projection's name, such as "weight".
        part: the field of `Weight` that is filled from the tensor.
        dtypes: the tensor must have one of them.
        outputs_per: number of outputs that share an entry along the output axis. None if there is
            no such axis, or one of length 1.
        inputs_per: the same for inputs.
        every_group: whether a rank reads the entries of all groups of inputs.
    """

    name: str
    part: Literal["values", "scales", "zeros", "groups", "input_scale"]
    dtypes: frozenset[torch.dtype]
    outputs_per: int | None = 1
    inputs_per: int | None = 1
    every_group: bool = False

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, () for a scalar."""
        sizes = ((outputs, self.outputs_per), (inputs, self.inputs_per))
        return tuple(-(-size // per) for size, per in sizes if per is not None)

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        """Returns [first, end) of a rank's part of the tensor, for each dimension."""
        columns = (0, share.inputs) if self.every_group else share.columns
        axes = ((share.rows, self.outputs_per), (columns, self.inputs_per))
        return tuple((low // per, -(-high // per)) for (low, high), per in axes if per is not None)

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        """Stores rows of the tensor in a weight, and repeats entries that several outputs share.

        Args:
            weight: the rank's share of the projection.
            part: rows of the rank's part of the tensor.
            start: index of the first of them in the rank's part.
            share: the rank's share.

        Raises:
            ModelError: the content is invalid.
        """
        self.check(part)
        target: Tensor = getattr(weight, self.part)
        if self.outputs_per is None:
            target[: share.rows[1] - share.rows[0]] = part.reshape(1, -1)
            return
        part = part.reshape(len(part), -1)
        first = start
        if self.outputs_per > 1:
            part = part.repeat_interleave(self.outputs_per, 0)
            first = (share.rows[0] // self.outputs_per + start) * self.outputs_per - share.rows[0]
        low, high = max(first, 0), min(first + len(part), share.rows[1] - share.rows[0])
        target[low:high].copy_(part[low - first : high - first], non_blocking=True)

    def check(self, part: Tensor) -> None:
        """Raises ModelError if scales are not positive and finite, or FP8 values are NaN."""
        if part.dtype == torch.float8_e8m0fnu:
            expect((part.view(torch.uint8) != 255).all(), "has scales that are NaN")
        elif self.part in ("scales", "input_scale"):
            wide = part.float()
            expect(
                (wide.isfinite() & (wide > 0)).all(),
                "has scales that are not positive, or infinite",
            )
        elif part.dtype == torch.float8_e4m3fn:
            expect(((part.view(torch.uint8) & 127) != 127).all(), "has values that are NaN")


def expect(true: Tensor, message: str) -> None:
    """Raises ModelError with the message unless the scalar is true or on the meta device."""
    if true.device.type != "meta" and not bool(true):
        raise ModelError(message)
