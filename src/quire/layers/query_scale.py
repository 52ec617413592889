"""Attention whose queries grow with their position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.attention import Attention, AttentionSpec
from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.norm import RMSNorm
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaleSpec(AttentionSpec):
    """Attention with queries at position p multiplied by 1 + beta * log(1 + floor(p / step)), so
    that scores stay sharp over long contexts (Llama 4)."""

    beta: float
    step: int

    def layer(self, hidden: int, rotary: RotaryTable | None, build: Build) -> Attention:
        """Returns the layer, for hidden states of this width."""
        return QueryScaleAttention(self, hidden, rotary, build)


class QueryScaleAttention(Attention):
    """Attention by a `QueryScaleSpec`. Rotating a query does not change its length, so that it may
    be scaled before."""

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
