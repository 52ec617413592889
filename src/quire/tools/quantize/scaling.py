"""Moves factors between tensors such that rounding loses less, without changing the model.

AWQ (Lin et al. 2023) protects the weights of large inputs. SmoothQuant (Xiao et al. 2023) makes
inputs easier to round. Both search for an exponent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.norm import LayerNorm, RMSNorm
from quire.models.decoder import Block
from quire.tools.quantize.calibration import InputStatistics
from quire.tools.quantize.recipe import Recipe
from quire.tools.quantize.rounding import find_scales, output_power, round_rows, round_to

_STEPS = 20
"""Number of exponents that are tried, evenly spaced from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A linear layer whose inputs can be divided by factors at no cost.

    Attributes:
        name: the layer's name in its block.
        layer: the layer.
        shared: changes a statistic [K] of inputs such that inputs that must have the same factor
            get the same value.
        divide: divides the parameters that produce the inputs by factors [K].
    """

    name: str
    layer: Linear
    shared: Callable[[Tensor], Tensor]
    divide: Callable[[Tensor], None]


def folds(block: Block) -> Iterator[Fold]:
    """Yields the layers of a block whose inputs can be divided.

    Their inputs come from a norm that no other layer uses, or from a projection with only a product
    in between."""
    attention, mlp = block.attention, block.mlp
    # Parts that compute in parallel use the same norm.
    apart = block.mlp_norm is not None
    if isinstance(mlp, Mlp):
        if mlp.act.endswith("_and_mul"):
            yield Fold("mlp.down", mlp.down, _same, functools.partial(_divide_rows, mlp.up, 1))
        if apart:
            yield Fold("mlp.up", mlp.up, _same, functools.partial(_divide_norm, block.mlp_norm))
    if isinstance(attention, Attention):
        yield _values_fold(attention)
        if apart and block.attention_norm is not None:
            norm = functools.partial(_divide_norm, block.attention_norm)
            yield Fold("attention.qkv", attention.qkv, _same, norm)


def _same(x: Tensor) -> Tensor:
    return x


def _values_fold(attention: Attention) -> Fold:
    """Returns the fold of the output projection into v. Several query heads share a head of v."""
    spec = attention.spec
    shape = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim

    def shared(x: Tensor) -> Tensor:
        return x.view(shape).amax(1, keepdim=True).expand(shape).flatten()

    def divide(factors: Tensor) -> None:
        _divide_rows(attention.qkv, 2, factors.view(shape)[:, 0].flatten())

    return Fold("attention.out", attention.out, shared, divide)


def _divide_norm(norm: RMSNorm, factors: Tensor) -> None:
    norm.weight.data.copy_(norm.weight.data.float() / factors)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        norm.bias.data.copy_(norm.bias.data.float() / factors)


def _divide_rows(layer: Linear, output: int, factors: Tensor) -> None:
    """Divides the outputs of one of a layer's projections."""
    start = sum(layer.sizes[:output])
    rows = slice(start, start + layer.sizes[output])
    values = layer.weight.values[rows]
    values.copy_(values.float() / factors.unsqueeze(1))
    if layer.bias is not None:
        layer.bias.data[rows] = (layer.bias.data[rows].float() / factors).to(layer.bias.dtype)


@torch.inference_mode()
def move_scales(
    block: Block, statistics: Mapping[str, InputStatistics], recipe: Recipe, dtype: torch.dtype
) -> None:
    """Divides inputs of the block's layers by the best factors, and multiplies weights by them.

    The statistics change accordingly.

    Args:
        dtype: dtype of the weights' scales.
    """
    for fold in folds(block):
        own = statistics[fold.name]
        factors = _best(fold, own, recipe, dtype)
        if factors is None:
            continue
        fold.divide(factors)
        values = fold.layer.weight.values
        values.copy_(values.float() * factors)
        own.scale(1 / factors)


def _best(
    fold: Fold, statistics: InputStatistics, recipe: Recipe, dtype: torch.dtype
) -> Tensor | None:
    """Returns the factors [K] with the least error, or None if no factors reduce the error."""
    weight = fold.layer.weight.values.float()
    smooth = recipe.inputs != "none"
    sizes = fold.shared(statistics.tops if smooth else statistics.means).clamp(min=1e-5)
    tops = fold.shared(weight.abs().amax(0)).clamp(min=1e-5)
    rows = statistics.rows if smooth else None

    def error(factors: Tensor) -> float:
        scaled = weight * factors
        rounded = round_to(scaled, find_scales(scaled, recipe.grid, dtype)).dequantized()
        if rows is None:
            return output_power(rounded / factors - weight, statistics.products)
        inputs = round_rows(rows / factors, recipe.grid)
        return (inputs @ rounded.t() - rows @ weight.t()).square().sum().item()

    least, best = error(torch.ones_like(sizes)), None
    for step in range(1, _STEPS):
        share = step / _STEPS
        factors = sizes**share
        if smooth:
            factors = factors / tops ** (1 - share)
        factors = factors / (factors.amax() * factors.amin()).sqrt()
        found = error(factors)
        if found < least:
            least, best = found, factors
    return best
