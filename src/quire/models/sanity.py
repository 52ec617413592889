"""Checks of loaded quantized weights, so that a damaged checkpoint is never served."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.expert_weights import ExpertLinear
from quire.layers.linear import Linear
from quire.layers.parameter_slice import LoadableModel
from quire.models.families.family import Family
from quire.ops import Weight
from quire.ops.reference.quantized import dequantize

_ROWS, _EXPERT_ROWS = 64, 8
"""Number of outputs to sample from each projection, and from each projection of an expert."""
_EXPERTS = 128
"""Number of experts' projections to check at once."""
_LARGEST = 1e4
"""Upper limit for the root mean square of an output's weights, and for a static input scale."""
_OFF_CENTRE = 0.25
"""Upper limit for |mean| / root mean square of the weights, in the median of outputs. Trained
weights stay below 0.15, even with 64 inputs. 4-bit weights with zeros off by one reach 0.3."""
_FEWEST = 64
"""Fewest inputs for which that ratio is meaningful."""


@dataclass(frozen=True, slots=True)
class SampledOutputs:
    """A sample of outputs from projections that share a weight.

    Attributes:
        names: names of the projections.
        weight: the sample, with equally many outputs of each projection.
        may_be_zero: whether a projection may be zero throughout.
    """

    names: list[str]
    weight: Weight
    may_be_zero: bool


@torch.inference_mode()
def check_weights(
    model: LoadableModel, family: Family, modules: Collection[str] | None = None
) -> None:
    """Checks a sample of outputs from each quantized projection, including those of experts.

    Args:
        modules: names of the modules to check; None: all.

    Raises:
        ModelError: dequantized weights are not finite, huge, all zero or off centre, or a static
            input scale is huge. The error names the projection as the checkpoint does.
    """
    for name, layer in model.named_modules():
        if modules is not None and name not in modules:
            continue
        if isinstance(layer, Linear):
            samples = _sample_linear(name, layer)
        elif isinstance(layer, ExpertLinear):
            samples = _sample_experts(name, layer)
        else:
            continue
        for sample in samples:
            found = _find_problem(sample)
            if found is not None:
                place, problem = found
                stored = family.source(model.spec, f"{sample.names[place]}.weight").name
                raise ModelError(
                    f"{stored.removesuffix('.weight')} {problem}: the checkpoint is damaged, or "
                    "not quantized as its settings say"
                )


def _sample_linear(name: str, layer: Linear) -> Iterator[SampledOutputs]:
    for stack in layer.stacks:
        row = 0
        for index in range(stack.first, stack.end):
            output, size = layer.outputs[index].name, layer.sizes[index]
            if _is_quantized(stack.weight) and size:
                rows = _spread_rows(row, size, _ROWS)
                own = f"{name}.{output}" if output else name
                yield SampledOutputs([own], _select_rows(stack.weight, rows), may_be_zero=False)
            row += size


def _sample_experts(name: str, layer: ExpertLinear) -> Iterator[SampledOutputs]:
    if not _is_quantized(layer.weight) or not layer.size:
        return
    first = layer.shard.experts[0]
    projections = [(first + expert, own) for expert in range(layer.count) for own in layer.names]
    for start in range(0, len(projections), _EXPERTS):
        some = projections[start : start + _EXPERTS]
        rows = [
            _spread_rows((start + i) * layer.size, layer.size, _EXPERT_ROWS)
            for i in range(len(some))
        ]
        names = [_expert_name(name, layer, *each) for each in some]
        # An expert that was never chosen in training may have zero weights.
        yield SampledOutputs(names, _select_rows(layer.weight, torch.cat(rows)), may_be_zero=True)


def _expert_name(name: str, layer: ExpertLinear, expert: int, projection: str) -> str:
    if layer.layout == "interleaved":
        return name
    parts = (name, str(expert) if layer.layout == "each" else "", projection)
    return ".".join(filter(None, parts))


def _is_quantized(weight: Weight) -> bool:
    return weight.scales is not None and not weight.values.is_meta


def _spread_rows(first: int, size: int, count: int) -> Tensor:
    """Returns up to `count` evenly spaced indices in [first, first + size)."""
    return torch.linspace(first, first + size - 1, min(count, size)).long()


def _select_rows(weight: Weight, rows: Tensor) -> Weight:
    """Returns a copy of the given rows of a weight."""
    rows = rows.to(weight.values.device)

    def taken(tensor: Tensor) -> Tensor:
        # Not every device indexes 8-bit floats.
        whole = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        return whole[rows].view(tensor.dtype)

    scales, zeros = weight.scales, weight.zeros
    return replace(
        weight,
        values=taken(weight.values),
        scales=None if scales is None else taken(scales),
        zeros=None if zeros is None else taken(zeros),
    )


def _find_problem(sample: SampledOutputs) -> tuple[int, str] | None:
    """Returns the index in `sample.names` of a broken projection and the reason, or None."""
    weight = sample.weight
    weights = dequantize(weight, torch.float32).view(len(sample.names), -1, weight.inputs)
    power = weights.square().mean(2).sqrt()
    off = (weights.mean(2).abs() / power.clamp(min=1e-30)).median(1).values
    fixed = torch.zeros_like(off) if weight.input_scale is None else weight.input_scale.max()
    # One transfer for all figures, because each waits for the device.
    figures = torch.stack([power.amax(1), off, fixed.expand_as(off)]).tolist()
    for place, (largest, median, scale) in enumerate(zip(*figures, strict=True)):
        if not math.isfinite(largest):
            return place, "has weights that are not finite"
        if largest > _LARGEST:
            return place, f"has outputs whose weights are as large as {largest:.3g}"
        if largest == 0 and not sample.may_be_zero:
            return place, "is zero throughout"
        if weight.inputs >= _FEWEST and median > _OFF_CENTRE:
            return place, (
                f"has weights whose mean is {median:.2f} of their size, where it should be near 0"
            )
        if scale > _LARGEST:
            return place, f"has a static input scale of {scale:.3g}"
    return None
