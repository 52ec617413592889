"""Attention whose values are normed, and may be the keys before their norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire import ops
from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.linear import Output
from quire.layers.norm import RMSNorm
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueNormSpec(AttentionSpec):
    """Attention with an RMSNorm without weights over each head's values.

    value_eps: its epsilon. keys_as_values: values are what keys are before norm and rotation.
    """

    value_eps: float
    keys_as_values: bool = False

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return ValueNormAttention(self, hidden, rotary, build)


class ValueNormAttention(Attention):
    """Attention by a `ValueNormSpec`."""

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
        # Values twice, and all three side by side, which may be more than was projected.
        return super().workspace_bytes(tokens) + 4 * self.qkv.workspace_bytes(tokens)
