"""Rounds weights to a grid, and makes the tensors of compressed-tensors' layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.tools.quantize.recipe import Grid, Recipe

_WORD = 32


def stored_tensors(rounded: Rounded, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors that a checkpoint stores for a projection, by the last part of their
    names.

    Args:
        dtype: dtype of the scales.
    """
    scales, grid = rounded.scales.scales, recipe.grid
    if grid.outputs > 1:
        scales = scales[:: grid.outputs]
    found = {"weight_scale": scales.to(dtype).contiguous()}
    if recipe.format != "pack-quantized":
        found["weight"] = rounded.values
        return found
    found["weight_packed"] = pack(rounded.values, grid.stored_bits)
    found["weight_shape"] = torch.tensor(rounded.values.shape)
    zeros = rounded.scales.zeros
    if zeros is not None:
        found["weight_zero_point"] = (
            pack(zeros.to(torch.int8).t(), grid.stored_bits).t().contiguous()
        )
    return found


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs signed integers into 32-bit words.

    The first value of a word is in its lowest bits. The last word is padded with zero bits.

    Args:
        values: int8 [N, K]. The smallest value of `bits` bits is stored as 0.

    Returns:
        int32 [N, K * bits / 32], rounded up.
    """
    each = _WORD // bits
    wide = values.to(torch.int64) + 2 ** (bits - 1)
    wide = torch.nn.functional.pad(wide, (0, -wide.shape[1] % each)).view(len(wide), -1, each)
    places = torch.arange(each, device=values.device) * bits
    words = (wide << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


# -- rounding to a grid ------------------------------------------------------------------------

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
"""The largest number of e4m3."""
_SMALLEST = 2.0**-14
"""The smallest scale, because float16 loses precision below it."""
_RATIOS = [1 - 0.05 * step for step in range(11)]
"""The fractions of a group's range that a search for its scale tries."""
_FLOAT_RATIOS = [1 + step / 16 for step in range(16)]
"""The fractions for floats. Twice the range has equally fine steps at other places. A smaller range
would clip weights."""
_AT_ONCE = 1 << 26
"""Number of weights that a search processes at once."""


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of weights [N, K]. A weight is (value - zero) * scale.

    Integer values begin at -2 ** (bits - 1).

    Attributes:
        grid: the grid.
        scales: float32 [N, groups].
        zeros: float32 [N, groups], or None if the grid is symmetric.
    """

    grid: Grid
    scales: Tensor
    zeros: Tensor | None

    def column(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Returns the scales and zeros [N] of a group."""
        zeros = None if self.zeros is None else self.zeros[:, group]
        return self.scales[:, group], zeros


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rounded weights.

    Attributes:
        values: int8 or e4m3 [N, K].
        scales: the scales of the values.
    """

    values: Tensor
    scales: Scales

    def dequantized(self) -> Tensor:
        """Returns the weights as float32 [N, K]."""
        scales = self.scales
        values = grouped(self.values.float(), scales.grid)
        if scales.zeros is not None:
            values = values - scales.zeros.unsqueeze(2)
        return (values * scales.scales.unsqueeze(2)).flatten(1)[:, : self.values.shape[1]]


def grouped(x: Tensor, grid: Grid) -> Tensor:
    """Returns x [N, K] as [N, groups, size]. Zeros fill the last group."""
    size = grid.group or x.shape[1]
    return F.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)


def limits(grid: Grid) -> tuple[int, int]:
    """Returns the smallest and the largest integer."""
    return -(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1


def find_scales(
    weight: Tensor, grid: Grid, dtype: torch.dtype, products: Tensor | None = None
) -> Scales:
    """Returns scales for weights float32 [N, K]. They are exact in `dtype`.

    With `products`, each group's range is multiplied by the ratio that changes the layer's outputs
    least, as in AWQ (Lin et al. 2023). The change is estimated from the group's block of products.
    Without `products`, and if outputs share a scale, the whole range is used.

    Args:
        products: float32 [K, K], the sums of products of inputs, or None.
    """
    parts = grouped(weight, grid)
    low, high = parts.amin(2), parts.amax(2)
    if products is None or grid.outputs > 1:
        return _between(low, high, grid, dtype)
    own = _blocks(products, grid)
    best = torch.full_like(low, torch.inf)
    share = torch.ones_like(low)
    rows = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        for ratio in _FLOAT_RATIOS if grid.float else _RATIOS:
            tried = _between(low[part] * ratio, high[part] * ratio, grid, dtype)
            off = grouped(round_to(weight[part], tried).dequantized(), grid) - parts[part]
            error = (torch.einsum("ngi,gij->ngj", off, own) * off).sum(2)
            better = error < best[part]
            best[part] = torch.where(better, error, best[part])
            share[part] = torch.where(better, ratio, share[part])
    return _between(low * share, high * share, grid, dtype)


def _blocks(products: Tensor, grid: Grid) -> Tensor:
    """Returns the products [groups, size, size] of inputs in the same group."""
    size = grid.group or len(products)
    behind = -len(products) % size
    padded = F.pad(products, (0, behind, 0, behind))
    return torch.stack(
        [
            padded[start : start + size, start : start + size]
            for start in range(0, len(padded), size)
        ]
    )


def _between(low: Tensor, high: Tensor, grid: Grid, dtype: torch.dtype) -> Scales:
    """Returns scales with which the grid covers `low` to `high`, [N, groups], and 0."""
    if grid.float:
        return Scales(grid, _stored(_tops(low, high, grid.outputs) / _LARGEST, dtype), None)
    least, top = limits(grid)
    if grid.symmetric:
        wide = 2 * torch.maximum(low.abs(), high.abs()) / (top - least)
        return Scales(grid, _stored(wide, dtype), None)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = _stored((high - low) / (top - least), dtype)
    zeros = (least - low / scales).round().clamp(least, top)
    return Scales(grid, scales, zeros)


def _tops(low: Tensor, high: Tensor, outputs: int) -> Tensor:
    """Returns the largest magnitudes [N, groups]. Each is over `outputs` outputs together."""
    tops = torch.maximum(low.abs(), high.abs())
    rows = F.pad(tops, (0, 0, 0, -len(tops) % outputs)).view(-1, outputs, tops.shape[1])
    return rows.amax(1).repeat_interleave(outputs, 0)[: len(tops)]


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.clamp(min=_SMALLEST).to(dtype).float()


def round_to(weight: Tensor, scales: Scales) -> Rounded:
    """Returns weights float32 [N, K] rounded to the nearest numbers of the grid."""
    parts = grouped(weight, scales.grid) / scales.scales.unsqueeze(2)
    if scales.zeros is not None:
        parts = parts + scales.zeros.unsqueeze(2)
    values = nearest(parts, scales.grid)
    return Rounded(values.flatten(1)[:, : weight.shape[1]].contiguous(), scales)


def nearest(x: Tensor, grid: Grid) -> Tensor:
    """Returns the grid's number nearest to each of x, in the grid's dtype."""
    if grid.float:
        return x.clamp(-_LARGEST, _LARGEST).to(_FP8)
    return x.round().clamp(*limits(grid)).to(torch.int8)


def round_rows(x: Tensor, grid: Grid) -> Tensor:
    """Returns inputs float32 [T, K] rounded to the grid's dtype, with a scale for each token."""
    tops = x.abs().amax(1, keepdim=True).clamp(min=1e-12)
    if grid.float:
        scales = tops / _LARGEST
        return (x / scales).to(_FP8).float() * scales
    scales = tops / limits(grid)[1]
    return (x / scales).round() * scales


def relative_error(weight: Tensor, rounded: Tensor, products: Tensor) -> float:
    """Returns the norm of the change of a layer's outputs, divided by the norm of the outputs.

    Args:
        weight: float32 [N, K].
        rounded: float32 [N, K].
        products: [K, K], the sums of products of inputs.
    """
    changed = output_power(rounded - weight, products)
    return math.sqrt(changed / max(output_power(weight, products), 1e-30))


def output_power(weight: Tensor, products: Tensor) -> float:
    """Returns the sum of squares of the outputs of weights [N, K]."""
    total = ((weight @ products) * weight).sum()
    return max(0.0, float(total))
