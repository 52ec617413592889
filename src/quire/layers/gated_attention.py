"""Attention whose output is multiplied by a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.linear import Output
from quire.layers.norm import RMSNorm
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.ops.gated_delta import sigmoid_gate


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedAttentionSpec(AttentionSpec):
    """Attention with a gate for each of its outputs, sigmoid of a projection."""

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        return GatedAttention(self, hidden, rotary, build)


class GatedAttention(Attention):
    """Multi-head attention times sigmoid(gate), before the last projection."""

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
