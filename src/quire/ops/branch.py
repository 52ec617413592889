"""Branches of a captured step, whose kernels overlap the main stream's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PendingTensor:
    """A tensor that a second stream computes. It may be read only after `join_branch`.

    Args:
        result: the tensor.
        done: event that the second stream records after its last kernel.
        held: tensors that these kernels read. They are kept alive until `join_branch`.
    """

    def __init__(self, result: Tensor, done: torch.cuda.Event, held: Any) -> None:
        self._result = result
        self._done = done
        self._held = held

    def join(self) -> Tensor:
        """Returns the tensor, and makes later launches on this stream wait for it. Called once."""
        torch.cuda.current_stream(self._result.device).wait_event(self._done)
        self._held = None
        return self._result


@functools.cache
def _side(index: int | None) -> torch.cuda.Stream:
    # The second stream's kernels are few and small. The priority gives them the first free
    # multiprocessors.
    return torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]


def start_branch(work: Callable[..., Tensor], *args: Any) -> Tensor | PendingTensor:
    """Runs `work` on a second stream and returns its result. The first argument must be a tensor.

    During the capture of a GPU's step the kernels of `work` form a branch of the graph. They
    overlap the kernels that are launched between this call and `join_branch`. Outside of a capture
    the work runs on the current stream, because launches take longer than kernels there."""
    x = args[0]
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return work(*args)
    side = _side(x.device.index)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        result = work(*args)
    return PendingTensor(result, side.record_event(), args)


def join_branch(x: Tensor | PendingTensor | None) -> Tensor | None:
    """Returns the tensor. Waits for the branch first if x is pending."""
    return x.join() if isinstance(x, PendingTensor) else x
