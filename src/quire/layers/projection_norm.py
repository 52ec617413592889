"""Attention whose queries and keys are normed across heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.norm import NormSpec, RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.sharding import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNormSpec(AttentionSpec):
    """Attention with an RMSNorm over all heads of q together, and one over those of k."""

    projection_norm: NormSpec

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return ProjectionNormAttention(self, hidden, rotary, build)


class ProjectionNorm(RMSNorm):
    """An RMSNorm over all heads of a projection, of which each rank holds some."""

    def __init__(self, width: int, head_dim: int, spec: NormSpec, build: Build) -> None:
        group = build.group
        self.range = ShardSpec(0, head_dim).bounds(width, group.rank, group.world)
        super().__init__(self.range[1] - self.range[0], spec, build)
        self.whole = width

    def slices(self) -> Iterator[ParameterSlice]:
        (part,) = super().slices()
        yield replace(part, shape=(self.whole,), ranges=(self.range,))


class ProjectionNormAttention(Attention):
    """Attention with one norm for all heads of q, and one for those of k."""

    def __init__(
        self, spec: ProjectionNormSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__(spec, hidden, rotary, build)
        dim, group = spec.head_dim, build.group
        self.group = group
        self.q_projection_norm = ProjectionNorm(
            spec.heads * dim, dim, spec.projection_norm, build.within("q_projection_norm")
        )
        self.k_projection_norm = ProjectionNorm(
            spec.kv_heads * dim, dim, spec.projection_norm, build.within("k_projection_norm")
        )

    def project(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Tensor:
        q, k, v = torch.split(super().project(x, norm, batch), self.qkv.sizes, dim=1)
        if self.group.world == 1:
            return torch.cat((self.q_projection_norm(q), self.k_projection_norm(k), v), dim=1)
        # A rank's heads give it a share of the mean. Where ranks hold copies of a head, all heads
        # have as many of them, and the mean over ranks remains that over heads.
        means = torch.stack([part.float().square().mean(1) for part in (q, k)], dim=1)
        means = self.group.all_reduce(means) / self.group.world
        scales = torch.rsqrt(means + self.q_projection_norm.eps)
        normed = [
            self._scaled(part, scale.unsqueeze(1), norm.weight)
            for part, scale, norm in zip(
                (q, k),
                scales.unbind(1),
                (self.q_projection_norm, self.k_projection_norm),
                strict=True,
            )
        ]
        return torch.cat((*normed, v), dim=1)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        # The normed q and k, and all three side by side.
        return super().workspace_bytes(tokens) + 2 * self.qkv.workspace_bytes(tokens)

    def _scaled(self, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """Returns x * scale * weight, rounded where `ops.rms_norm` rounds."""
        return ((x.float() * scale).to(weight.dtype) * weight).to(x.dtype)
