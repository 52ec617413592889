"""The KV cache: the tensors of each KV group on the device."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire.errors import ConfigError
from quire.layers.layout import MixerLayout
from quire.ops import KVFormat
from quire.plan import KVGroup

_COPY_BYTES = 64 << 20
"""Most bytes of blocks to copy at once."""


class KVCache:
    """The tensors that hold the KV of all groups.

    A group has a tensor [blocks, layers, *shape] for each part of its layout. Keys and values of
    attention are [blocks, layers, 2, kv_heads, block_size, head_dim]. Scales of tokens have the
    same shape without the last dimension, in float32.

    A block is contiguous over its group's layers, so that one copy moves it. Heads come before
    tokens, so that one slice takes a range of heads. The tensors are zeros at first, because
    attention may read places that were never written.

    Args:
        layouts: the layout of each group.
        head_scales: scales of each layer's heads, float32 [2, kv_heads], or None.

    Attributes:
        layers: the KV of each layer.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        *,
        layouts: Sequence[MixerLayout],
        kv_format: KVFormat,
        device: torch.device,
        head_scales: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self._tensors: list[list[Tensor]] = []
        by_layer: dict[int, Any] = {}
        for group, blocks, layout in zip(groups, num_blocks, layouts, strict=True):
            parts = layout.parts(group.tokens_per_block, kv_format) if group.layers else []
            shape = blocks, len(group.layers)
            tensors = [_zeros((*shape, *part), dtype, device) for part, dtype in parts]
            self._tensors.append(tensors)
            for i, layer in enumerate(group.layers):
                own = None if head_scales is None else head_scales[layer]
                by_layer[layer] = layout.layer([tensor[:, i] for tensor in tensors], own)
        self.layers: list[Any] = [by_layer[layer] for layer in sorted(by_layer)]

    def block_tensors(self, group: int) -> list[Tensor]:
        """Returns the tensors of a group, [blocks, ...] each."""
        return self._tensors[group]

    def copy_blocks(self, group: int, src: Tensor, dst: Tensor) -> None:
        """Copies whole blocks `src[i]` to `dst[i]`, int64 [n]; see `BlockCopies`.

        It copies a bounded number of blocks at a time, to bound the memory for the copies.
        """
        for tensor in self._tensors[group]:
            # Blocks are copied as integers, because not every dtype can be indexed. Wide integers
            # are faster.
            raw = tensor.flatten(1).view(torch.uint8)
            if raw.shape[1] % 8 == 0:
                raw = raw.view(torch.int64)
            ops.copy_blocks(raw, src, dst, max(1, _COPY_BYTES // raw[0].nbytes))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU a page takes memory, and time, only when it is first used."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"could not get {size / 1e9:.1f} GB of memory for the KV cache", "kv_cache_gb"
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(*shape)
