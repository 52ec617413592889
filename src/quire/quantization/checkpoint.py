"""Quantized checkpoints: the supported methods of storing weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from quire.errors import ModelError
from quire.ops import WeightFormat
from quire.quantization.awq import Awq
from quire.quantization.compressed_tensors import CompressedTensors
from quire.quantization.fields import Settings, Tensors
from quire.quantization.fp8 import Fp8
from quire.quantization.gguf import Gguf
from quire.quantization.gptq import Gptq
from quire.quantization.mxfp4 import Mxfp4
from quire.quantization.quantization import Scheme, Unquantized


class Method(Protocol):
    """A quantization method with a checkpoint's settings."""

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        """Returns the scheme of a module, or None if it is not quantized.

        Args:
            module: its name in the checkpoint.
            tensors: tensors of the checkpoint.
            head: whether the module is the model's head.
        """
        ...


METHODS: dict[str, Callable[[Settings], Method]] = {
    "awq": Awq.from_settings,
    "compressed-tensors": CompressedTensors.from_settings,
    "fp8": Fp8.from_settings,
    "gguf": Gguf.from_settings,
    "gptq": Gptq.from_settings,
    "mxfp4": Mxfp4.from_settings,
    "modelopt": Fp8.from_modelopt,
}
"""The constructors of methods, by `quant_method` in the settings."""


def method_of(settings: Settings) -> Method:
    """Returns the method of a checkpoint's settings.

    Raises:
        ModelError: the method or one of its settings is not supported.
    """
    name = str(settings.get("quant_method") or "an unnamed method")
    if name not in METHODS:
        raise ModelError(
            f"the checkpoint is quantized by {name}, which is not one of the supported methods: "
            + ", ".join(METHODS)
        )
    return METHODS[name](settings)


class Checkpoint(Unquantized):
    """The checkpoint's own quantization.

    Args:
        method: method of the checkpoint.
        module_of: returns a module's name in the checkpoint, given a projection's name.
        tensors: tensors of the checkpoint.
    """

    def __init__(self, method: Method, module_of: Callable[[str], str], tensors: Tensors) -> None:
        self._method = method
        self._module_of = module_of
        self._tensors = tensors

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        module = self._module_of(projection)
        scheme = self._method.scheme(module, self._tensors, head=projection == "head")
        if scheme is None:
            return super().scheme_for(projection, dtype)
        if scheme.format.scales is None:
            # Weights without scales are floats of the model's dtype.
            return replace(scheme, format=WeightFormat(dtype))
        return scheme
