"""GPTQ (Frantar et al. 2022): rounds the weights of one input after the other.

The weights of later inputs are changed to make up for the rounding of earlier ones."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.tools.quantize.rounding import Rounded, Scales, nearest

_DAMPING = 0.01
"""This fraction of the mean of all inputs' squares is added to each input's. It limits the changes
between inputs that are nearly equal."""
_BLOCK = 128
"""Number of inputs after which changes are applied to all later inputs."""


def gptq(weight: Tensor, scales: Scales, products: Tensor) -> Rounded:
    """Returns weights rounded with the given scales, such that the outputs change little.

    Inputs are rounded in the order of their mean squares, largest first ("act order"). Groups keep
    their places, so readers of the checkpoint need not know the order.

    Args:
        weight: float32 [N, K].
        products: float32 [K, K], the sums of products of inputs.

    Raises:
        ModelError: the inputs are not finite.
    """
    count = weight.shape[1]
    power = products.diagonal()
    order = torch.argsort(power, descending=True, stable=True)
    silent = (power == 0)[order]
    weight = weight[:, order].clone()
    weight[:, silent] = 0
    factor = _factor(products[order][:, order], silent)
    group = scales.grid.group or count
    places = torch.div(order, group, rounding_mode="floor").tolist()
    values = torch.empty_like(weight)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        block, lost = weight[:, start:end], torch.empty_like(weight[:, start:end])
        inner = factor[start:end, start:end]
        for index in range(end - start):
            column = block[:, index]
            scale, zero = scales.column(places[start + index])
            steps = column / scale
            if zero is not None:
                steps = steps + zero
            value = nearest(steps, scales.grid).float()
            values[:, start + index] = value
            back = (value if zero is None else value - zero) * scale
            error = (column - back) / inner[index, index]
            block[:, index:] -= torch.outer(error, inner[index, index:])
            lost[:, index] = error
        weight[:, end:] -= lost @ factor[start:end, end:]
    return Rounded(nearest(values[:, torch.argsort(order)], scales.grid), scales)


def _factor(products: Tensor, silent: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped products."""
    products = products.clone()
    diagonal = products.diagonal()
    diagonal[silent] = 1
    mean = diagonal.mean().item()
    damping = _DAMPING
    while damping <= 1:
        diagonal += damping * mean
        lower, failed = torch.linalg.cholesky_ex(products)
        if not failed.item():
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed.item():
                return upper
        damping *= 10
    raise ModelError("the inputs of a layer are not finite, or too large to be quantized")
