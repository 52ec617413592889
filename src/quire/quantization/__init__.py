"""Weight formats of linear layers, and the checkpoints' tensors that become them."""

from quire.errors import ConfigError
from quire.quantization.quantization import Quantization
from quire.quantization.stored_tensor import FLOATS, Range, StoredTensor
from quire.quantization.unquantized import Unquantized

__all__ = [
    "FLOATS",
    "Quantization",
    "Range",
    "StoredTensor",
    "Unquantized",
    "quantization_of",
]


def quantization_of(name: str | None) -> Quantization:
    """Returns the quantization that `EngineArgs.quantization` names."""
    if name is None:
        return Unquantized()
    if name != "int8":
        raise ConfigError(f"unknown quantization {name!r}; known are: int8", "quantization")
    # Each quantization is imported when it is used.
    from quire.quantization.int8 import Int8

    return Int8()
