"""Weight formats of linear layers, and the checkpoints' tensors that become them."""

from quire.quantization.quantization import Quantization, Scheme, Unquantized
from quire.quantization.stored_tensor import FLOATS, ProjectionShare, Range, StoredTensor

__all__ = [
    "FLOATS",
    "ProjectionShare",
    "Quantization",
    "Range",
    "Scheme",
    "StoredTensor",
    "Unquantized",
    "quantization_of",
]


def quantization_of(name: str | None) -> Quantization:
    """Returns the quantization that `EngineArgs.quantization` names, of an unquantized
    checkpoint."""
    if name is None:
        return Unquantized()
    # Imported here: a model that is served as it is needs no rounding.
    from quire.quantization.rounding import rounding_of

    return rounding_of(name)
