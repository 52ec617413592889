"""8-bit keys and values, as tensors: to bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.kv import LARGEST_VALUE, SMALLEST_TOP, KVFormat


def quantize(x: Tensor, form: KVFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, Hkv, D] -> its bytes as int8 of the same shape, and their scales, float32 [T, Hkv].
    scale: [Hkv], the fixed ones where the format has such."""
    x = x.float().clamp(-LARGEST_VALUE, LARGEST_VALUE)
    if scale is None or form.scales == "token":
        scale = x.abs().amax(-1).clamp(min=SMALLEST_TOP) / form.largest
    scale = scale.expand(x.shape[:-1])
    x = (x / scale.unsqueeze(-1)).clamp(-form.largest, form.largest)
    stored = x.round() + form.offset if form.offset else x
    return stored.to(form.dtype).view(torch.int8), scale


def dequantize(stored: Tensor, scale: Tensor, form: KVFormat, dtype: torch.dtype) -> Tensor:
    """The bytes, as int8 [..., D], and float32 scales of all but their last dimension -> dtype."""
    values = stored.view(form.dtype).float().sub_(form.offset)
    return values.mul_(scale.unsqueeze(-1)).to(dtype)
