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
    """The running step, shared by all layers. rows: its tokens with adapters; None: there are
    none."""

    rows: AdapterRows | None = None


class AdaptedLinear:
    """Computes a linear layer in steps with adapters. The order is: product, scales, bias, adapter,
    activation, residual.

    Rows without an adapter get the same bits as from the layer alone, because the same kernels
    compute their products.
    """

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
            # A group of inputs with one scale lies on several ranks.
            out = _add_adapters(layer.partial_sum(x), x, self._weights, rows)
            return layer.group.all_reduce(out, residual, layer.name)
        # Every rank has the whole bias, but the sum over ranks may count it only once.
        bias = None if shared and layer.group.rank else layer.bias
        if len(layer.stacks) > 1:
            return self._one_by_one(x, residual, bias, act, rows)
        out = _adapted_linear(
            x, layer.weight, bias, None if shared else residual, scale, act, self._weights, rows
        )
        # Each rank's result is only of its share of the inputs.
        return layer.group.all_reduce(out, residual, layer.name) if shared else out

    def _one_by_one(
        self,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor | None,
        act: Activation | None,
        rows: AdapterRows,
    ) -> Tensor:
        """Computes the layer's weights one after the other."""
        parts, start = [], 0
        for weight in self._layer.weights:
            end = start + weight.outputs
            parts.append(ops.linear(x, weight, None if bias is None else bias[start:end]))
            start = end
        out = _add_adapters(torch.cat(parts, 1), x, self._weights, rows)
        if act is not None:
            out = ops.activate(out, act, x.dtype)
        return out if residual is None else out.add_(residual)
