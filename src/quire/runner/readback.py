"""Everything a step brings to the device travels in one copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32, int32
from quire.plan import RowFlag, StepPlan, StepResult

Array = np.ndarray[Any, Any]
Places = Array | Sequence[int]


class Upload:
    """One step's changes of the batch state, and arrays that its kernels read, packed.

    `put` and `put_lines` are writes into columns of the state's memory; `add` brings an array that
    is read with `upload[key]` after `send`. What was sent lives until the step is done with it.
    """

    def __init__(self, ring: PinnedRing, memory: Tensor) -> None:
        self._ring = ring
        self._memory = memory
        self._starts: list[Array] = []
        self._counts: list[Array] = []
        self._values: list[Int32] = []
        self._arrays: list[Int32] = []
        self._tensors: list[Tensor] = []

    def put(self, column: Tensor, starts: Places, counts: Places, values: Array) -> None:
        """Writes runs of words into a column, counted over all of it as if it were flat.

        column: a dense view of the state's memory. starts, counts: int [n], `counts[i]` words from
        `starts[i]` on. values: int32 or float32, all runs one after the other. Runs do not overlap,
        nor those of other puts.
        """
        self._starts.append(np.asarray(starts, dtype=np.int64) + int(column.storage_offset()))
        self._counts.append(np.asarray(counts, dtype=np.int64))
        self._values.append(_words(values))

    def put_lines(self, column: Tensor, lanes: Int32, values: Array) -> None:
        """Writes the whole lines of `lanes`, int32 [n]; values [n, ...] of the column's type."""
        width = column[0].numel()
        self.put(column, lanes.astype(np.int64) * width, np.full(len(lanes), width), values)

    def add(self, array: Array) -> int:
        """Brings an int32 or float32 array along, and returns its key."""
        self._arrays.append(_words(array))
        return len(self._arrays) - 1

    def send(self) -> None:
        """Copies everything to the device, and does the writes."""
        values = [*self._values, *self._arrays]
        counts = np.concatenate([*self._counts, np.empty(0, np.int64)])
        segments = np.empty((len(counts), 3), dtype=np.int32)
        if len(counts):
            segments[:, 0] = np.concatenate(self._starts)
            segments[:, 1] = counts
            segments[:, 2] = np.cumsum(counts) - counts
        packed = self._ring.copy([segments.reshape(-1), *values])
        if len(counts):
            ops.scatter(self._memory, packed, len(counts), int(counts.max()))
        at = segments.size + int(counts.sum())
        for array in self._arrays:
            self._tensors.append(packed[at : at + len(array)])
            at += len(array)

    def __getitem__(self, key: int) -> Tensor:
        return self._tensors[key]


def ragged(lanes: Int32, starts: Int32, stride: int) -> Array:
    """Returns where runs begin that start in column `starts[i]` of line `lanes[i]`, int64 [n]."""
    return lanes.astype(np.int64) * stride + starts


def _words(array: Array) -> Int32:
    if array.dtype not in (np.int32, np.float32):
        array = int32(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.int32)


class PinnedRing:
    """A ring of pinned buffers, one for each step in flight and to spare.

    Reusing a buffer that a copy still reads is a classic corruption, so each waits for the copy
    that last read it. Without a GPU there is nothing to pin.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._next = 0
        self._buffers: list[Tensor | None] = [None] * depth
        self._read: list[Any] = [None] * depth

    def copy(self, parts: Sequence[Int32]) -> Tensor:
        """Returns the parts on the device, one after the other, int32 [sum of their sizes]."""
        if self.device.type != "cuda":
            return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int32))
        size = sum(len(part) for part in parts)
        i = self._next
        self._next = (i + 1) % len(self._buffers)
        # Mostly it has; asking first keeps the interpreter's lock.
        if self._read[i] is not None and not self._read[i].query():
            self._read[i].synchronize()
        buffer = self._buffers[i]
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(max(4096, 2 * size), dtype=torch.int32, pin_memory=True)
            self._buffers[i] = buffer
        if size:
            np.concatenate(parts, out=buffer.numpy()[:size])
        out = torch.empty(size, dtype=torch.int32, device=self.device)
        out.copy_(buffer[:size], non_blocking=True)
        self._read[i] = torch.cuda.current_stream(self.device).record_event()
        return out


# A step in flight, and its results on their way to the host, which reads them late.


@dataclass(slots=True)
class Step:
    """A plan whose programs are launched, or about to be.

    logit_start: int32 [R + 1] on the host, where the logit rows of each row begin.
    waits: the head is yet to be launched: its masks have not come, and the device cannot wait.
    notes: what hooks remember of the step until they read its results.
    result: for hooks to add to, once the step is done.
    """

    plan: StepPlan
    device: torch.device
    logit_start: Int32
    waits: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    result: StepResult = field(init=False)
    _sent: dict[str, Tensor] = field(default_factory=dict)
    _started: Any = None
    _done: Any = None

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> Step:
        """Begins a step, whose time counts from now."""
        step = cls(plan, device, logit_starts(plan))
        step._started = step._mark()
        return step

    def send(self, name: str, values: Tensor) -> None:
        """Starts a copy to the host, which `arrived` gives once the step is done."""
        if self.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._sent[name] = host.copy_(values, non_blocking=True)
        else:
            self._sent[name] = values.clone()

    def arrived(self, name: str) -> Tensor | None:
        """Returns what was sent under a name, None if nothing was."""
        return self._sent.get(name)

    def launched(self) -> None:
        """Marks the end of the step on the device."""
        self._done = self._mark()

    def wait(self) -> None:
        """Waits until all that was sent has arrived, and begins `result`."""
        rows = self.plan.num_rows
        if self.device.type == "cuda":
            self._done.synchronize()
            gpu_us = self._started.elapsed_time(self._done) * 1e3
        else:
            gpu_us = (self._done - self._started) * 1e6
        lines = self.arrived("results")
        found = np.empty((0, 3), np.int32) if lines is None else lines.numpy()
        if len(found) < rows:
            # Rows without logits only move on.
            found = np.full((rows, 3), -1, dtype=np.int32)
            found[:, :2] = 0
        self.result = StepResult(
            step_id=self.plan.step_id,
            tokens=found[:rows, 2:],
            n_tokens=found[:rows, 0],
            stop_reason=found[:rows, 1],
            gpu_us=gpu_us,
        )

    def _mark(self) -> Any:
        """Returns a point in time on the device, an event on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def logit_starts(plan: StepPlan) -> Int32:
    """Returns where the logit rows of each row begin, int32 [R + 1].

    A generating row has one for each of its tokens, a PROMPT row one if it samples: what it needs
    besides, for its prompt's log-probabilities, is no part of the head.
    """
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
    np.cumsum(np.where(prompt, samples, plan.n_logits), out=starts[1:])
    return starts
