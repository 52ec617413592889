"""Tensors in memory, with the interface of an open safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.models.files import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor as `safe_open(...).get_slice` returns it."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class TensorFile:
    """Named tensors that the loader reads like a file.

    Args:
        tensors: the tensors, by their names in a checkpoint. Those on the device "meta" have only
            a shape and a dtype.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> TensorSlice:
        return TensorSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]
