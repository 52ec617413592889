"""The paged KV cache: one tensor per KV group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.plan import KVGroup

_COPY_BYTES = 64 << 20
"""Of blocks that are copied at once."""

LayerCache = tuple[Tensor, Tensor]
"""(k, v) of one layer: strided views [blocks, kv_heads, block_size, head_dim]."""


class KVCache:
    """A group's tensor is [blocks, layers, 2, kv_heads, block_size, head_dim].

    A block is contiguous over its group's layers, so that one copy moves it, and heads come before
    tokens, so that one slice takes a range of heads.

    Zeros at first, as attention may read what nobody wrote.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.tensors = [
            torch.zeros(
                (blocks, len(group.layers), 2, kv_heads, group.tokens_per_block, head_dim),
                dtype=dtype,
                device=device,
            )
            for group, blocks in zip(groups, num_blocks, strict=True)
        ]
        by_layer: dict[int, LayerCache] = {}
        for group, tensor in zip(groups, self.tensors, strict=True):
            for i, layer in enumerate(group.layers):
                by_layer[layer] = tensor[:, i, 0], tensor[:, i, 1]
        self.layers: list[LayerCache] = [by_layer[layer] for layer in sorted(by_layer)]

    def block_tensors(self, group: int) -> list[Tensor]:
        """All that holds a group's blocks; the first dimension of each is the block."""
        return [self.tensors[group]]

    def copy_blocks(self, group: int, src: Tensor, dst: Tensor) -> None:
        """Copies whole blocks `src[i]` to `dst[i]`, int64 [n], as `BlockCopies` says, a bounded
        number at a time."""
        tensor = self.tensors[group]
        most = max(1, _COPY_BYTES // (tensor[0].numel() * tensor.element_size()))
        for at in range(0, len(src), most):
            part = slice(at, at + most)
            tensor.index_copy_(0, dst[part], tensor.index_select(0, src[part]))
