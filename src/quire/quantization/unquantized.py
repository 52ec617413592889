"""Weights in the dtype that the model computes in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops import Weight, WeightFormat
from quire.quantization.stored_tensor import FLOATS, StoredTensor


class Unquantized:
    """Stores weights as they are."""

    def format_for(self, name: str, dtype: torch.dtype) -> WeightFormat:
        return WeightFormat(dtype)

    def stored(self, format: WeightFormat) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", "values", FLOATS),)

    def finish(self, name: str, weight: Weight) -> None:
        """Nothing is left to do."""
