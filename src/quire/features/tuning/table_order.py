"""The order that an engine sends to the measuring process, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models import Decoder
from quire.ops.triton.products.plan import Shape
from quire.ops.weight import WeightFormat


class TableOrder(msgspec.Struct, frozen=True):
    """The order for a measuring process.

    Attributes:
        device: number of the GPU.
        card: name of the GPU.
        memory: bytes of the GPU that the process may use.
        workers: number of threads that compile.
        products: see `shapes_as_json`.
    """

    device: int
    card: str
    memory: int
    workers: int
    products: list[dict[str, Any]]

    def shapes(self) -> list[Shape]:
        """Returns the shapes of the products."""
        return [_from_json(product) for product in self.products]


def shapes_as_json(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Returns shapes as JSON objects. A dtype becomes its name."""
    return [_as_json(shape) for shape in shapes]


def _as_json(shape: Shape) -> dict[str, Any]:
    data: dict[str, Any] = shape._asdict() | {"dtype": _name(shape.dtype)}
    form = shape.format
    if form is not None:
        # Operations on the inputs are left out because they are not part of the product.
        data["format"] = {
            "values": _name(form.values), "bits": form.bits, "group": form.group,
            "scales": None if form.scales is None else _name(form.scales), "zeros": form.zeros,
            "ordered": form.ordered, "code": form.code,
        }  # fmt: skip
    return data


def _from_json(data: dict[str, Any]) -> Shape:
    shape = Shape(**{**data, "dtype": getattr(torch, data["dtype"])})
    stored = data["format"]
    if stored is None:
        return shape
    scales = None if stored["scales"] is None else getattr(torch, stored["scales"])
    form = WeightFormat(**{**stored, "values": getattr(torch, stored["values"])})
    return shape._replace(format=replace(form, scales=scales))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The products of a model's linear layers, from the model alone.


def products_of(model: Decoder, rows: Iterable[int]) -> list[Shape]:
    """Returns the shapes of a model's layers and head for each number of rows, each once. Products
    outside of plain linear layers (latents, experts) may be missing."""
    blocks: dict[Any, Any] = dict(zip(model.spec.layers, model.layers, strict=True))
    single = [shape for block in blocks.values() for shape in _of_block(block, model.dtype)]
    single += _of_layer(model.head, model.dtype, None)
    return [shape._replace(m=m) for m in rows for shape in dict.fromkeys(single)]


def _of_block(block: Any, dtype: Any) -> Iterator[Shape]:
    """Yields the shapes of a block's linear layers with one row. Parallel parts share a norm."""
    norm = block.attention_norm
    yield from _of_part(block.attention, dtype, norm)
    yield from _of_part(block.mlp, dtype, block.mlp_norm or norm)


def _of_part(part: nn.Module, dtype: Any, norm: RMSNorm | None) -> Iterator[Shape]:
    for layer in part.modules():
        if isinstance(layer, Linear):
            yield from _of_layer(layer, dtype, norm)


def _of_layer(layer: Linear, dtype: Any, norm: RMSNorm | None) -> Iterator[Shape]:
    """Yields the shape of each of a layer's weights. If there are several, other kernels compute
    norm and activation.

    Args:
        norm: norm of the stream, which the first product of a part fuses.
    """
    fused = len(layer.weights) == 1
    first = norm is not None and norm.scale is not None and layer.split == "outputs"
    normed = fused and first and norm is not None and layer.inputs == norm.weight.shape[0]
    gated = fused and [output.name for output in layer.outputs] == ["gate", "up"]
    for weight in layer.weights:
        outputs = weight.outputs // (2 if gated else 1)
        stored = None if weight.scales is None else weight.format
        yield Shape(1, outputs, weight.inputs, dtype, normed, gated, stored)
