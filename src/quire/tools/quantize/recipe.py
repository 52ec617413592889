"""Recipes: how a model is quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from quire.errors import ConfigError

Method = Literal["gptq", "awq", "smoothquant", "fp8", "int8", "rtn"]
Inputs = Literal["none", "token", "group", "tensor"]

METHODS: tuple[Method, ...] = ("gptq", "awq", "smoothquant", "fp8", "int8", "rtn")
_INTEGERS = ("gptq", "awq", "rtn")
"""Methods that round to integers of a chosen number of bits, with a scale for each group."""
GROUPS = (128, 64, 32, 16)
"""Default group sizes. The first one that divides the inputs of all layers is used."""
_SEQUENTIAL = ("gptq", "awq", "smoothquant")
"""Methods whose later blocks can make up for the errors of earlier ones."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers to which weights are rounded.

    Attributes:
        bits: bits of one number.
        float: whether numbers are 8-bit floats (e4m3) instead of integers.
        group: number of inputs that share a scale; 0 stands for all.
        outputs: number of outputs that share a scale.
        symmetric: whether integers have no zero points.
    """

    bits: int
    float: bool = False
    group: int = 0
    outputs: int = 1
    symmetric: bool = True

    @property
    def stored_bits(self) -> int:
        """Bits in which one number is stored, at least 4."""
        return max(4, self.bits)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The choices for quantizing a model.

    Attributes:
        method: the method that rounds the weights.
        grid: the numbers to which weights are rounded.
        inputs: how the inputs of layers are rounded: not at all, with a scale for each token, for
            each token and group, or with one fixed scale.
        own_group: whether the user gave no group size, so that `fit` chooses it.
    """

    method: Method
    grid: Grid
    inputs: Inputs = "none"
    own_group: bool = False

    @classmethod
    def with_defaults(
        cls,
        method: str,
        *,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool | None = None,
        weight_only: bool = False,
    ) -> Recipe:
        """Returns the recipe of a method. Arguments that are None get the method's defaults.

        Raises:
            ConfigError: the method does not support an argument.
        """
        for name in METHODS:
            if name == method:
                break
        else:
            raise ConfigError(f"method {method!r}; expected one of: {', '.join(METHODS)}", "method")
        if name in _INTEGERS:
            if weight_only:
                raise ConfigError(f"{name} always quantizes weights only", "weight_only")
            grid = _integers(name, bits, group_size, symmetric)
            return cls(name, grid, own_group=group_size is None)
        if bits not in (None, 8):
            raise ConfigError(f"{name} has 8 bits, not {bits}", "bits")
        if symmetric is False:
            raise ConfigError(f"{name} is symmetric", "symmetric")
        if name == "fp8":
            block = _block(group_size)
            inputs: Inputs = "group" if block else "token"
            grid = Grid(8, float=True, group=block, outputs=block or 1)
            return cls(name, grid, "none" if weight_only else inputs)
        if group_size is not None:
            raise ConfigError(f"{name} has a scale for each output, and no groups", "group_size")
        if weight_only and name == "smoothquant":
            raise ConfigError(
                "smoothquant rounds inputs, too; use int8 for weights only", "weight_only"
            )
        return cls(name, Grid(8), "none" if weight_only else "token")

    @property
    def sequential(self) -> bool:
        """Whether blocks are calibrated with the outputs of the rounded blocks before them."""
        return self.method in _SEQUENTIAL

    @property
    def samples(self) -> int:
        """The default number of calibration sequences.

        The search for 8-bit scales gains hardly anything from more than 32.
        """
        return 128 if self.sequential else 32

    def fit(self, inputs: Mapping[str, int]) -> Recipe:
        """Returns the recipe with a group size that divides the inputs of all layers.

        Args:
            inputs: the number of inputs of each module to quantize.

        Raises:
            ConfigError: the user's group size does not divide the inputs.
        """
        group = self.grid.group
        misfit = next((name for name, size in inputs.items() if group and size % group), None)
        if misfit is None:
            return self
        common = math.gcd(*inputs.values())
        fits = [size for size in GROUPS if common % size == 0]
        if self.own_group:
            return replace(self, grid=replace(self.grid, group=fits[0] if fits else 0))
        sizes = f"{' or '.join(map(str, fits))} divides" if fits else "-1 fits"
        raise ConfigError(
            f"{misfit} has {inputs[misfit]} inputs: --group-size {sizes} "
            f"{'all layers' if fits else 'any layer (a scale for each output)'}; {group} does not",
            "group_size",
        )

    @property
    def format(self) -> str:
        """The name of the layout in compressed-tensors."""
        if self.grid.float:
            return "float-quantized"
        return "pack-quantized" if self.inputs == "none" else "int-quantized"

    def settings(self, ignore: list[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json.

        Args:
            ignore: modules that are not rounded.
        """
        grid = self.grid
        kind = "float" if grid.float else "int"
        common: dict[str, Any] = {"num_bits": grid.stored_bits, "type": kind}
        strategy = "block" if grid.outputs > 1 else "group" if grid.group else "channel"
        weights = {
            **common,
            "symmetric": grid.symmetric,
            "strategy": strategy,
            "group_size": grid.group if strategy == "group" else None,
            "dynamic": False,
        }
        if strategy == "block":
            weights["block_structure"] = [grid.outputs, grid.group]
        if self.method == "gptq" and strategy == "group":
            weights["actorder"] = "weight"
        inputs = None
        if self.inputs != "none":
            inputs = {
                **common,
                "symmetric": True,
                "strategy": self.inputs,
                "group_size": grid.group if self.inputs == "group" else None,
                "dynamic": self.inputs != "tensor",
            }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }
        # Unless it dequantizes at load, transformers (with compressed-tensors 0.20) expects packed
        # zeros in the shape of unpacked ones, and refuses its own checkpoints too.
        zeros = {} if grid.symmetric else {"dequantize": True}
        return {
            "quant_method": "compressed-tensors",
            **zeros,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the recipe as a JSON object."""
        return {"method": self.method, "grid": asdict(self.grid), "inputs": self.inputs}


def _integers(
    method: Method, bits: int | None, group_size: int | None, symmetric: bool | None
) -> Grid:
    bits = 4 if bits is None else bits
    if bits not in (4, 8):
        raise ConfigError(f"bits must be 4 or 8, got {bits}", "bits")
    size = GROUPS[0] if group_size is None else group_size
    if size != -1 and (size < 16 or size % 16):
        raise ConfigError(f"group_size must be -1 or a multiple of 16, got {size}", "group_size")
    own = method != "awq" if symmetric is None else symmetric
    return Grid(bits, group=max(size, 0), symmetric=own)


def _block(size: int | None) -> int:
    if size in (None, -1):
        return 0
    if size is None or size < 16 or size % 16:
        raise ConfigError(
            f"group_size of fp8 is the side of its blocks and must be a multiple of 16, got {size}",
            "group_size",
        )
    return size
