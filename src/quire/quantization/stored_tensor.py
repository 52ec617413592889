"""A checkpoint's tensor of a linear layer, and how it becomes part of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.ops import Weight

Range = tuple[int, int]

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes in which a checkpoint may store what is rounded to the model's dtype."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint for each projection, stored with the outputs first.

    name: behind the projection's, such as "weight". part: what it becomes of a `Weight`.
    dtypes: those that the checkpoint may store it in.
    outputs_per, inputs_per: outputs and inputs that one entry along that axis stands for; None: the
        tensor has no such axis.
    """

    name: str
    part: Literal["values", "scales", "zeros"]
    dtypes: frozenset[torch.dtype]
    outputs_per: int | None = 1
    inputs_per: int | None = 1

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, () for a scalar."""
        sizes = ((outputs, self.outputs_per), (inputs, self.inputs_per))
        return tuple(-(-size // per) for size, per in sizes if per is not None)

    def ranges(self, rows: Range, columns: Range, inputs: int) -> tuple[Range, ...]:
        """Returns what of the tensor a rank reads that holds these outputs and inputs."""
        axes = ((rows, self.outputs_per), (columns, self.inputs_per))
        return tuple((low // per, -(-high // per)) for (low, high), per in axes if per is not None)

    def write(self, weight: Weight, part: Tensor, start: int, rows: Range, columns: Range) -> None:
        """Stores rows of the tensor, from row `start` of the rank's part on.

        weight: of the outputs `rows` and inputs `columns` of the projection. An entry that stands
        for several outputs is repeated for each.
        """
        target: Tensor = getattr(weight, self.part)
        if self.outputs_per is None:
            target[: rows[1] - rows[0]] = part.reshape(1, -1)
            return
        part = part.reshape(len(part), -1)
        first = start
        if self.outputs_per > 1:
            part = part.repeat_interleave(self.outputs_per, 0)
            first = (rows[0] // self.outputs_per + start) * self.outputs_per - rows[0]
        low, high = max(first, 0), min(first + len(part), rows[1] - rows[0])
        target[low:high].copy_(part[low - first : high - first], non_blocking=True)
