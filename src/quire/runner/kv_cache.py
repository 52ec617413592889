"""The KV cache: tensors per KV group that hold what layers keep on the device."""

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
"""Most bytes of blocks that are copied at once."""


class KVCache:
    """A group's tensors are [blocks, layers, *shape], for each part of its layout. Values of
    attention are [blocks, layers, 2, kv_heads, block_size, head_dim], the scales of its tokens,
    float32, the same without the last dimension.

    A block is contiguous over its group's layers, so that one copy moves it, and heads come before
    tokens, so that one slice takes a range of heads.

    Zeros at first, as attention may read what nobody wrote.

    layouts: by group. head_scales: by layer float32 [2, kv_heads], where heads have fixed ones.
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
        """All that holds a group's blocks; the first dimension of each is the block."""
        return self._tensors[group]

    def copy_blocks(self, group: int, src: Tensor, dst: Tensor) -> None:
        """Copies whole blocks `src[i]` to `dst[i]`, int64 [n], as `BlockCopies` says, a bounded
        number at a time."""
        for tensor in self._tensors[group]:
            # As integers, wide ones where that can be: not every type can be indexed.
            raw = tensor.flatten(1).view(torch.uint8)
            if raw.shape[1] % 8 == 0:
                raw = raw.view(torch.int64)
            ops.copy_blocks(raw, src, dst, max(1, _COPY_BYTES // raw[0].nbytes))


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros. On a CPU a page of them takes memory, and time, once it is first used."""
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
