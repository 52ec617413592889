"""Layouts of what layers keep of the tokens that they have seen, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from quire import ops
from quire.layers.batch import ForwardBatch

Kind = Literal["full", "window", "state"]


class MixerLayout(Protocol):
    """Describes what one layer keeps on this rank. Layers of equal layouts are a KV group.

    kind, window: see `KVGroup`.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def window(self) -> int | None: ...

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and the dtype of each tensor that one block is made of."""
        ...

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> Any:
        """Returns what a layer's ops read and write. parts: [blocks, *shape] of this layer. See
        `KVCache` for `head_scales`."""
        ...

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> Any:
        """Returns how a step's work is shared out, the same for all layers of the group."""
        ...


def block_bytes(layout: MixerLayout, block_size: int, kv_format: ops.KVFormat) -> int:
    """Returns the bytes of one layer's block."""
    parts = layout.parts(block_size, kv_format)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
