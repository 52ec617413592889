"""The interface of a quantization. Linear layers are built, sharded, stacked and loaded from it."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.quantization.scheme import Scheme


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
