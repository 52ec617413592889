"""Inputs that the host makes while a step runs, and the copies of what it makes them from."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import QuireError
from quire.input_memory import DEPTH, InputMemory, InputShape, Memory, map_file, memory_file
from quire.ops.reference.mask import InputFlags


class HostInputs(InputMemory):
    """The memory of the host's inputs, as a worker's programs use it.

    Args:
        shape: The sizes.
        memory: A part of memory that all ranks map, int8 [`shape.size`], or None to allocate it.
        rank, world: This rank, and their number.
        remote: Whether other processes make the inputs.

    Attributes:
        lines: int32 [lanes * lines, words], pinned for a GPU.
        input_flags: The flags that a head's kernel polls, pinned for a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        shape: InputShape,
        memory: Memory | None = None,
        rank: int = 0,
        world: int = 1,
        *,
        remote: bool = False,
    ) -> None:
        file: tuple[int, int] | None = None
        pinned = device.type == "cuda"
        self._registered = pinned and (memory is not None or remote)
        shared = memory is not None
        if memory is not None and remote:
            file = _file_of(memory)
        elif memory is None and remote:
            file = memory_file(shape.size), 0
            memory = map_file(*file, shape.size)
        elif memory is None:
            memory = torch.zeros(shape.size, dtype=torch.int8, pin_memory=pinned).numpy()
        if self._registered:
            pin(memory)
        super().__init__(shape, memory, remote=remote or shared)
        self.file = file
        flags, verdicts = torch.from_numpy(self.flags), torch.from_numpy(self.verdicts)
        self.input_flags = InputFlags(flags, verdicts, rank, world)
        self.lines = torch.from_numpy(self.buffer())
        self._pinned = pinned
        self._columns = [
            torch.from_numpy(each)
            for each in (self.results, self.claim_ids, self.claim_starts, self.newest)
        ]

    def send_results(self, step_id: int, results: Tensor, gate: Tensor) -> None:
        """Queues the copy of a step's results. It arrives before the host can read a later step.

        Args:
            results: int32 [R, words], on the device.
            gate: int32 [2], the step's `gate`, on the device.
        """
        columns, _, _, _ = self._columns
        columns[step_id % DEPTH, : len(results)].copy_(results, non_blocking=True)
        self._arrive(0, gate)

    def send_claims(self, step_id: int, ids: Tensor, start: Tensor, gate: Tensor) -> None:
        """Queues the copy of a step's claims, before its body runs.

        Args:
            ids: int32 [lanes, W], a column on the device.
            start: int32 [lanes], a column on the device.
            gate: int32 [2], the step's `gate`, on the device.
        """
        _, claim_ids, claim_starts, _ = self._columns
        claim_ids[step_id % DEPTH].copy_(ids, non_blocking=True)
        claim_starts[step_id % DEPTH].copy_(start, non_blocking=True)
        self._arrive(1, gate)

    def _arrive(self, kind: int, gate: Tensor) -> None:
        """Queues the word that says that what was queued before has arrived. The copies of a stream
        run one after the other."""
        newest = self._columns[3]
        newest[kind : kind + 1].view(torch.int32).copy_(gate, non_blocking=True)
        if not self._pinned:
            self.on_arrival()

    def close(self) -> None:
        super().close()
        if self._registered:
            # A step in flight may still poll a flag.
            torch.cuda.synchronize()
            unpin(self._memory)
            self._registered = False
        if self.file is not None:
            os.close(self.file[0])
            self.file = None


def _file_of(memory: Any) -> tuple[int, int]:
    """Opens the file that memory of all ranks lies in. Returns its descriptor, and the offset."""
    whole = np.frombuffer(memory._mmap, np.int8)
    return os.open(memory.filename, os.O_RDWR), memory.ctypes.data - whole.ctypes.data


def pin(memory: Memory) -> None:
    """Lets the device read memory that several processes map."""
    address, size = memory.ctypes.data, memory.nbytes
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(address, size, 1)  # portable
    if int(error):
        raise QuireError(f"shared memory cannot be pinned for the GPU (CUDA error {int(error)})")


def unpin(memory: Memory) -> None:
    """Undoes `pin`. Must be called before the memory is unmapped, because its addresses may then be
    reused."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.ctypes.data)
