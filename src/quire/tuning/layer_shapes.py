"""The products of a model's linear layers, from the model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models import Decoder
from quire.ops.triton.gemm_plan import Shape


def products_of(model: Decoder, rows: Iterable[int]) -> list[Shape]:
    """Returns the shapes of a model's layers and head for each number of rows, each once. What a
    model computes in a way of its own (products of latents, of experts) may be missing."""
    blocks: dict[Any, Any] = dict(zip(model.spec.layers, model.layers, strict=True))
    single = [shape for block in blocks.values() for shape in _of_block(block, model.dtype)]
    single += _of_layer(model.head, model.dtype, None)
    return [shape._replace(m=m) for m in rows for shape in dict.fromkeys(single)]


def _of_block(block: Any, dtype: Any) -> Iterator[Shape]:
    """Yields the shapes of a layer, of one row. Parallel parts share a norm."""
    norm = block.attention_norm
    yield from _of_part(block.attention, dtype, norm)
    yield from _of_part(block.mlp, dtype, block.mlp_norm or norm)


def _of_part(part: nn.Module, dtype: Any, norm: RMSNorm | None) -> Iterator[Shape]:
    for layer in part.modules():
        if isinstance(layer, Linear):
            yield from _of_layer(layer, dtype, norm)


def _of_layer(layer: Linear, dtype: Any, norm: RMSNorm | None) -> Iterator[Shape]:
    """Yields the shape of each of a layer's weights. Where there are several, norm and activation
    are left to other kernels. norm: of the stream, which the first product of a part takes."""
    fused = len(layer.weights) == 1
    first = norm is not None and norm.scale is not None and layer.split == "outputs"
    normed = fused and first and norm is not None and layer.inputs == norm.weight.shape[0]
    gated = fused and [output.name for output in layer.outputs] == ["gate", "up"]
    for weight in layer.weights:
        outputs = weight.outputs // (2 if gated else 1)
        stored = None if weight.scales is None else weight.format
        yield Shape(1, outputs, weight.inputs, dtype, normed, gated, stored)
