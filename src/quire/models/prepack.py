"""Linear layers' weights in the order in which a CPU reads them fastest."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.layers.embedding import LMHead
from quire.layers.linear import Linear, Stack
from quire.models.decoder import DecoderLayers
from quire.ops.reference.prepacked import prepack

_FEWEST = 1 << 17
"""Weights of a layer from which on a faster product saves more than its longer call costs."""


@torch.inference_mode()
def prepack_weights(model: DecoderLayers) -> None:
    """Replaces the weights of a model on a CPU that computes in fp32, once they are loaded."""
    for layer in model.modules() if model.dtype is torch.float32 else ():
        if isinstance(layer, Linear):
            prepack_layer(layer)


def prepack_layer(layer: Linear) -> None:
    """Replaces the weights of a layer, and the parameters that hold their values."""
    layer.stacks = tuple(_prepack_stack(layer, index) for index in range(len(layer.stacks)))


def _prepack_stack(layer: Linear, index: int) -> Stack:
    """Returns a stack as it is read fastest. The layer's parameters follow."""
    stack = layer.stacks[index]
    weight = stack.weight
    values = weight.values
    if values.is_meta or weight.outputs * weight.inputs < _FEWEST:
        return stack
    found = prepack(weight)
    if found is None:
        if weight.scales is None and weight.outputs > weight.inputs and not layer.tied:
            # A row times columns that lie input by input is a sum of long vectors.
            layer.get_parameter(_values_name(index)).data = values = values.t().contiguous().t()
            weight = replace(weight, values=values)
    elif layer.tied or (isinstance(layer, LMHead) and weight.scales is None):
        # The embedding reads its rows; draft heads are compared with it, unless it is rounded.
        weight = replace(weight, prepacked=found)
    else:
        layer.register_parameter(_values_name(index), None)
        weight = replace(weight, values=values.to("meta"), prepacked=found)
    return replace(stack, weight=weight)


def _values_name(index: int) -> str:
    """Returns the name of the parameter that holds a stack's values, as `Linear` has it."""
    return f"values_{index}" if index else "values"
