"""The storage of a projection's weights, in the checkpoint and in memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.ops import WeightFormat
from quire.quantization.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight's format and the checkpoint's tensors that it is made of.

    stacks: projections of one layer with equal schemes share a weight. They must not where inputs
    are in an order that each projection has for itself.
    """

    format: WeightFormat
    stored: tuple[StoredTensor, ...]

    @property
    def stacks(self) -> bool:
        return not self.format.ordered
