"""One block of a model: its weights rounded as the recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compression.gptq import gptq
from quire.compression.layout import stored_tensors
from quire.compression.original import OriginalModel
from quire.compression.recipe import Recipe
from quire.compression.rounding import Rounded, find_scales, relative_error, round_to
from quire.compression.scaling import move_scales
from quire.compression.statistics import InputStatistics
from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.parameter_slice import named_slices
from quire.models.decoder import Block


@dataclass(frozen=True, slots=True)
class RoundedBlock:
    """tensors: the block's, by the checkpoint's canonical names. errors: by module, the relative
    change of its outputs. plain: modules left as they are."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]
    plain: list[str]


@torch.inference_mode()
def round_block(
    source: OriginalModel,
    block: Block,
    index: int,
    recipe: Recipe,
    statistics: Mapping[str, InputStatistics],
    ignore: frozenset[str],
) -> RoundedBlock:
    """Rounds the block's weights, in float32. ignore: modules to leave as they are.

    The block itself keeps its weights, but for factors that the recipe moves. Statistics change
    along with those.
    """
    stored = source.spec.dtype
    if recipe.method in ("awq", "smoothquant"):
        move_scales(block, statistics, recipe, stored)
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    plain: list[str] = []
    quantized: set[str] = set()
    for module, name, layer, rows in source.projections(block, index):
        if module in ignore:
            plain.append(module)
            continue
        own = statistics[name]
        if not own.products.isfinite().all():
            raise ModelError(f"the inputs of {module} are not finite")
        weight = layer.weight.values[rows].float()
        rounded = _rounded(weight, own, recipe, stored)
        errors[module] = relative_error(weight, rounded.dequantized(), own.products)
        for behind, tensor in stored_tensors(rounded, recipe, stored).items():
            tensors[f"{module}.{behind}"] = tensor.cpu()
        if recipe.inputs == "tensor":
            tensors[f"{module}.input_scale"] = (own.tops.max() / 127).reshape(1).cpu()
        quantized.add(f"{module}.weight")
    for key, tensor in _others(source, block, index).items():
        if key not in quantized:
            tensors[key] = tensor.to(stored).cpu().contiguous()
    return RoundedBlock(tensors, errors, plain)


def _rounded(
    weight: Tensor, statistics: InputStatistics, recipe: Recipe, dtype: torch.dtype
) -> Rounded:
    grid = recipe.grid
    if recipe.method == "gptq":
        scales = find_scales(weight, grid, dtype, statistics.products)
        return gptq(weight, scales, statistics.products)
    searched = recipe.method in ("awq", "fp8")
    return round_to(
        weight, find_scales(weight, grid, dtype, statistics.products if searched else None)
    )


def _others(source: OriginalModel, block: Block, index: int) -> dict[str, Tensor]:
    """Returns the block's floats by canonical name, as the block has them now."""
    found: dict[str, Tensor] = {}
    for prefix, module in block.named_modules():
        within = f"layers.{index}.{prefix}" if prefix else f"layers.{index}"
        if isinstance(module, Linear):
            start = 0
            for output, size in zip(module.outputs, module.sizes, strict=True):
                name = f"{within}.{output.name}" if output.name else within
                rows = slice(start, start + size)
                found[source.place(f"{name}.weight").name] = module.weight.values[rows]
                if module.bias is not None:
                    found[source.place(f"{name}.bias").name] = module.bias.data[rows]
                start += size
    for name, _ in named_slices(block):
        place = source.place(f"layers.{index}.{name}").name
        if place not in found:
            found[place] = _value(block, name)
    return found


def _value(block: Block, name: str) -> Tensor:
    """Returns a parameter that is stored under its own name, as it is stored."""
    parameter = dict(block.named_parameters()).get(name)
    if parameter is None:
        raise ModelError(f"{name} of a layer cannot be written back")
    owner = block.get_submodule(name.rpartition(".")[0])
    added = owner.offset if isinstance(owner, RMSNorm) and name.endswith(".weight") else 0.0
    return parameter.data.float() - added
