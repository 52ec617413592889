"""The interface between modules and the loader of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.quantization import FLOATS, Range


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """One tensor of a checkpoint, and the function that stores this rank's part of it.

    Attributes:
        name: below the module's name, such as `q.weight`.
        shape: shape of the whole tensor.
        ranges: [first, end) of this rank's part, for each dimension.
        write: takes rows of this rank's part, on `device`, and the index of the first row. Several
            threads may call it, with rows in any order.
        device: holds the parameter.
        dtypes: the checkpoint's tensor must have one of them.
        initial: content without a checkpoint (`--load-format dummy`).
        other: the slice for checkpoints with the tensor in another layout, or None. The tensor's
            shape tells which layout it has; if both have that shape, it is this one.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    write: Callable[[Tensor, int], None]
    device: torch.device
    dtypes: frozenset[torch.dtype] = FLOATS
    initial: Literal["random", "ones", "zeros"] = "random"
    other: ParameterSlice | None = None

    @classmethod
    def for_tensor(
        cls,
        name: str,
        target: Tensor,
        shape: Sequence[int] | None = None,
        ranges: Sequence[Range] | None = None,
        initial: Literal["random", "ones", "zeros"] = "random",
        offset: float = 0.0,
        factor: float = 1.0,
    ) -> ParameterSlice:
        """Returns a slice that copies floats to `target`.

        Args:
            name: below the module's name.
            target: this rank's parameter.
            shape: shape of the whole tensor; by default the shape of `target`.
            ranges: this rank's part; by default the whole.
            initial: content without a checkpoint.
            offset: added to the values.
            factor: then multiplies them.
        """

        def write(part: Tensor, start: int) -> None:
            rows = target[start : start + len(part)].copy_(part, non_blocking=True)
            if offset:
                rows += offset
            if factor != 1.0:
                rows *= factor

        shape = tuple(target.shape if shape is None else shape)
        ranges = tuple((0, size) for size in shape) if ranges is None else tuple(ranges)
        return cls(name, shape, ranges, write, target.device, initial=initial)


@runtime_checkable
class Loadable(Protocol):
    def slices(self) -> Iterator[ParameterSlice]: ...


class LoadableModel(nn.Module):
    """A model whose parameters come from a checkpoint.

    Attributes:
        spec: describes the model.
    """

    spec: Any

    def finish(self) -> None:
        """Ends loading: calls `finish` of all submodules that have it."""
        for module in self.modules():
            if module is not self and callable(finish := getattr(module, "finish", None)):
                finish()


def named_slices(model: nn.Module) -> Iterator[tuple[str, ParameterSlice]]:
    """Yields every slice of `model` with its full name, such as
    `layers.0.attention.qkv.q.weight`."""
    for prefix, module in model.named_modules():
        if isinstance(module, Loadable):
            for part in module.slices():
                yield (f"{prefix}.{part.name}" if prefix else part.name), part
