"""Attention with one more step. Each variant is a spec and the layer that the spec builds.

    x -- norm, qkv --> q, k, v -- rope, KV store, attention --> heads -- out --> + x
                          |                                       |
                          |                                       +- GatedAttention: * sigmoid(gate)
                          +- ProjectionNormAttention: RMSNorm over all heads of q, and of k
                          +- QueryScaleAttention: q * a function of its position
                          +- ValueNormAttention: RMSNorm over each head of v

Steps on q, k and v extend `Attention.project`. The gate extends `Attention.forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.linear import Output
from quire.layers.norm import NormSpec, RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.ops.gated_delta import sigmoid_gate
from quire.parallel.sharding import ShardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttentionSpec(AttentionSpec):
    """Attention whose output is multiplied by the sigmoid of a projection (Qwen3-Next)."""

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        return GatedAttention(self, hidden, rotary, build)


class GatedAttention(Attention):
    """out(heads * sigmoid(gate)): the gate is as wide as the output of all heads."""

    def outputs(self, spec: AttentionSpec) -> list[Output]:
        size = spec.heads * spec.head_dim
        return [*super().outputs(spec), Output("gate", size, spec.head_dim)]

    def forward(
        self,
        x: Residual,
        norm: RMSNorm | None,
        batch: ForwardBatch,
        group: GroupBatch,
        kv: Any,
    ) -> Residual:
        projected: Tensor = self.project(x, norm, batch)
        gate = projected[:, -self.qkv.sizes[3] :]
        out = self.attend(projected[:, : sum(self.qkv.sizes[:3])], batch, group, kv)
        return self.out.add(sigmoid_gate(out, gate), x)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNormSpec(AttentionSpec):
    """Attention with one RMSNorm over all heads of q together, and one over all heads of k (OLMo 2,
    MiniMax-M2)."""

    projection_norm: NormSpec

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return ProjectionNormAttention(self, hidden, rotary, build)


class ProjectionNorm(RMSNorm):
    """The weights of an RMSNorm over all heads of a projection. Each rank holds its heads' part."""

    def __init__(self, width: int, head_dim: int, spec: NormSpec, build: Build) -> None:
        group = build.group
        self.range = ShardSpec(0, head_dim).bounds(width, group.rank, group.world)
        super().__init__(self.range[1] - self.range[0], spec, build)
        self.whole = width

    def slices(self) -> Iterator[ParameterSlice]:
        (part,) = super().slices()
        yield replace(part, shape=(self.whole,), ranges=(self.range,))


class ProjectionNormAttention(Attention):
    """Attention of a `ProjectionNormSpec`. Ranks add up their mean squares, because the norm spans
    the heads of all ranks."""

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
        # The mean over ranks is the mean over heads, because every rank has equally many heads.
        # Copies of KV heads do not change it: every head has the same number of copies.
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
        # The normed q and k, and the concatenation of q, k and v.
        return super().workspace_bytes(tokens) + 2 * self.qkv.workspace_bytes(tokens)

    def _scaled(self, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """Returns x * scale * weight, and rounds in the same places as `ops.rms_norm`."""
        return ((x.float() * scale).to(weight.dtype) * weight).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaleSpec(AttentionSpec):
    """Attention whose queries grow with their position (Llama 4). This keeps scores sharp over long
    contexts.

    Attributes:
        beta: the query at position p is multiplied by 1 + beta * log(1 + floor(p / step)).
        step: see `beta`, in tokens.
    """

    beta: float
    step: int

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return QueryScaleAttention(self, hidden, rotary, build)


class QueryScaleAttention(Attention):
    """Attention of a `QueryScaleSpec`. Queries are scaled before their rotation, which gives the
    same result because a rotation is linear."""

    def __init__(
        self, spec: QueryScaleSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__(spec, hidden, rotary, build)
        self.beta, self.step = spec.beta, spec.step

    def project(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Tensor:
        qkv = super().project(x, norm, batch)
        steps = torch.div(batch.positions, self.step, rounding_mode="floor")
        scale = 1 + self.beta * torch.log1p(steps.float())
        qkv[:, : self.qkv.sizes[0]] *= scale.to(qkv.dtype).unsqueeze(1)
        return qkv


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNormSpec(AttentionSpec):
    """Attention with an RMSNorm without weights over each head's values (Gemma 4).

    Attributes:
        value_eps: epsilon of that norm.
        keys_as_values: there is no projection for values. A head's values are its keys before their
            norm and rotation.
    """

    value_eps: float
    keys_as_values: bool = False

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return ValueNormAttention(self, hidden, rotary, build)


class ValueNormAttention(Attention):
    """Attention of a `ValueNormSpec`."""

    ones: Tensor

    def __init__(
        self, spec: ValueNormSpec, hidden: int, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__(spec, hidden, rotary, build)
        self.eps, self.keys_as_values = spec.value_eps, spec.keys_as_values
        ones = torch.ones(spec.head_dim, dtype=torch.float32, device=build.device)
        self.register_buffer("ones", ones, persistent=False)

    def outputs(self, spec: AttentionSpec) -> list[Output]:
        outputs = super().outputs(spec)
        keys_as_values = isinstance(spec, ValueNormSpec) and spec.keys_as_values
        return outputs[:2] if keys_as_values else outputs

    def project(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Tensor:
        projected = super().project(x, norm, batch)
        query, kv = self.qkv.sizes[:2]
        values = projected[:, query:] if self.keys_as_values else projected[:, query + kv :]
        heads = values.reshape(-1, self.spec.head_dim)
        normed = ops.rms_norm(heads, self.ones, self.eps).view(len(projected), kv)
        return torch.cat((projected[:, : query + kv], normed), dim=1)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        # The values before and after the norm, and the concatenation of q, k and v. The
        # concatenation is larger than the projection if keys serve as values.
        return super().workspace_bytes(tokens) + 4 * self.qkv.workspace_bytes(tokens)
