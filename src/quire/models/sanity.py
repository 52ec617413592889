"""A look at quantized weights once they are loaded, so that garbage is never served."""

from __future__ import annotations

import torch
from torch import nn

from quire.errors import ModelError
from quire.layers.linear import Linear
from quire.ops import Weight
from quire.ops.reference.quantized import dequantize

_PLACES, _ROWS = 4, 16
"""Places of a weight that are looked at, and the outputs of each."""
_LARGEST = 1e4
"""The largest root mean square of the weights of an output that is believed."""
_OFF_CENTRE = 0.25
"""The largest share of that root mean square that the mean of the weights may be, in the median of
outputs. Trained weights have less than 0.15, also those of 64 inputs; 4 bits with zeros that are
wrong by one have 0.3."""
_FEWEST = 64
"""Inputs from which on that share tells something."""


@torch.inference_mode()
def check_weights(model: nn.Module) -> None:
    """Looks at a sample of each quantized weight.

    Raises:
        ModelError: dequantized, it is not finite, zero throughout, huge, or off centre; the error
            names the layer.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or layer.weights[0].values.is_meta:
            continue
        for stack in layer.stacks:
            weight = stack.weight
            problem = None if weight.scales is None or not weight.outputs else _problem(weight)
            if problem is not None:
                outputs = [output.name for output in layer.outputs[stack.first : stack.end]]
                raise ModelError(
                    f"{name} ({', '.join(outputs)}) {problem}: the checkpoint is damaged, or not "
                    "quantized as its settings say"
                )


def _problem(weight: Weight) -> str | None:
    step = max(_ROWS, weight.outputs // _PLACES)
    parts = [
        dequantize(weight.rows(row, min(row + _ROWS, weight.outputs)), torch.float32)
        for row in range(0, weight.outputs, step)
    ]
    rows = torch.cat(parts)
    power = rows.square().mean(1).sqrt()
    off = (rows.mean(1).abs() / power.clamp(min=1e-30)).median()
    # One wait for the device.
    largest, median = torch.stack([power.max(), off]).tolist()
    if not largest <= _LARGEST:
        return f"has outputs whose weights are as large as {largest:.3g}"
    if largest == 0:
        return "is zero throughout"
    if weight.inputs >= _FEWEST and median > _OFF_CENTRE:
        return f"has weights whose mean is {median:.2f} of their size, where it should be near 0"
    return None
