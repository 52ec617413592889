"""8-bit keys and values, as tensors: to bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.kv import LARGEST_VALUE, SMALLEST_TOP, KVFormat


def quantize(x: Tensor, kv_format: KVFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, Hkv, D] -> its bytes as int8 of the same shape, and their scales, float32 [T, Hkv].
    scale: [Hkv], the fixed ones where the format has such."""
    x = x.float().clamp(-LARGEST_VALUE, LARGEST_VALUE)
    if scale is None or kv_format.scales == "token":
        scale = x.abs().amax(-1).clamp(min=SMALLEST_TOP) / kv_format.largest
    scale = scale.expand(x.shape[:-1])
    x = (x / scale.unsqueeze(-1)).clamp(-kv_format.largest, kv_format.largest)
    stored = x.round() + kv_format.offset if kv_format.offset else x
    return stored.to(kv_format.dtype).view(torch.int8), scale


def dequantize(stored: Tensor, scale: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """The bytes, as int8 [..., D], and float32 scales of all but their last dimension -> dtype."""
    values = stored.view(kv_format.dtype).float().sub_(kv_format.offset)
    return values.mul_(scale.unsqueeze(-1)).to(dtype)
