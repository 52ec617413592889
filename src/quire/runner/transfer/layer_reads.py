"""Pieces of a peer's blocks to read: all at once, or layer by layer as the peer computes them."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.errors import QuireError
from quire.runner.transfer.engine_memory import MemoryPieces, decode_memory
from quire.runner.transfer.shared_memory import CLOCK_BEGIN, SharedMemory, read_shared

_STILL_SECONDS = 60.0
"""Seconds without progress of the clock after which a waiting read fails."""
_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the peer is alive."""


class PieceSource(Protocol):
    """Returns pieces of one rank's memory as soon as they may be read."""

    @property
    def left(self) -> bool:
        """Whether any piece has not been returned by `take` yet."""
        ...

    def take(self) -> MemoryPieces | None:
        """Returns the pieces that have become readable since the last call, or None.

        Raises:
            QuireError: the peer will write no more pieces.
        """
        ...


class WrittenPieces:
    """Pieces that are already complete, so that all may be read at once."""

    def __init__(self, pieces: MemoryPieces) -> None:
        self._pieces: MemoryPieces | None = pieces

    @property
    def left(self) -> bool:
        return self._pieces is not None

    def take(self) -> MemoryPieces | None:
        pieces, self._pieces = self._pieces, None
        return pieces


class PeerClock:
    """The layer clock of a peer's rank.

    Raises:
        ValueError: this process cannot read it.
    """

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        mapped = read_shared(memory.pid, memory.descriptor, memory.size, memory.token)
        if mapped is None:
            raise ValueError("this process cannot read the peer's layer clock")
        self._clocks = np.frombuffer(mapped, np.int64, rank + 1, CLOCK_BEGIN)
        self._path = memory.path

    def read(self) -> int:
        """Returns the clock's value."""
        return int(self._clocks[-1])

    @property
    def alive(self) -> bool:
        """Whether the peer's process is alive."""
        return os.path.exists(self._path)


class LayerPieces:
    """Pieces that a step of the peer writes layer by layer.

    Args:
        pieces: returns the pieces of some layers, by their places in the group.
        due: by layer, the value of the clock once the layer is written; ascending.
    """

    def __init__(
        self,
        pieces: Callable[[range], MemoryPieces | None],
        due: Sequence[int],
        clock: PeerClock,
    ) -> None:
        self._pieces = pieces
        self._due = due
        self._clock = clock
        self._taken = 0
        self._seen = clock.read()
        self._moved = self._looked = time.monotonic()

    @property
    def left(self) -> bool:
        return self._taken < len(self._due)

    def take(self) -> MemoryPieces | None:
        seen, now = self._clock.read(), time.monotonic()
        if seen != self._seen:
            self._seen, self._moved = seen, now
        layers = range(self._taken, bisect.bisect_right(self._due, seen))
        if layers:
            self._taken = layers.stop
            return self._pieces(layers)
        if now - self._moved > _STILL_SECONDS:
            raise QuireError(f"the peer has computed nothing for {_STILL_SECONDS:g} s")
        if now - self._looked > _CHECK_SECONDS:
            self._looked = now
            if not self._clock.alive:
                raise QuireError("the peer's process has ended")
        return None


def sees_clock(source: bytes) -> bool:
    """Whether this process can read the clock of a peer's memory (`Transfer.source`)."""
    try:
        clock = decode_memory(source).clock
        return clock is not None and bool(PeerClock(clock, 0))
    except (ValueError, msgspec.DecodeError):
        return False
