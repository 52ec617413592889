"""The storage of a projection's weights, in the checkpoint and in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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

    def computed_in(self, dtype: torch.dtype) -> Scheme:
        """Returns the scheme in a model of this dtype, which weights without scales have."""
        return self if self.format.scales is not None else replace(self, format=WeightFormat(dtype))
