"""Weight formats of linear layers, and the checkpoints' tensors that become them."""

from quire.errors import ConfigError
from quire.quantization.int8 import Int8
from quire.quantization.quantization import Quantization
from quire.quantization.stored_tensor import FLOATS, Range, StoredTensor
from quire.quantization.unquantized import Unquantized

__all__ = [
    "FLOATS",
    "Int8",
    "Quantization",
    "Range",
    "StoredTensor",
    "Unquantized",
    "quantization_of",
]

_BY_NAME: dict[str | None, type[Quantization]] = {None: Unquantized, "int8": Int8}


def quantization_of(name: str | None) -> Quantization:
    """Returns the quantization that `EngineArgs.quantization` names."""
    kind = _BY_NAME.get(name)
    if kind is None:
        known = ", ".join(key for key in _BY_NAME if key is not None)
        raise ConfigError(f"unknown quantization {name!r}; known are: {known}", "quantization")
    return kind()
