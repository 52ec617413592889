"""Checkpoints of compressed-tensors, the format of llm-compressor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.ops import Weight, WeightFormat
from quire.ops.weight import Inputs
from quire.quantization import fields
from quire.quantization.checkpoint_tensor import FLOATS, FP8, CheckpointTensor, ProjectionShare
from quire.quantization.fields import Settings, Tensors, is_fp8_cache, unsupported
from quire.quantization.packed import INT32, GroupIndex, PackedValues, PackedZeros, WeightShape
from quire.quantization.quantization import Scheme

_FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_INTEGERS = frozenset({torch.int8})
BYTES = frozenset({torch.uint8})


@dataclass(frozen=True, slots=True)
class _Group:
    """One of `config_groups`.

    Attributes:
        targets: modules or classes of modules.
        layout: `format` of the weights.
        weights: settings of the weights' quantization.
        inputs: how the layer's inputs are rounded.
    """

    targets: tuple[str, ...]
    layout: str
    weights: Settings
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The settings of a compressed-tensors checkpoint.

    Attributes:
        groups: each has the modules that are quantized alike.
        ignore: names or patterns of modules that are not quantized.
    """

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Settings) -> CompressedTensors:
        layout = fields.one_of(settings, "format", _FORMATS)
        fields.one_of(settings, "quantization_status", ("compressed", "frozen"), "compressed")
        for name in ("sparsity_config", "transform_config"):
            value = settings.get(name) or {}
            if (
                not isinstance(value, Mapping)
                or value.get("format", "dense") != "dense"
                or (name == "transform_config" and value.get("config_groups"))
            ):
                raise unsupported(f"{name} {value!r}")
        cache = settings.get("kv_cache_scheme")
        if cache is not None and not is_fp8_cache(cache):
            raise unsupported(f"kv_cache_scheme {cache!r}; only floats of 8 bits are supported")
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise unsupported(f"config_groups must name groups, got {groups!r}")
        made = tuple(_group(name, group, layout) for name, group in groups.items())
        return cls(made, fields.names(settings, "ignore"))

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        if any(
            _matches(name, pattern) for name in fields.aliases(module) for pattern in self.ignore
        ):
            return None
        for group in self.groups:
            if any(_matches(module, target) for target in group.targets):
                return _scheme(group, module, tensors)
        # A group for the class "Linear" applies only if no group names the module.
        for group in self.groups:
            if "Linear" in group.targets:
                return _scheme(group, module, tensors)
        return None


