"""Pieces of a peer's blocks, as they may be read: all at once, or layers as they are computed."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quire.errors import QuireError
from quire.runner.transfer.engine_memory import MemoryPieces
from quire.runner.transfer.shared_memory import CLOCK_BEGIN, SharedMemory, read_shared

_STILL_SECONDS = 60.0
"""For how long a clock that is waited for may stand still."""


class PieceSource(Protocol):
    """Gives out pieces of one rank's memory as they may be read."""

    @property
    def left(self) -> bool:
        """Whether any have not been given out."""
        ...

    def take(self) -> MemoryPieces | None:
        """Gives out what may be read by now; None: nothing more than before. Raises QuireError
        where no more is to be expected."""
        ...


class WrittenPieces:
    """Pieces that have been written."""

    def __init__(self, pieces: MemoryPieces) -> None:
        self._pieces: MemoryPieces | None = pieces

    @property
    def left(self) -> bool:
        return self._pieces is not None

    def take(self) -> MemoryPieces | None:
        pieces, self._pieces = self._pieces, None
        return pieces


class LayerPieces:
    """Pieces of which a step of the peer writes one layer after the other.

    pieces: of some of the group's layers, by their places in it. due: what the clock is at least
    when each layer has been written, in rising order. clock: the peer's, now.
    """

    def __init__(
        self,
        pieces: Callable[[range], MemoryPieces | None],
        due: Sequence[int],
        clock: Callable[[], int],
    ) -> None:
        self._pieces = pieces
        self._due = due
        self._clock = clock
        self._taken = 0
        self._seen = clock()
        self._moved = time.monotonic()

    @property
    def left(self) -> bool:
        return self._taken < len(self._due)

    def take(self) -> MemoryPieces | None:
        now = self._clock()
        if now != self._seen:
            self._seen, self._moved = now, time.monotonic()
        elif time.monotonic() - self._moved > _STILL_SECONDS:
            raise QuireError(f"the peer has computed nothing for {_STILL_SECONDS:g} s")
        layers = range(self._taken, bisect.bisect_right(self._due, now))
        if not layers:
            return None
        self._taken = layers.stop
        return self._pieces(layers)


def open_clock(memory: SharedMemory, rank: int) -> Callable[[], int]:
    """Returns a function that reads the clock of a peer's rank. Raises ValueError where there is
    none."""
    mapped = read_shared(memory.pid, memory.descriptor, memory.size, memory.token)
    if mapped is None:
        raise ValueError("a peer's clock is not to be read here")
    clocks = np.frombuffer(mapped, np.int64, rank + 1, CLOCK_BEGIN)
    return lambda: int(clocks[rank])
