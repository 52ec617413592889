"""Weight formats of linear layers, and how checkpoints store them."""

from quire.quantization.checkpoint_tensor import FLOATS, CheckpointTensor, ProjectionShare, Range
from quire.quantization.quantization import Quantization, Scheme, Unquantized
from quire.quantization.rounding import rounding_of

__all__ = [
    "FLOATS",
    "CheckpointTensor",
    "ProjectionShare",
    "Quantization",
    "Range",
    "Scheme",
    "Unquantized",
    "quantization_of",
]


def quantization_of(name: str | None) -> Quantization:
    """Returns the quantization of an unquantized checkpoint.

    Args:
        name: `EngineArgs.quantization`; None leaves weights as they are.
    """
    if name is None:
        return Unquantized()
    return rounding_of(name)