def _matches(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return module == target
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise unsupported(f"{target!r} is not a regular expression: {error}") from error


def _group(name: str, group: Any, layout: str) -> _Group:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise unsupported(f"group {name!r} has no weights")
    if group.get("output_activations") is not None:
        raise unsupported(f"group {name!r} quantizes the outputs of layers")
    weights = group["weights"]
    if layout == "mixed-precision" or group.get("format") is not None:
        layout = fields.one_of(group, "format", _FORMATS[:-1])
    if weights.get("dynamic"):
        raise unsupported(f"group {name!r} has dynamic weights")
    kind = fields.one_of(weights, "type", ("int", "float"), "int")
    fields.one_of(weights, "num_bits", (4, 8))
    known = {
        "pack-quantized": ("int",), "int-quantized": ("int",), "float-quantized": ("float",),
        "naive-quantized": ("int", "float"), "mxfp4-pack-quantized": ("float",),
    }  # fmt: skip
    if kind not in known[layout]:
        raise unsupported(f"group {name!r}: weights of type {kind} in the format {layout}")
    inputs = _inputs(name, group.get("input_activations"), weights, layout)
    made = _Group(fields.names(group, "targets"), layout, weights, inputs)
    _scheme(made, "", {})
    return made


def _inputs(name: str, settings: Any, weights: Settings, layout: str) -> Inputs:
    if settings is None:
        return "none"
    if not isinstance(settings, Mapping):
        raise unsupported(f"group {name!r}: input_activations must be an object, got {settings!r}")
    what = f"group {name!r}: activations"
    for key in ("type", "num_bits"):
        own = settings.get(key, {"type": "int", "num_bits": 8}[key])
        if own != weights.get(key, {"type": "int", "num_bits": 8}[key]):
            raise unsupported(f"{what} with {key} {own!r}, which differs from the weights'")
    if layout in ("pack-quantized", "mxfp4-pack-quantized"):
        raise unsupported(f"{what} quantized in the format {layout}")
    if not fields.flag(settings, "symmetric", True):
        raise unsupported(f"{what} with zero points")
    strategy = settings.get("strategy")
    if strategy is None:
        strategy = "tensor" if settings.get("group_size") is None else "group"
    dynamic = fields.one_of(settings, "dynamic", (True, False), False)
    if strategy == "tensor":
        # A dynamic scale per tensor would make results depend on the batch. A scale per token is
        # more exact.
        return "token" if dynamic else "tensor"
    if strategy == "token" and dynamic:
        return "token"
    sizes = (weights.get("group_size"), *(weights.get("block_structure") or ())[1:])
    if strategy == "group" and dynamic and settings.get("group_size") in sizes:
        return "group"
    raise unsupported(f"{what} by {strategy}, {'dynamic' if dynamic else 'static'}")


def _scheme(group: _Group, module: str, tensors: Tensors) -> Scheme:
    weights = group.weights
    if group.layout == "mxfp4-pack-quantized":
        return _mxfp4(weights)
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if weights.get("group_size") is None else "group"
    packed = group.layout == "pack-quantized"
    known = ("channel", "group") if packed else ("tensor", "channel", "group", "block")
    fields.one_of({"strategy": strategy}, "strategy", known)
    outputs_per, inputs_per = _scale_block(strategy, weights)
    bits = fields.integer(weights, "num_bits")
    if bits == 4 and not packed:
        raise unsupported(f"weights of 4 bits in the format {group.layout}")
    symmetric = fields.flag(weights, "symmetric", True)
    floats = weights.get("type", "int") == "float"
    if not symmetric and (floats or strategy not in ("channel", "group")):
        raise unsupported(f"asymmetric weights of type {weights.get('type')} by {strategy}")
    order = fields.one_of(
        weights, "actorder", (None, False, True, "weight", "static", "group", "dynamic")
    )
    ordered = order in (True, "group", "dynamic") and strategy == "group"
    if ordered and not packed:
        raise unsupported(f"actorder in the format {group.layout}")
    scales = fields.scale_dtype(tensors, f"{module}.weight_scale")
    format = WeightFormat(
        torch.uint8 if bits == 4 else torch.float8_e4m3fn if floats else torch.int8,
        bits=4 if bits == 4 else 0,
        scales=scales if packed else torch.float32,
        group=inputs_per or 0,
        zeros=not symmetric,
        ordered=ordered,
        inputs=group.inputs,
    )
    own: list[CheckpointTensor]
    if packed:
        own = [
            PackedValues("weight_packed", "values", INT32, bits=bits),
            WeightShape("weight_shape", "values", frozenset({torch.int64, torch.int32})),
        ]
        zeros: CheckpointTensor = PackedZeros(
            "weight_zero_point", "zeros", INT32, inputs_per=inputs_per, every_group=ordered,
            bits=bits, outputs_first=True,
        )  # fmt: skip
    else:
        own = [CheckpointTensor("weight", "values", FP8 if floats else _INTEGERS)]
        zeros = CheckpointTensor("weight_zero_point", "zeros", _INTEGERS, 1, inputs_per)
    own.append(
        CheckpointTensor(
            "weight_scale", "scales", FLOATS, outputs_per, inputs_per, every_group=ordered
        )
    )
    if not symmetric:
        own.append(zeros)
    if ordered or f"{module}.weight_g_idx" in tensors:
        own.append(GroupIndex("weight_g_idx", "groups", INT32, inputs_per=inputs_per))
    if group.inputs == "tensor":
        own.append(CheckpointTensor("input_scale", "input_scale", FLOATS, None, None))
    return Scheme(format, tuple(own))


def _scale_block(strategy: str, weights: Settings) -> tuple[int | None, int | None]:
    """Returns how many outputs and how many inputs share a scale; None stands for all."""
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, fields.group_size(weights) or None
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2:
        raise unsupported(f"block_structure must be two sizes, got {block!r}")
    return fields.integer({"rows": block[0]}, "rows"), fields.integer(
        {"columns": block[1]}, "columns"
    )


@dataclass(frozen=True, slots=True)
class Exponents(CheckpointTensor):
    """Scales that are powers of two, stored as their exponents + 127."""

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        CheckpointTensor.write(self, weight, part.view(torch.float8_e8m0fnu), start, share)


def _mxfp4(weights: Settings) -> Scheme:
    fields.one_of(weights, "num_bits", (4,))
    fields.one_of(weights, "strategy", ("group",), "group")
    fields.one_of(weights, "group_size", (32,), 32)
    fields.one_of(weights, "symmetric", (True,), True)
    format = WeightFormat(torch.uint8, bits=4, scales=torch.float8_e8m0fnu, group=32, code="e2m1")
    return Scheme(
        format,
        (
            Nibbles("weight_packed", "values", BYTES),
            Exponents("weight_scale", "scales", BYTES, 1, 32),
        ),
    )


@dataclass(frozen=True, slots=True)
class Nibbles(CheckpointTensor):
    """4-bit values, two in a byte, with the even input in the low half. Weights use the same
    order."""

    inputs_per: int | None = 2
