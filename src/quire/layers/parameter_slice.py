"""A module's parameters as the loader sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.quantization import FLOATS, Range


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """One tensor of a checkpoint, as the layer that owns it sees it.

    name: below the module's own name, such as `q.weight`.
    shape: of the whole tensor.
    ranges: the part of it that this rank reads, half-open, one for each dimension.
    write: stores rows of that part, from the given row of the part on; they lie on `device`. Rows
        may come in any order and from several threads.
    dtypes: those that the checkpoint may store it in.
    initial: what random weights are made of; norms start as the identity.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    write: Callable[[Tensor, int], None]
    device: torch.device
    dtypes: frozenset[torch.dtype] = FLOATS
    initial: Literal["random", "ones", "zeros"] = "random"

    @classmethod
    def of(
        cls,
        name: str,
        target: Tensor,
        shape: Sequence[int] | None = None,
        ranges: Sequence[Range] | None = None,
        initial: Literal["random", "ones", "zeros"] = "random",
        offset: float = 0.0,
    ) -> ParameterSlice:
        """Returns a slice of floats that are stored in `target`, plus `offset`, by default all."""

        def write(part: Tensor, start: int) -> None:
            rows = target[start : start + len(part)].copy_(part, non_blocking=True)
            if offset:
                rows += offset

        shape = tuple(target.shape if shape is None else shape)
        ranges = tuple((0, size) for size in shape) if ranges is None else tuple(ranges)
        return cls(name, shape, ranges, write, target.device, initial=initial)


@runtime_checkable
class Loadable(Protocol):
    def slices(self) -> Iterator[ParameterSlice]: ...


def named_slices(model: nn.Module) -> Iterator[tuple[str, ParameterSlice]]:
    """Yields every slice of `model` under its full name, such as
    `layers.0.attention.qkv.q.weight`."""
    for prefix, module in model.named_modules():
        if isinstance(module, Loadable):
            for part in module.slices():
                yield (f"{prefix}.{part.name}" if prefix else part.name), part
