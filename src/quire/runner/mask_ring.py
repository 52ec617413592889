"""Masks that other threads bring for steps that have been launched already."""

from __future__ import annotations

import threading

import numpy as np
import torch

from quire.arrays import Int32

_EVER = np.iinfo(np.int64).max
_WORD = 0xFFFFFFFF


class MaskRing:
    """A ring of masks in host memory, each with a flag that names the last step it was brought for.

    A GPU waits by itself: the flag is looked at by a kernel of the step's head, and steps are
    queued behind. A step's place is free again when the step was collected, so the ring is longer
    than steps in flight.

    depth: places. rows: lines of a mask, one for each logit row of a GATED row. words: of a line.
    masks: int32 [depth * rows, words]. flags: int64 [depth]. Both are pinned for a GPU.
    """

    def __init__(self, device: torch.device, depth: int, rows: int, words: int) -> None:
        pinned = device.type == "cuda"
        self._rows = rows
        self.masks = torch.zeros(depth * rows, words, dtype=torch.int32, pin_memory=pinned)
        self.flags = torch.full((depth,), -1, dtype=torch.int64, pin_memory=pinned)
        self._host, self._host_flags = self.masks.numpy(), self.flags.numpy()
        self._brought = threading.Condition()

    def room(self, step_id: int, rows: int) -> Int32:
        """Returns where the mask of a step may be built, int32 [rows, words]. From any thread."""
        first = self.first_line(step_id)
        return self._host[first : first + rows]

    def bring(self, step_id: int, mask: Int32) -> None:
        """Sets a step's mask, int32 [lines, words]. From any thread."""
        room = self.room(step_id, len(mask))
        if not np.may_share_memory(room, mask):
            room[:] = mask
        place = step_id % len(self._host_flags)
        with self._brought:
            self._host_flags[place] = max(step_id, self._host_flags[place])
            self._brought.notify_all()

    def has(self, step_id: int, *, wait: bool) -> bool:
        """Tells whether a step's mask is there; with `wait`, once it is."""
        place = step_id % len(self._host_flags)
        with self._brought:
            if wait:
                self._brought.wait_for(lambda: self._host_flags[place] >= step_id)
            return bool(self._host_flags[place] >= step_id)

    def first_line(self, step_id: int) -> int:
        """Returns the line of `masks` at which a step's mask begins."""
        return step_id % len(self._host_flags) * self._rows

    def gate(self, step_id: int) -> tuple[int, int, int]:
        """Returns what `ops.wait_for_flag` waits for: place, low and high word of the step."""
        low, high = step_id & _WORD, step_id >> 32
        return step_id % len(self._host_flags), low - (low >> 31 << 32), high

    def open(self) -> None:
        """Lets everything through, for good."""
        with self._brought:
            self._host_flags[:] = _EVER
            self._brought.notify_all()
