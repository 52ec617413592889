"""The interface of a weight format, and weights that are not quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.ops import WeightFormat
from quire.quantization.checkpoint_tensor import FLOATS, CheckpointTensor


@dataclass(frozen=True, slots=True)
class Scheme:
    """A weight's format and the checkpoint's tensors that it is made of.

    stacks: projections of one layer with equal schemes share a weight. They must not where inputs
    are in an order that each projection has for itself.
    """

    format: WeightFormat
    stored: tuple[CheckpointTensor, ...]

    @property
    def stacks(self) -> bool:
        return not self.format.ordered


# The interface of a quantization. Linear layers are built, sharded, stacked and loaded from it.


class Quantization(Protocol):
    """Decides how linear layers store weights, and knows how a checkpoint does.

    own_head: whether the head has weights of its own where the model ties it to the embeddings.
    """

    own_head: bool

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        """Returns the scheme of a projection, such as `layers.0.mlp.up.gate` or `head`, of a model
        that computes in `dtype`.

        Raises:
            ModelError: the checkpoint stores it in a way that is not known.
        """
        ...


# Weights in the dtype that the model computes in.


class Unquantized:
    """Stores weights as they are."""

    own_head = False

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(WeightFormat(dtype), (CheckpointTensor("weight", "values", FLOATS),))
