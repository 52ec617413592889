"""Reads of other engines' memory, on a thread that makes all calls of the library for it.

A library's own thread would poll without a pause, at the cost of a core. This one polls often while
something is read from or by peers, and seldom otherwise. It also may wait: to meet a peer, or for a
read that is over when the call that begins it returns.
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
"""For how long polls stay frequent behind the last sign of a peer."""
_MOST_PEERS = 64
"""Ranks of other engines that stay connected."""


@dataclass(eq=False)
class ReadPart:
    """Pieces of the memory of one rank of a peer. handle: of the library, while some are read."""

    rank: RankMemory
    pieces: PieceSource
    handle: Any = None


@dataclass(eq=False)
class Read:
    """Pieces of a peer's ranks on their way into this rank's memory.

    ready: whether it may begin. good: how it ended; None: it has not, on all parts. failed: a part
    has, and nothing further is begun.
    """

    parts: Sequence[ReadPart]
    ready: Callable[[], bool]
    begun: bool = False
    failed: bool = False
    good: bool | None = None

    def ended(self) -> bool | None:
        return self.good


class RemoteReads(ABC):
    """Lets peers read some tensors of this rank, and reads theirs.

    What a read has begun to fill may be written until it ends, whatever becomes of the peer: it is
    never taken back.

    metadata: by which peers reach this rank, in the words of the library. device: the GPU's number,
    0 on a CPU.
    """

    metadata: bytes

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, name: str) -> None:
        on_gpu = device.type == "cuda"
        self.kind: MemoryKind = "VRAM" if on_gpu else "DRAM"
        self.device = (device.index or 0) if on_gpu else 0
        self._tensors = list(tensors)  # as long as a peer may read them
        self._peers: OrderedDict[bytes, Any] = OrderedDict()
        """Answers of `_meet` by peers' metadata, those that were read least recently first."""
        self._broken: set[bytes] = set()
        self._jobs: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._closed = self._left = False
        self._signs = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def _start_thread(self) -> None:
        self._thread.start()
        # The interpreter's end would find the thread in a call of the library.
        atexit.register(self._leave)

    def _leave(self) -> None:
        self._left = True
        self._jobs.put(None)
        self._thread.join(1.0)

    def read(self, read: Read) -> None:
        """Begins a read. From any thread; returns at once."""
        self._jobs.put(read)

    def expect(self) -> None:
        """Becomes attentive: a peer is about to read. From any thread."""
        self._jobs.put(None)

    def close(self, patience: float) -> None:
        """Ends the thread once nothing is read any more, or after `patience` seconds: what is then
        still being read stays allocated. Idempotent."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(patience)
        if not self._thread.is_alive():
            atexit.unregister(self._leave)
        else:
            _log.error("a peer's memory is still being read: this engine's is not given back")

    # -- what a library does -------------------------------------------------------------------

    @abstractmethod
    def _meet(self, metadata: bytes) -> Any:
        """Makes ready to read a peer; returns what stands for it."""

    @abstractmethod
    def _part(self, peer: Any) -> None:
        """Undoes `_meet`. Nothing is being read there."""

    @abstractmethod
    def _begin(self, peer: Any, part: ReadPart, pieces: MemoryPieces) -> Any:
        """Begins to read pieces of a part; returns their handle."""

    @abstractmethod
    def _over(self, handle: Any) -> bool:
        """Tells whether pieces have been read; raises where that failed."""

    def _has_room(self) -> bool:
        """Tells whether more pieces may be under way."""
        return True

    def _release(self, handle: Any) -> None:  # noqa: B027
        """Gives up the handle of pieces that were read, or were not."""

    def _serve(self) -> None:  # noqa: B027
        """Does what peers that read need this process for."""

    def _shut(self) -> None:  # noqa: B027
        """Gives the library up, before the memory that peers may read."""

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
                    continue  # there may be more
            self._turn()
        self._shut()
        self._tensors.clear()

    def _turn(self) -> None:
        """Begins and ends what can be, and serves those that read."""
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
            except Exception as error:  # a library's own, which have no common base
                self._fail(read, part, error)

    def _check(self, read: Read) -> None:
        """Takes note of the ends of a read's parts."""
        for part in read.parts:
            if part.handle is None:
                continue
            try:
                if not self._over(part.handle):
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
        """Returns what stands for a peer, which is met first where it is new."""
        if metadata not in self._peers:
            self._peers[metadata] = self._meet(metadata)
        self._peers.move_to_end(metadata)
        return self._peers[metadata]

    def _forget_peers(self) -> None:
        """Parts from peers that failed, and from those beyond `_MOST_PEERS`. Never from one of
        which something is being read: its end could not be told from a good one."""
        used = {part.rank.agent for read in self._reads for part in read.parts}
        idle = [metadata for metadata in self._peers if metadata not in used]
        surplus = idle[: max(0, len(self._peers) - _MOST_PEERS)]
        for metadata in {*surplus, *self._broken.intersection(idle)}:
            with contextlib.suppress(Exception):
                self._part(self._peers.pop(metadata))
        self._broken &= self._peers.keys()
