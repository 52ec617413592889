"""Layers with post-norms, parallel parts or multipliers. `Block` is the plain pre-norm layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quire import ops
from quire.errors import ModelError
from quire.layers.batch import ForwardBatch, GroupBatch
from quire.layers.build import Build
from quire.layers.norm import RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.layers.rotary import RotaryTable
from quire.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ScaledLayerSpec(LayerSpec):
    """A layer whose output is multiplied by a learned number (Gemma 4)."""


def general_block(
    spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
) -> GeneralBlock | PostNormBlock:
    """Returns the layer that a spec describes."""
    if spec.norms == "sum":
        return PostNormBlock(spec, model, rotary, build)
    kind = ScaledBlock if isinstance(spec, ScaledLayerSpec) else GeneralBlock
    return kind(spec, model, rotary, build)


class GeneralBlock(nn.Module):
    """A layer of any shape that `LayerSpec` can describe.

    In sequence: y = x + out(mixer(norm(x))), then y + out(ffn(norm(y))). In parallel: x +
    out(mixer(norm(x))) + out(ffn(norm(x))). `out` is a norm, a multiplier or nothing.
    """

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.spec = spec
        self.attention = model.mixer(spec).layer(hidden, rotary, build.within("attention"))
        self.mlp = spec.ffn.layer(hidden, build.within("mlp"))

        def norm(name: str, exists: bool) -> RMSNorm | None:
            return model.norm.layer(hidden, build.within(name)) if exists else None

        inputs, outputs = spec.norms != "output", spec.norms != "input"
        if outputs and (model.norm.kind != "rms" or spec.multiplier != 1.0):
            raise ModelError(
                "norms on the outputs of a layer's parts must be RMSNorms without multiplier"
            )
        self.attention_norm = norm("attention_norm", inputs and spec.mixer_norm)
        self.attention_out_norm = norm("attention_out_norm", outputs)
        # Parallel parts share the norm of their input.
        self.mlp_norm = norm("mlp_norm", inputs and not spec.parallel)
        self.mlp_out_norm = norm("mlp_out_norm", outputs)

    def forward(self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: Any) -> Residual:
        before = x.total()
        taken = Residual(before, delta_only=True)
        given = self.attention(taken, self.attention_norm, batch, group, kv)
        mixed = self._sum(before, given, self.attention_out_norm)
        norm = self.attention_norm
        if not self.spec.parallel:
            taken, norm = Residual(mixed, delta_only=True), self.mlp_norm
        return Residual(self._sum(mixed, self.mlp(taken, norm, batch), self.mlp_out_norm))

    def _sum(self, x: Tensor, given: Residual, norm: RMSNorm | None) -> Tensor:
        """Returns x plus one part's normed or multiplied output, [T, hidden]."""
        part = given.total()
        if norm is not None:
            return ops.rms_norm(part, norm.weight, norm.eps, x)
        if self.spec.multiplier != 1.0:
            part = part.mul_(self.spec.multiplier)
        return part.add_(x)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of intermediates, for the larger of both parts."""
        mixer: int = self.attention.workspace_bytes(tokens)
        mlp: int = self.mlp.workspace_bytes(tokens)
        return max(mixer, mlp)


class ScaledBlock(GeneralBlock):
    """A layer whose output, residual included, is multiplied by a learned number."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__(spec, model, rotary, build)
        self.scalar = build.empty(1)

    def forward(self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: Any) -> Residual:
        return Residual(super().forward(x, batch, group, kv).total().mul_(self.scalar))

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the learned number."""
        yield ParameterSlice.for_tensor("scalar", self.scalar.data, initial="ones")


class PostNormBlock(nn.Module):
    """The layer of the first transformers: norm(x + mixer(x)), then the same with the ffn."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, rotary: RotaryTable | None, build: Build
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.attention = model.mixer(spec).layer(hidden, rotary, build.within("attention"))
        self.attention_norm = model.norm.layer(hidden, build.within("attention_norm"))
        self.mlp = spec.ffn.layer(hidden, build.within("mlp"))
        self.mlp_norm = model.norm.layer(hidden, build.within("mlp_norm"))

    def forward(self, x: Residual, batch: ForwardBatch, group: GroupBatch, kv: Any) -> Residual:
        mixed = self.attention(x, None, batch, group, kv)
        x = Residual(self.attention_norm(mixed.total()))
        return Residual(self.mlp_norm(self.mlp(x, None, batch).total()))

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of intermediates, for the larger of both parts."""
        mixer: int = self.attention.workspace_bytes(tokens)
        mlp: int = self.mlp.workspace_bytes(tokens)
        return max(mixer, mlp)
