"""The interface of a quantization, which gives each projection its weight format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.ops import WeightFormat
from quire.quantization.checkpoint_tensor import FLOATS, CheckpointTensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight's format, and the checkpoint's tensors from which the weight is made.

    Attributes:
        format: format of the weight.
        stored: the checkpoint's tensors.
        stacks: whether projections of one layer with equal schemes may share a weight. They may not
            if each projection has its own order of inputs (act order).
    """

    format: WeightFormat
    stored: tuple[CheckpointTensor, ...]

    @property
    def stacks(self) -> bool:
        return not self.format.ordered


class Quantization(Protocol):
    """Chooses the weight format of each projection of a model.

    Attributes:
        own_head: whether the head has its own weights even if the model ties it to the embeddings.
    """

    own_head: bool

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        """Returns the scheme of a projection.

        Args:
            projection: its name, such as `layers.0.mlp.up.gate` or `head`.
            dtype: the model's dtype.

        Raises:
            ModelError: the checkpoint's format of the projection is not supported.
        """
        ...


class Unquantized:
    """Stores weights as floats in the model's dtype."""

    own_head = False

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(WeightFormat(dtype), (CheckpointTensor("weight", "values", FLOATS),))
