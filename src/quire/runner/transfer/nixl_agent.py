"""Reads of other engines' memory by NIXL, on a thread that makes all calls of the library.

The library's own thread would poll without a pause, at the cost of a core. This one polls often
while something is read from or by peers, and seldom otherwise. It also may wait: on one host, a
read is over when the call that begins it returns.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError, QuireError
from quire.extras import require_nixl
from quire.runner.transfer.engine_memory import MemoryKind, MemoryPieces, RankMemory

_log = logging.getLogger(__name__)

_BACKEND = "UCX"
_BUSY_NAP, _IDLE_NAP = 2e-4, 2e-2
"""Seconds between two polls."""
_BUSY_SECONDS = 5.0
"""For how long polls stay frequent behind the last sign of a peer."""
_MOST_PEERS = 64
"""Ranks of other engines that stay connected."""


@dataclass(eq=False)
class ReadPart:
    """MemoryPieces of one rank of a peer. handle: of the library, while they are read."""

    rank: RankMemory
    pieces: MemoryPieces
    handle: Any = None


@dataclass(eq=False)
class Read:
    """MemoryPieces of a peer's ranks on their way into this rank's memory.

    ready: whether it may begin. good: how it ended; None: it has not, on all parts. failed: a part
    has, and no further one is begun.
    """

    parts: Sequence[ReadPart]
    ready: Callable[[], bool]
    begun: bool = False
    failed: bool = False
    good: bool | None = None

    def ended(self) -> bool | None:
        return self.good


class NixlAgent:
    """The library's agent of this rank, which lets peers read some tensors and reads theirs.

    What a read has begun to fill may be written until it ends, whatever becomes of the peer: the
    library cannot take a read back.

    Raises:
        ConfigError: the library is not installed, or cannot be used with this memory.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        name = require_nixl()
        on_gpu = device.type == "cuda"
        self.kind: MemoryKind = "VRAM" if on_gpu else "DRAM"
        self.device = (device.index or 0) if on_gpu else 0
        self._tensors = list(tensors)  # as long as a peer may read them
        try:
            nixl = importlib.import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)
            settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            self._agent = nixl.nixl_agent(secrets.token_hex(8), settings)
            regions = [(t.data_ptr(), t.nbytes, self.device, "") for t in tensors if t.nbytes]
            self._agent.register_memory(regions, self.kind, backends=[_BACKEND])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # the library's own, which have no common base
            raise ConfigError(
                f"transport=nixl: {name} cannot be used here ({type(error).__name__}: {error})",
                "transport",
            ) from error
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        """Names of peers' agents by their metadata, those that were read least recently first."""
        self._broken: set[bytes] = set()
        self._jobs: queue.SimpleQueue[Read | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._closed = self._left = False
        self._signs = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-nixl")
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
        """Makes the agent attentive: a peer is about to read. From any thread."""
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
        self._agent = None  # before the memory that it has registered
        self._tensors.clear()

    def _turn(self) -> None:
        """Begins and ends what can be; also answers the peers that read, which needs this where the
        network cannot do so alone."""
        for read in self._reads:
            if not read.begun and read.ready():
                self._begin(read)
            if read.begun:
                self._check(read)
        self._reads = [read for read in self._reads if read.good is None]
        if self._broken or len(self._peers) > _MOST_PEERS:
            self._forget_peers()
        try:
            self._agent.get_new_notifs(backends=[_BACKEND])
        except Exception as error:
            _log.warning("nixl: %s: %s", type(error).__name__, error)

    def _begin(self, read: Read) -> None:
        read.begun = True
        for part in read.parts:
            if read.failed:
                break
            try:
                sizes, rank = part.pieces.sizes, part.rank
                here = self._list(part.pieces.here, sizes, self.kind, self.device)
                there = self._list(part.pieces.there, sizes, rank.kind, rank.device)
                peer = self._peer(rank.agent)
                part.handle = self._agent.initialize_xfer(
                    "READ", here, there, peer, b"", backends=[_BACKEND]
                )
                self._agent.transfer(part.handle)
            except Exception as error:
                self._fail(read, part, error)

    def _check(self, read: Read) -> None:
        """Takes note of the ends of a read's parts."""
        for part in read.parts:
            if part.handle is None:
                continue
            try:
                state = self._agent.check_xfer_state(part.handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    raise QuireError(f"the read ended as {state}")
            except Exception as error:
                self._fail(read, part, error)
            with contextlib.suppress(Exception):
                part.handle.release()
            part.handle = None
        if all(part.handle is None for part in read.parts):
            read.good = not read.failed

    def _fail(self, read: Read, part: ReadPart, error: Exception) -> None:
        _log.warning("blocks of a peer could not be read: %s: %s", type(error).__name__, error)
        read.failed = True
        self._broken.add(part.rank.agent)

    def _list(self, addresses: Any, sizes: Any, kind: MemoryKind, device: int) -> Any:
        rows = np.stack([addresses, sizes, np.full(len(sizes), device, dtype=np.int64)], axis=1)
        return self._agent.get_xfer_descs(rows.astype(np.uint64), kind)

    def _peer(self, metadata: bytes) -> str:
        """Returns the name of a peer's agent, which is met first where it is new."""
        if metadata not in self._peers:
            found = self._agent.add_remote_agent(metadata)
            self._peers[metadata] = found.decode() if isinstance(found, bytes) else found
        self._peers.move_to_end(metadata)
        return self._peers[metadata]

    def _forget_peers(self) -> None:
        """Ends the connections to peers that failed, and to those beyond `_MOST_PEERS`. Never one
        over which something is being read: its end could not be told from a good one."""
        used = {part.rank.agent for read in self._reads for part in read.parts}
        idle = [metadata for metadata in self._peers if metadata not in used]
        surplus = idle[: max(0, len(self._peers) - _MOST_PEERS)]
        for metadata in {*surplus, *self._broken.intersection(idle)}:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._peers.pop(metadata))
        self._broken &= self._peers.keys()
