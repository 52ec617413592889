"""Weights in the dtype that the model computes in."""

from __future__ import annotations

import torch

from quire.ops import WeightFormat
from quire.quantization.scheme import Scheme
from quire.quantization.stored_tensor import FLOATS, StoredTensor


class Unquantized:
    """Stores weights as they are."""

    own_head = False

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        return Scheme(WeightFormat(dtype), (StoredTensor("weight", "values", FLOATS),))
