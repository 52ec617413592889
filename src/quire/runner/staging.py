"""Everything a step brings to the device travels in one copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}
_WORD = 4

Array = np.ndarray[Any, Any]


class Upload:
    """One step's int32 and float32 arrays, packed.

    `add` what is to be read on the device, and `put` what is to be written into columns; then
    `send`, which does the writes; then read with `upload[key]`. What was sent lives until the step
    is done with it.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._arrays: list[Array] = []
        self._tensors: list[Tensor] = []
        self._writes: list[tuple[Tensor, Array, Array]] = []

    def add(self, array: Array) -> int:
        self._arrays.append(array)
        return len(self._arrays) - 1

    def put(self, column: Tensor, places: Array, values: Array) -> None:
        """Writes `values` to places int [n] of a column, counted over all of it as if it were flat.
        The column is dense and of the values' dtype, int32 or float32. No place may occur twice in
        an upload."""
        self._writes.append((column, places, values))

    def send(self) -> None:
        flat = [_words(array) for array in self._arrays]
        sizes = [len(words) for words in flat]
        if self._staging.device.type == "cuda":
            packed = self._send_writes(flat, sum(sizes))
        else:
            packed = self._staging.copy(flat, sum(sizes))
            for column, places, values in self._writes:
                column.view(-1)[torch.from_numpy(places).long()] = torch.from_numpy(
                    values.reshape(-1)
                )
        for array, piece in zip(self._arrays, torch.split(packed, sizes), strict=True):
            self._tensors.append(piece.view(_DTYPES[array.dtype]).view(array.shape))

    def _send_writes(self, flat: list[Int32], size: int) -> Tensor:
        """What was added, on the device, once one kernel has done all writes."""
        from quire.ops.triton.batch import scatter

        values = [_words(values) for _, _, values in self._writes]
        count = sum(len(words) for words in values)
        addresses = [
            (column.data_ptr() + _WORD * places.astype(np.int64)).view(np.int32)
            for column, places, _ in self._writes
        ]
        # Addresses first: they are read eight bytes at a time.
        packed = self._staging.copy([*addresses, *values, *flat], 3 * count + size)
        if count:
            scatter(packed[: 2 * count].view(torch.int64), packed[2 * count : 3 * count])
        return packed[3 * count :]

    def __getitem__(self, key: int) -> Tensor:
        return self._tensors[key]


def _words(array: Array) -> Int32:
    return np.ascontiguousarray(array).reshape(-1).view(np.int32)


class Staging:
    """A ring of pinned buffers, one for each step in flight and to spare.

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

    def copy(self, flat: list[Int32], size: int) -> Tensor:
        """int32 [size] on the device."""
        if self.device.type != "cuda":
            return torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.int32))
        i = self._next
        self._next = (i + 1) % len(self._buffers)
        # Mostly it has; asking first keeps the interpreter's lock.
        if self._read[i] is not None and not self._read[i].query():
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
