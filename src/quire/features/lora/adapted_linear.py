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
_adapted_linear = ops.op(twins.adapted_linear)


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
        form = layer.weights[0].format
        if shared and form.inputs == "group" and layer.weight.inputs % form.group:
            # The groups of inputs that share a scale lie on several ranks.
            out = _add_adapters(layer.partial_sum(x), x, self._weights, rows)
            return layer.group.all_reduce(out, residual, layer.name)
        # What every rank holds whole may enter the sum over ranks only once.
        bias = None if shared and layer.group.rank else layer.bias
        if len(layer.stacks) > 1:
            return self._one_by_one(x, residual, bias, act, rows)
        out = _adapted_linear(
            x, layer.weight, bias, None if shared else residual, scale, act, self._weights, rows
        )
        # Each rank has added what its share of the inputs gives.
        return layer.group.all_reduce(out, residual, layer.name) if shared else out

    def _one_by_one(
        self,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        act: Activation | None,
        rows: AdapterRows,
    ) -> Tensor:
        """Computes outputs whose weights differ one after the other."""
        parts, start = [], 0
        for weight in self._layer.weights:
            end = start + weight.outputs
            parts.append(ops.linear(x, weight, None if bias is None else bias[start:end]))
            start = end
        out = _add_adapters(torch.cat(parts, 1), x, self._weights, rows)
        if act is not None:
            out = ops.activate(out, act, x.dtype)
        return out if residual is None else out.add_(residual)
