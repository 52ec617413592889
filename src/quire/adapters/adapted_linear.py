"""A linear layer with adapters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire import ops
from quire.layers.linear import Activation, Linear
from quire.layers.norm import RMSNorm
from quire.ops.adapters import AdapterRows, SlotWeights
from quire.ops.reference import adapters as twins

adapter_rows = ops.op(twins.adapter_rows)
_add_adapters = ops.op(twins.add_adapters)
_preactivation = ops.op(twins.preactivation)


@dataclass(slots=True)
class AdaptedStep:
    """The step that runs, for all layers. rows: its tokens with adapters, None if it has none."""

    rows: AdapterRows | None = None


class AdaptedLinear:
    """Computes a linear layer in steps with adapters: product, scales, bias, adapter, activation,
    residual. Rows without an adapter get the same bits as from the layer alone, as their products
    come from the same kernels."""

    def __init__(self, layer: Linear, weights: SlotWeights, step: AdaptedStep) -> None:
        self._layer = layer
        self._weights = weights
        self._step = step

    def __call__(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm | None, act: Activation | None
    ) -> Tensor | None:
        """See `Linear.adapter`."""
        rows, layer = self._step.rows, self._layer
        if rows is None:
            return None
        scale = None
        if norm is not None:
            scale = norm.scale
            if scale is None or len(layer.stacks) > 1:
                x, scale = norm(x), None
        shared = layer.split == "inputs" and layer.group.world > 1
        before = None if shared or act is not None else residual
        out = self._product(x, before, scale, act)
        out = _add_adapters(out, x, self._weights, rows, scale)
        if shared:
            # Each rank has added what its share of the inputs gives.
            return layer.group.all_reduce(out, residual, layer.name)
        if act is not None:
            out = ops.activate(out, act, x.dtype)
        return out if residual is None or before is not None else out.add_(residual)

    def _product(
        self, x: Tensor, residual: Tensor | None, norm: ops.RmsScale | None, act: Activation | None
    ) -> Tensor:
        layer = self._layer
        # What every rank holds whole may enter the sum over ranks only once.
        bias = None if layer.split == "inputs" and layer.group.rank else layer.bias
        if len(layer.stacks) == 1:
            if act is None:
                return ops.linear(x, layer.weight, bias, residual, norm)
            return _preactivation(x, layer.weight, bias, norm, act)
        parts, start = [], 0
        for weight in layer.weights:
            end = start + weight.outputs
            parts.append(ops.linear(x, weight, None if bias is None else bias[start:end]))
            start = end
        out = torch.cat(parts, 1)
        return out if residual is None else out.add_(residual)
