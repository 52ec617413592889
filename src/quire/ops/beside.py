"""Branches of a captured step, whose kernels overlap the main stream's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PendingTensor:
    """A tensor that a second stream computes. Only `joined` makes it readable.

    Args:
        result: the tensor.
        done: event that the second stream records after its last kernel.
        held: tensors that its kernels read; kept alive until `joined`.
    """

    def __init__(self, result: Tensor, done: torch.cuda.Event, held: Any) -> None:
        self._result = result
        self._done = done
        self._held = held

    def joined(self) -> Tensor:
        """Returns the tensor, and makes later launches of this stream wait for it. Called once."""
        torch.cuda.current_stream(self._result.device).wait_event(self._done)
        self._held = None
        return self._result


@functools.cache
def _side(index: int | None) -> torch.cuda.Stream:
    # Its kernels are few and small. The priority gives them the first free multiprocessors.
    return torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]


def beside(work: Callable[..., Tensor], *args: Any) -> Tensor | PendingTensor:
    """Returns work(*args); the first argument is a tensor.

    During the capture of a GPU's step its kernels form a branch of the graph. They overlap the
    kernels that are launched between this call and `joined`. Outside of a capture the work runs at
    once, because launches take longer than kernels there."""
    x = args[0]
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return work(*args)
    side = _side(x.device.index)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        result = work(*args)
    return PendingTensor(result, side.record_event(), args)


def joined(x: Tensor | PendingTensor | None) -> Tensor | None:
    """Returns a tensor, of a branch where its work has ended."""
    return x.joined() if isinstance(x, PendingTensor) else x
