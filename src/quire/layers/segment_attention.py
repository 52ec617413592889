"""Self-attention in both directions within each row of a step. It keeps no keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from quire import ops
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.linear import Linear, Output
from quire.layers.norm import RMSNorm
from quire.layers.residual import Residual
from quire.layers.rotary import RopeSpec, RotaryTable
from quire.ops.images import rotate_heads, segment_attention
from quire.parallel.sharding import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAttentionSpec:
    """Multi-head attention of encoders, with scores divided by the root of `head_dim`.

    Attributes:
        heads: heads of the whole model.
        head_dim: numbers in each head's q, k and v.
        qkv_bias: whether the projections to q, k and v have biases.
        out_bias: whether the projection of the heads' output has a bias.
        reach: a token sees tokens at most this far away, on both sides; None for all.
        rope: rotation of q and k, or None.
    """

    heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    reach: int | None = None
    rope: RopeSpec | None = None

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> SegmentAttention:
        """Returns the layer, for hidden states of this width."""
        return SegmentAttention(self, hidden, rotary, build)


@dataclass(frozen=True, slots=True)
class NoKVLayout:
    """The layout of layers that keep nothing. A block has no bytes."""

    kind: Literal["full"] = "full"
    window: None = None

    def parts(
        self, block_size: int, kv_format: ops.KVFormat
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns no tensors."""
        return []

    def layer(self, parts: Sequence[Tensor], head_scales: Tensor | None) -> None:
        """Returns None, because the layer has no cache."""

    def schedule(self, batch: ForwardBatch, dtype: torch.dtype, kv_format: ops.KVFormat) -> None:
        """Returns None, because the op needs no schedule."""


class SegmentAttention(nn.Module):
    """See `SegmentAttentionSpec`. A rank computes its share of the heads."""

    def __init__(
        self, spec: SegmentAttentionSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        self.spec = spec
        # A list, because the model registers the table.
        self._rotary = [rotary]
        dim, group = spec.head_dim, build.group
        low, high = ShardSpec(0).bounds(spec.heads, group.rank, group.world, build.name)
        self.heads = high - low
        size = spec.heads * dim
        outputs = [Output(name, size, dim) for name in ("q", "k", "v")]
        self.qkv = Linear(hidden, outputs, build.within("qkv"), bias=spec.qkv_bias, split="outputs")
        self.out = Linear(
            size, hidden, build.within("out"), bias=spec.out_bias, split="inputs", unit=dim
        )
        self.layout = NoKVLayout()

    def forward(
        self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch, group: GroupBatch, kv: Any
    ) -> Residual:
        """Returns x + attention(norm(x)), [T, hidden]. Rows of the batch must be whole texts."""
        hidden, norm = x.layer_input(norm)
        qkv = self.qkv(hidden, norm=norm).view(len(hidden), 3, self.heads, self.spec.head_dim)
        if (rotary := self._rotary[0]) is not None:
            rotate_heads(qkv[:, :2], rotary.angles(batch))
        out = segment_attention(qkv, batch.query_start, batch.max_q_len, self.spec.reach)
        return self.out.add(out.reshape(len(hidden), -1), x)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        heads = 2 * tokens * self.heads * self.spec.head_dim * 4
        return heads + self.qkv.workspace_bytes(tokens) + self.out.workspace_bytes(tokens)
