"""Layouts of the KV or state that layers keep between steps, as data."""

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
    """The tensors in which one layer keeps KV or state on this rank.

    Layers with equal layouts form a KV group. For `kind` and `window` see `KVGroup`.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def window(self) -> int | None: ...

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns the shape and dtype of each tensor of one block."""
        ...

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> Any:
        """Returns the object through which a layer's ops read and write the cache.

        Args:
            parts: this layer's tensors, each [blocks, *shape].
            head_scales: see `KVCache`.
        """
        ...

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> Any:
        """Returns a step's work schedule, which all layers of the group share."""
        ...

    def most_skew(
        self, seq_lens: Tensor, dtype: torch.dtype, kv_format: ops.KVFormat
    ) -> float | None:
        """Returns the skew up to which the schedule of decodes is `even`, see `ops.most_skew`."""
        ...


def block_bytes(layout: MixerLayout, block_size: int, kv_format: ops.KVFormat) -> int:
    """Returns the bytes of one block of one layer."""
    parts = layout.parts(block_size, kv_format)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
