"""Reads typed settings from a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelError


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a GGUF file.

    Attributes:
        fields: all settings, by name.
        kind: the architecture. It is the prefix of the architecture's settings.
        tensors: names of the file's tensors.
        floats: returns the values of a small tensor by its name.
    """

    fields: Mapping[str, Any]
    kind: str
    tensors: Collection[str]
    floats: Callable[[str], list[float]]

    def get(self, name: str) -> Any:
        """Returns a setting of the architecture, or None if the file does not have it."""
        return self.fields.get(f"{self.kind}.{name}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer above 0. If the file has a list with a value for each layer, all its
        values must be equal.

        Raises:
            ModelError: the value is invalid, or missing without a default.
        """
        value = self.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        value = default if value is None else value
        if value is not None and (type(value) is not int or value < 1):
            raise ModelError(
                f"the file's {self.kind}.{name} must be an integer above 0, got {str(value)[:40]}"
            )
        return int(self._required(name, value))

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number above 0. Raises ModelError as `integer` does."""
        value = self.get(name)
        value = self._required(name, default if value is None else value)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelError(
                f"the file's {self.kind}.{name} must be a number above 0, got {str(value)[:40]}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if type(value) is not bool:
            raise ModelError(f"the file's {self.kind}.{name} must be true or false, got {value!r}")
        return value

    def _required(self, name: str, value: Any) -> Any:
        if value is None:
            raise ModelError(f"the file has no {self.kind}.{name}")
        return value

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Returns whether a layer has a tensor, such as "attn_q.bias"."""
        return f"blk.{layer}.{tensor}" in self.tensors
