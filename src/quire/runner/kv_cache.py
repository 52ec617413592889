"""The paged KV cache: a tensor of values per KV group, and one of scales where tokens have such."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from quire import ops
from quire.errors import ConfigError
from quire.layers.attention import KVLayout
from quire.ops import KVFormat, KVLayer
from quire.plan import KVGroup

_COPY_BYTES = 64 << 20
"""Most bytes of blocks that are copied at once."""


class KVCache:
    """A group's values are [blocks, layers, 2, kv_heads, block_size, head_dim], the scales of its
    tokens, float32, the same without the last dimension.

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
        layouts: Sequence[KVLayout],
        kv_format: KVFormat,
        device: torch.device,
        head_scales: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self._tensors: list[list[Tensor]] = []
        by_layer: dict[int, KVLayer] = {}
        for group, blocks, layout in zip(groups, num_blocks, layouts, strict=True):
            shape = blocks, len(group.layers), 2, layout.kv_heads, group.tokens_per_block
            values = _zeros((*shape, layout.head_dim), kv_format.dtype, device)
            self._tensors.append([values])
            scales = None
            if kv_format.scales == "token":
                scales = _zeros(shape, torch.float32, device)
                self._tensors[-1].append(scales)
            for i, layer in enumerate(group.layers):
                own: tuple[Tensor | None, Tensor | None] = (None, None)
                if scales is not None:
                    own = scales[:, i, 0], scales[:, i, 1]
                elif head_scales is not None:
                    own = head_scales[layer][0], head_scales[layer][1]
                by_layer[layer] = KVLayer(values[:, i, 0], values[:, i, 1], *own)
        self.layers: list[KVLayer] = [by_layer[layer] for layer in sorted(by_layer)]

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
