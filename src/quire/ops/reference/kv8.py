"""8-bit keys and values as tensors: encodes and decodes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quire.ops.kv import LARGEST_VALUE, SMALLEST_TOP, KVFormat


class Store(Protocol):
    """Writes values of a step's tokens [T, Hkv, D] into a cache."""

    def store(self, values: Tensor, cache: Tensor) -> None: ...


def store(plan: Store, values: Tensor, cache: Tensor, scale: Tensor, kv_format: KVFormat) -> None:
    """Stores values [T, Hkv, D], and their scales if each token has its own."""
    stored, scales = quantize(values, kv_format, scale)
    plan.store(stored, cache.view(torch.int8))
    if kv_format.scales == "token":
        plan.store(scales.unsqueeze(-1), scale.unsqueeze(-1))


def load(
    name: str,
    cache: Tensor,
    scale: Tensor,
    kv_format: KVFormat,
    gather: Callable[[str, Tensor], Tensor],
    shape: tuple[int, ...],
) -> Tensor:
    """Returns stored values as float32 of `shape`.

    Args:
        gather: returns a bucket's rows of a cache. Its first argument names the memory to reuse.
    """
    stored = gather(name, cache.view(torch.int8)).view(shape)
    if scale.dim() == 1:
        scales = scale.unsqueeze(1).expand(shape[:-1])
    else:
        scales = gather(f"{name} scale", scale.unsqueeze(-1)).view(shape[:-1])
    return dequantize(stored, scales, kv_format, torch.float32)


def quantize(x: Tensor, kv_format: KVFormat, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the bytes of x [T, Hkv, D] as int8 of the same shape, and their scales, float32 [T,
    Hkv].

    Args:
        scale: [Hkv], the fixed scales, if the format has them.
    """
    x = x.float().clamp(-LARGEST_VALUE, LARGEST_VALUE)
    if scale is None or kv_format.scales == "token":
        scale = x.abs().amax(-1).clamp(min=SMALLEST_TOP) / kv_format.largest
    scale = scale.expand(x.shape[:-1])
    x = (x / scale.unsqueeze(-1)).clamp(-kv_format.largest, kv_format.largest)
    stored = x.round() + kv_format.offset if kv_format.offset else x
    return stored.to(kv_format.dtype).view(torch.int8), scale


def dequantize(stored: Tensor, scale: Tensor, kv_format: KVFormat, dtype: torch.dtype) -> Tensor:
    """Returns stored values, int8 [..., D], times their scales, float32 [...], in `dtype`."""
    values = stored.view(kv_format.dtype).float().sub_(kv_format.offset)
    return values.mul_(scale.unsqueeze(-1)).to(dtype)
