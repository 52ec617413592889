"""Reads of other engines' memory, on a thread that makes all calls of the transport's library.

A thread of the library would poll without a pause, and take a whole core. This thread polls often
while reads are under way, on either side, and seldom otherwise. It may also block: while it
connects to a peer, or in a library with synchronous reads.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.runner.transfer.engine_memory import MemoryKind, MemoryPieces, RankMemory
from quire.runner.transfer.layer_reads import PieceSource

_log = logging.getLogger(__name__)

_BUSY_NAP, _IDLE_NAP = 2e-4, 2e-2
"""Seconds between two polls."""
_BUSY_SECONDS = 5.0
"""Seconds that polls stay frequent after the last sign of a peer."""
_MOST_PEERS = 64
"""Most ranks of other engines that stay connected."""


@dataclass(eq=False)
class ReadPart:
    """Pieces of the memory of one rank of a peer.

    Attributes:
        handle: the library's handle while pieces are read, or None.
    """

    rank: RankMemory
    pieces: PieceSource
    handle: Any = None


@dataclass(eq=False)
class Read:
    """A read of pieces of a peer's ranks into this rank's memory.

    Attributes:
        ready: returns whether the read may begin.
        good: whether the read succeeded, or None while any part is under way.
        failed: whether a part has failed. Then no further part begins.
    """

    parts: Sequence[ReadPart]
    ready: Callable[[], bool]
    begun: bool = False
    failed: bool = False
    good: bool | None = None

    def ended(self) -> bool | None:
        return self.good


class RemoteReads(ABC):
    """Lets peers read some tensors of this rank, and reads the peers' tensors.

    A read cannot be cancelled. Until a read ends, it may write its blocks, even if the peer has
    failed.

    Attributes:
        metadata: the library's description of this rank, by which peers connect to it.
        device: number of the GPU, 0 on a CPU.
    """

    metadata: bytes

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, name: str) -> None:
        on_gpu = device.type == "cuda"
        self.kind: MemoryKind = "VRAM" if on_gpu else "DRAM"
        self.device = (device.index or 0) if on_gpu else 0
        self._tensors = list(tensors)  # Keeps them allocated while peers may read them.
        self._peers: OrderedDict[bytes, Any] = OrderedDict()
        """Connections by the peers' metadata, least recently used first."""
        self._broken: set[bytes] = set()
        self._jobs: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._closed = self._left = False
        self._signs = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def _start_thread(self) -> None:
        self._thread.start()
        # Without this the interpreter could end while the thread is in a call of the library.
        atexit.register(self._leave)

    def _leave(self) -> None:
        self._left = True
        self._jobs.put(None)
        self._thread.join(1.0)

    def read(self, read: Read) -> None:
        """Begins a read. From any thread; returns at once."""
        self._jobs.put(read)

    def expect(self) -> None:
        """Polls often for a while, because a peer is about to read. From any thread."""
        self._jobs.put(None)

    def close(self, patience: float) -> None:
        """Ends the thread once all reads have ended, or after `patience` seconds. Idempotent.

        Memory that is still being read then stays allocated.
        """
        self._closed = True
        self._jobs.put(None)
        self._thread.join(patience)
        if not self._thread.is_alive():
            atexit.unregister(self._leave)
        else:
            _log.error("a read of a peer's memory hangs, so this engine's stays allocated")

    # -- the library ---------------------------------------------------------------------------

    @abstractmethod
    def _connect(self, metadata: bytes) -> Any:
        """Connects to a peer. Returns the library's object for it."""

    @abstractmethod
    def _disconnect(self, peer: Any) -> None:
        """Disconnects from a peer, from which no read is under way."""

    @abstractmethod
    def _begin(self, peer: Any, part: ReadPart, pieces: MemoryPieces) -> Any:
        """Begins to read pieces of a part. Returns a handle."""

    @abstractmethod
    def _done(self, handle: Any) -> bool:
        """Whether pieces have been read. Raises an error if the read failed."""

    def _has_room(self) -> bool:
        """Whether another read of pieces may begin."""
        return True

    def _release(self, handle: Any) -> None:  # noqa: B027
        """Releases a handle, after the read has ended or failed."""

    def _serve(self) -> None:  # noqa: B027
        """Answers peers whose reads need this process."""

    def _shut(self) -> None:  # noqa: B027
        """Releases the library, before the memory that peers read."""

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        if self.kind == "VRAM":
            torch.cuda.set_device(self.device)
        while not self._left and (not self._closed or self._reads):
            busy = bool(self._reads) or time.monotonic() - self._signs < _BUSY_SECONDS
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=_BUSY_NAP if busy else _IDLE_NAP)
                self._signs = time.monotonic()
                if job is not None:
                    self._reads.append(job)
                    continue  # There may be more.
            self._poll()
        self._shut()
        self._tensors.clear()

    def _poll(self) -> None:
        """Begins and ends all reads that can, and answers peers."""
        for read in self._reads:
            read.begun = read.begun or read.ready()
            if read.begun:
                self._begin_parts(read)
                self._check(read)
        self._reads = [read for read in self._reads if read.good is None]
        if self._broken or len(self._peers) > _MOST_PEERS:
            self._forget_peers()
        try:
            self._serve()
        except Exception as error:
            _log.warning("reads of peers: %s: %s", type(error).__name__, error)

    def _begin_parts(self, read: Read) -> None:
        for part in read.parts:
            if read.failed:
                break
            if part.handle is not None or not part.pieces.left or not self._has_room():
                continue
            try:
                peer = self._peer(part.rank.agent)
                pieces = part.pieces.take()
                if pieces is not None:
                    part.handle = self._begin(peer, part, pieces)
            except Exception as error:  # The libraries' errors have no common base.
                self._fail(read, part, error)

    def _check(self, read: Read) -> None:
        """Records which parts of a read have ended."""
        for part in read.parts:
            if part.handle is None:
                continue
            try:
                if not self._done(part.handle):
                    continue
            except Exception as error:
                self._fail(read, part, error)
            with contextlib.suppress(Exception):
                self._release(part.handle)
            part.handle = None
        if any(part.handle is not None for part in read.parts):
            return
        if read.failed or not any(part.pieces.left for part in read.parts):
            read.good = not read.failed

    def _fail(self, read: Read, part: ReadPart, error: Exception) -> None:
        _log.warning("blocks of a peer could not be read: %s: %s", type(error).__name__, error)
        read.failed = True
        self._broken.add(part.rank.agent)

    def _peer(self, metadata: bytes) -> Any:
        """Returns the library's object for a peer, and connects to the peer if it is new."""
        if metadata not in self._peers:
            self._peers[metadata] = self._connect(metadata)
        self._peers.move_to_end(metadata)
        return self._peers[metadata]

    def _forget_peers(self) -> None:
        """Disconnects from peers that failed, and from those above `_MOST_PEERS`.

        Peers with a read under way stay connected, because otherwise the read would look
        successful.
        """
        used = {part.rank.agent for read in self._reads for part in read.parts}
        idle = [metadata for metadata in self._peers if metadata not in used]
        surplus = idle[: max(0, len(self._peers) - _MOST_PEERS)]
        for metadata in {*surplus, *self._broken.intersection(idle)}:
            with contextlib.suppress(Exception):
                self._disconnect(self._peers.pop(metadata))
        self._broken &= self._peers.keys()
