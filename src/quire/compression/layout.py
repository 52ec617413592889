"""The tensors of compressed-tensors' layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compression.recipe import Recipe
from quire.compression.rounding import Rounded

_WORD = 32


def stored_tensors(rounded: Rounded, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns what a checkpoint holds of a projection, by the name behind the projection's. dtype:
    of the scales."""
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
    """Returns signed integers int8 [N, K] as int32 [N, K * bits / 32], offset so that the least
    becomes 0, the first in the lowest bits; zeros behind the last."""
    each = _WORD // bits
    wide = values.to(torch.int64) + 2 ** (bits - 1)
    wide = torch.nn.functional.pad(wide, (0, -wide.shape[1] % each)).view(len(wide), -1, each)
    places = torch.arange(each, device=values.device) * bits
    words = (wide << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
