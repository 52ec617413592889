"""FP8 checkpoints with a scale per tensor, output or block, as from DeepSeek-V3, Qwen3-FP8, AutoFP8
and NVIDIA's ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from quire.ops import WeightFormat
from quire.ops.weight import Inputs
from quire.quantization import fields
from quire.quantization.checkpoint_tensor import FLOATS, FP8, CheckpointTensor
from quire.quantization.fields import Settings, Tensors, unsupported
from quire.quantization.quantization import Scheme


@dataclass(frozen=True, slots=True)
class Fp8:
    """The settings of an FP8 checkpoint.

    Attributes:
        block: (outputs, inputs) that share a scale, or None.
        inputs: how the layer's inputs are rounded.
        exceptions: modules that are not quantized, by name, dotted part of a name, or shell
            pattern.
    """

    block: tuple[int, int] | None
    inputs: Inputs
    exceptions: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Settings) -> Fp8:
        """Returns the method of `quant_method` "fp8"."""
        fields.one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme = fields.one_of(settings, "activation_scheme", ("dynamic", "static"), "dynamic")
        block = settings.get("weight_block_size")
        inputs: Inputs = "tensor" if scheme == "static" else "token"
        if block is not None:
            sizes = block if isinstance(block, list) else []
            if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
                raise unsupported(f"weight_block_size must be two sizes, got {block!r}")
            if scheme == "static":
                raise unsupported("block-scaled weights with static activation scales")
            block, inputs = (sizes[0], sizes[1]), "group"
        exceptions = (
            *fields.names(settings, "modules_to_not_convert"),
            *fields.names(settings, "ignored_layers"),
        )
        return cls(block, inputs, exceptions)

    @classmethod
    def from_modelopt(cls, settings: Settings) -> Fp8:
        """Returns the method of `quant_method` "modelopt", or of a hf_quant_config.json."""
        nested = settings.get("quantization")
        settings = nested if isinstance(nested, Mapping) else settings
        fields.one_of(settings, "quant_algo", ("FP8",))
        fields.one_of(settings, "kv_cache_quant_algo", (None, "FP8"))
        exceptions = (*fields.names(settings, "exclude_modules"), *fields.names(settings, "ignore"))
        return cls(None, "tensor", exceptions)

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        if head or any(_matches(name, self.exceptions) for name in fields.aliases(module)):
            return None
        values = CheckpointTensor("weight", "values", FP8)
        group = 0 if self.block is None else self.block[1]
        format = WeightFormat(
            torch.float8_e4m3fn, scales=torch.float32, group=group, inputs=self.inputs
        )
        if self.block is not None:
            blocks = CheckpointTensor("weight_scale_inv", "scales", FLOATS, *self.block)
            return Scheme(format, (values, blocks))
        name = _first(module, ("weight_scale", "weight_scale_inv"), tensors)
        info = tensors.get(f"{module}.{name}")
        per_output = info is not None and info.shape not in ((), (1,), (1, 1))
        stored = [values, CheckpointTensor(name, "scales", FLOATS, 1 if per_output else None, None)]
        if self.inputs == "tensor":
            name = _first(module, ("input_scale", "activation_scale"), tensors)
            stored.append(CheckpointTensor(name, "input_scale", FLOATS, None, None))
        return Scheme(format, tuple(stored))


def _first(module: str, names: tuple[str, ...], tensors: Tensors) -> str:
    """Returns the first of `names` that the checkpoint has for the module, by default names[0]."""
    return next((name for name in names if f"{module}.{name}" in tensors), names[0])


def _matches(module: str, exceptions: tuple[str, ...]) -> bool:
    return any(
        fnmatchcase(module, name) or f".{name}." in f".{module}." for name in exceptions if name
    )
