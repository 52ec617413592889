"""The interface of a quantization. Linear layers are built, sharded, stacked and loaded from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.ops import Weight, WeightFormat
from quire.quantization.stored_tensor import StoredTensor


class Quantization(Protocol):
    """Decides how linear layers store weights, and knows how a checkpoint does."""

    def format_for(self, name: str, dtype: torch.dtype) -> WeightFormat:
        """Returns the format of the layer `name`, such as `layers.0.mlp.up` or `head`, of a model
        that computes in `dtype`."""
        ...

    def stored(self, format: WeightFormat) -> Sequence[StoredTensor]:
        """Returns the checkpoint's tensors that a weight of `format` is made of."""
        ...

    def finish(self, name: str, weight: Weight) -> None:
        """Ends the loading of the layer `name`.

        Raises:
            ModelError: the loaded weights make no sense.
        """
        ...
