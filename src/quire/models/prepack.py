"""Reorders the weights of linear layers so that a CPU reads them faster."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.layers.embedding import LMHead
from quire.layers.linear import Linear, Stack
from quire.models.decoder import DecoderLayers
from quire.ops.reference.prepacked import prepack

_FEWEST = 1 << 17
"""Fewest weights of a layer for which the gain in speed outweighs the longer call."""


@torch.inference_mode()
def prepack_weights(model: DecoderLayers) -> None:
    """Reorders the loaded weights of a model that a CPU computes in fp32."""
    for layer in model.modules() if model.dtype is torch.float32 else ():
        if isinstance(layer, Linear):
            prepack_layer(layer)


def prepack_layer(layer: Linear) -> None:
    """Reorders the weights of a layer, and replaces the parameters that hold them."""
    layer.stacks = tuple(_prepack_stack(layer, index) for index in range(len(layer.stacks)))


@torch.inference_mode()
def unpack_layer(layer: Linear) -> None:
    """Gives a layer weights in the checkpoint's order again, without content. `prepack_layer`
    reorders them once they are written."""
    layer.stacks = tuple(_unpack_stack(layer, index) for index in range(len(layer.stacks)))


def _unpack_stack(layer: Linear, index: int) -> Stack:
    stack = layer.stacks[index]
    weight = stack.weight
    if weight.prepacked is None or not weight.values.is_meta:
        return stack
    values = torch.zeros(weight.values.shape, dtype=weight.values.dtype)
    parameter = torch.nn.Parameter(values, requires_grad=False)
    layer.register_parameter(_values_name(index), parameter)
    return replace(stack, weight=replace(weight, values=values, prepacked=None))


def _prepack_stack(layer: Linear, index: int) -> Stack:
    """Returns stack `index` with reordered weights, and replaces the layer's parameter."""
    stack = layer.stacks[index]
    weight = stack.weight
    values = weight.values
    if values.is_meta or weight.outputs * weight.inputs < _FEWEST:
        return stack
    found = prepack(weight)
    if found is None:
        if weight.scales is None and weight.outputs > weight.inputs and not layer.tied:
            # With the inputs outermost, a row times the weight is a sum of long vectors.
            layer.get_parameter(_values_name(index)).data = values = values.t().contiguous().t()
            weight = replace(weight, values=values)
    elif layer.tied or (isinstance(layer, LMHead) and weight.scales is None):
        # The original order is kept too: the embedding reads rows of a tied weight, and draft heads
        # compare an unquantized head with their own head.
        weight = replace(weight, prepacked=found)
    else:
        layer.register_parameter(_values_name(index), None)
        weight = replace(weight, values=values.to("meta"), prepacked=found)
    return replace(stack, weight=weight)


def _values_name(index: int) -> str:
    """Returns the name that `Linear` gives to the parameter with a stack's values."""
    return f"values_{index}" if index else "values"
