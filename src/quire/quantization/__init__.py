"""Weight formats: how a linear layer stores its weights, and how it multiplies by them."""

from quire.quantization.method import LinearMethod, Stored
from quire.quantization.unquantized import Unquantized

__all__ = ["LinearMethod", "Stored", "Unquantized"]
