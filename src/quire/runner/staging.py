"""Everything a step brings to the device travels in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Upload:
    """One step's int32 and float32 arrays, packed. `add` them all, `send`, then read the device
    copies with `upload[key]`; those live until the step is done with them."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._tensors: list[Tensor] = []

    def add(self, array: np.ndarray[Any, Any]) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def send(self) -> None:
        flat = [np.ascontiguousarray(a).reshape(-1).view(np.int32) for a in self._arrays]
        sizes = [len(a) for a in flat]
        packed = self._staging.copy(flat, sum(sizes))
        for array, piece in zip(self._arrays, torch.split(packed, sizes), strict=True):
            self._tensors.append(piece.view(_DTYPES[array.dtype]).view(array.shape))

    def __getitem__(self, key: int) -> Tensor:
        return self._tensors[key]


class Staging:
    """A ring of pinned buffers, at least as deep as the steps in flight.

    Reusing a buffer that a copy still reads is a classic corruption, so each waits for the copy
    that last read it. Without a GPU there is nothing to stage.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._next = 0
        self._buffers: list[Tensor | None] = [None] * depth
        self._read: list[Any] = [None] * depth

    def begin(self) -> Upload:
        return Upload(self)

    def copy(self, flat: list[np.ndarray[Any, Any]], size: int) -> Tensor:
        """int32 [size] on the device."""
        if self.device.type != "cuda":
            return torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.int32))
        i = self._next
        self._next = (i + 1) % len(self._buffers)
        if self._read[i] is not None:
            self._read[i].synchronize()
        buffer = self._buffers[i]
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(4096, 2 * size), dtype=torch.int32, pin_memory=True)
            self._buffers[i] = buffer
        if flat:
            np.concatenate(flat, out=buffer.numpy()[:size])
        out = torch.empty(size, dtype=torch.int32, device=self.device)
        out.copy_(buffer[:size], non_blocking=True)
        self._read[i] = torch.cuda.current_stream(self.device).record_event()
        return out
