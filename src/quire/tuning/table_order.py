"""The order that an engine gives to the process that measures, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from quire.ops.triton.gemm_plan import Shape
from quire.ops.weight import WeightFormat


class TableOrder(msgspec.Struct, frozen=True):
    """device: the number of the GPU. card: its name. memory: bytes of it that the process may take.
    workers: threads that compile. products: see `packed`."""

    device: int
    card: str
    memory: int
    workers: int
    products: list[dict[str, Any]]

    def shapes(self) -> list[Shape]:
        """Returns the shapes of the products."""
        return [_unpacked(product) for product in self.products]


def packed(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Returns shapes as JSON has them: dtypes by their names."""
    return [_packed(shape) for shape in shapes]


def _packed(shape: Shape) -> dict[str, Any]:
    data: dict[str, Any] = shape._asdict() | {"dtype": _name(shape.dtype)}
    form = shape.format
    if form is not None:
        # What is done to the layer's inputs beforehand is not the product's.
        data["format"] = {
            "values": _name(form.values), "bits": form.bits, "group": form.group,
            "scales": None if form.scales is None else _name(form.scales), "zeros": form.zeros,
            "ordered": form.ordered, "code": form.code,
        }  # fmt: skip
    return data


def _unpacked(data: dict[str, Any]) -> Shape:
    shape = Shape(**{**data, "dtype": getattr(torch, data["dtype"])})
    stored = data["format"]
    if stored is None:
        return shape
    scales = None if stored["scales"] is None else getattr(torch, stored["scales"])
    form = WeightFormat(**{**stored, "values": getattr(torch, stored["values"])})
    return shape._replace(format=replace(form, scales=scales))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
