"""Threads that ask peers for prompts and fetch their blocks to the memory between engines."""

from __future__ import annotations

import logging
import mmap
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from quire.features.disaggregation.free_slots import FreeSlots
from quire.features.disaggregation.listener import View
from quire.features.disaggregation.messages import (
    BatchAck,
    BlockBatch,
    BrokenMessageError,
    End,
    Grant,
    GrantAccepted,
    GrantRefused,
    KeepAlive,
    MapReply,
    MemoryHandle,
    OpenGrant,
    PeerChannel,
)
from quire.features.disaggregation.peer_list import Peer, PeerError, PeerList
from quire.features.disaggregation.prompt_fetches import BlocksArrived, PullEnded, PullOrder
from quire.runner.transfer.shared_memory import read_shared
from quire.runner.transfer.threads import DaemonThreads

_log = logging.getLogger(__name__)

Tell = Callable[[BlocksArrived | PullEnded], None]

_THREADS = 16
_CONNECT_SECONDS = 2.0
_ATTEMPTS = 2
_MOST_BLOCKS = 1 << 12
_MOST_ID = (1 << 31) - 1
"""Largest number of a batch or block that is accepted from a peer."""
_CLOSE_SECONDS = 1.0
_OF_THE_PROMPT = (400, 413)
"""Statuses of a peer for which only this prompt is too long. It may be asked for other prompts."""
_STATUS_OUTCOMES = {
    403: "refused",
    409: "refused",
    410: "timeout",
    503: "overloaded",
    504: "timeout",
}


class _NoRoomError(Exception):
    """No slots became free in time for the peer's blocks."""


class PullThreads:
    """Runs pulls on threads.

    Args:
        slots: slots for the blocks; None if the engine reads them from the peer's cache.
        view: returns the bytes of a slot; None in the same case.
        lease: seconds that a peer may be silent.
    """

    def __init__(
        self,
        peers: PeerList,
        slots: FreeSlots | None,
        view: View | None,
        tell: Tell,
        lease: float,
    ) -> None:
        self.peers = peers
        self.slots = slots
        self.view = view
        self.tell = tell
        self.lease = lease
        self._threads = DaemonThreads(_THREADS, "kv-pull")

    @property
    def up(self) -> int:
        return self.peers.up

    def start(self, order: PullOrder) -> PeerPull:
        pull = PeerPull(self, order)
        pull.job = self._threads.submit(pull.run)
        return pull

    def close(self) -> None:
        self._threads.close(_CLOSE_SECONDS)


class PeerPull:
    """Asks a peer for one prompt, and fetches its blocks.

    Attributes:
        job: the future of its run. It is set before `cancel` can be called.
    """

    job: Future[None]

    def __init__(self, threads: PullThreads, order: PullOrder) -> None:
        self._threads = threads
        self._order = order
        self._cancelled = threading.Event()
        self._channel: PeerChannel | None = None
        self._lock = threading.Lock()
        self._asked = self._computed = 0.0
        self._moved: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def cancel(self) -> None:
        with self._lock:
            if self._cancelled.is_set():
                return
            self._cancelled.set()
            if self._channel is not None:
                self._channel.end()
        self._moved.put(False)
        if self.job.cancel():  # It has not begun, because all threads are busy.
            self._threads.tell(PullEnded(self, "aborted"))

    def moved(self, good: bool) -> None:
        self._moved.put(good)

    def run(self) -> None:
        """Runs on a thread. It reports every batch to the loop and, at last, its end."""
        begun = time.monotonic()
        try:
            outcome, reason = self._pull(begun)
        except _NoRoomError:  # Other prompts hold the slots, so the peer is not at fault.
            lease = self._threads.lease
            outcome, reason = "overloaded", f"there was no room here for blocks for {lease:g} s"
        except Exception as error:  # The loop must get an end, or the request waits for ever.
            _log.exception("a pull failed")
            outcome, reason = "broken", type(error).__name__
        if self._cancelled.is_set():
            outcome = "aborted"
        seconds = time.monotonic() - begun - self._computed
        self._threads.tell(PullEnded(self, outcome, reason, seconds, self._asked))

    def _pull(self, begun: float) -> tuple[str, str]:
        outcome, reason = "dead", "no peer can be asked"
        last: Peer | None = None
        for _ in range(_ATTEMPTS):
            peer = self._threads.peers.choose(last, self._order.peer)
            if peer is None or self._cancelled.is_set():
                break
            last = peer
            peer.pulls += 1
            try:
                order = self._order
                grant = peer.ask(
                    order.tokens.tolist(), order.first, order.salt, order.traceparent, order.weights
                )
                self._asked = time.monotonic() - begun
                return self._redeem(peer, grant)
            except PeerError as error:
                outcome, reason = error.outcome, str(error)
                if error.status not in _OF_THE_PROMPT:
                    peer.failed(outcome)
                _log.warning("peer %s gave no prompt (%s): %s", peer.url, outcome, reason)
            finally:
                peer.pulls -= 1
        return outcome, reason

    def _redeem(self, peer: Peer, grant: Grant) -> tuple[str, str]:
        """Fetches a grant's blocks. Raises PeerError if it failed before any block came."""
        try:
            connected = socket.create_connection((peer.host, grant.port), _CONNECT_SECONDS)
        except OSError as error:
            raise PeerError("dead", f"{peer.host}:{grant.port}: {error}") from None
        connected.settimeout(self._threads.lease)
        channel = PeerChannel(connected)
        memory: PeerMemory | None = None
        try:
            # Sent even if nobody waits any more, so that the peer notices the connection's end.
            channel.send(OpenGrant(grant))
            with self._lock:
                self._channel = channel
            while not self._cancelled.is_set():
                match channel.receive():
                    case GrantAccepted(MemoryHandle() as handle):
                        memory = map_memory(handle)
                        channel.send(MapReply(memory is not None))
                    case GrantAccepted() | KeepAlive():
                        pass
                    case BlockBatch() as batch:
                        trouble = self._take(channel, peer, memory, batch)
                        if trouble:
                            return "broken", trouble
                    case End(computed):
                        self._computed = computed
                        return "done", ""
                    case GrantRefused(status, why):
                        return _STATUS_OUTCOMES.get(status, "refused"), f"{status}: {why}"
                    case other:
                        return "broken", f"unexpected {type(other).__name__}"
            return "aborted", ""
        except TimeoutError:
            peer.failed("timeout")
            return "timeout", f"{peer.url} was silent for {self._threads.lease:g} s"
        except OSError as error:
            if not self._cancelled.is_set():
                peer.failed("dead")
            return "dead", f"{peer.url}: {error}"
        except BrokenMessageError as error:
            return "broken", f"{peer.url}: {error}"
        finally:
            with self._lock:
                self._channel = None
            channel.close()
            if memory is not None:
                memory.close()

    def _take(
        self, channel: PeerChannel, peer: Peer, memory: PeerMemory | None, batch: BlockBatch
    ) -> str:
        """Moves a batch to slots or blocks of this engine. Returns the fault; "" if there is
        none."""
        threads = self._threads
        if threads.slots is None or threads.view is None:
            return self._read(channel, peer, batch)
        if (
            not 0 < batch.count <= _MOST_BLOCKS
            or not 0 <= batch.group < threads.slots.groups
            or (batch.slots is not None and (memory is None or len(batch.slots) != batch.count))
        ):
            return "an invalid batch"
        # A batch may have more blocks than this engine has slots.
        for begin in range(0, batch.count, threads.slots.total):
            part = range(begin, min(begin + threads.slots.total, batch.count))
            slots = threads.slots.await_many(batch.group, len(part), threads.lease)
            if not slots:
                raise _NoRoomError
            try:
                for i, slot in zip(part, slots, strict=True):
                    into = threads.view(batch.group, slot)
                    if batch.slots is not None and memory is not None:
                        memory.copy_block(batch.group, batch.slots[i], into)
                    else:
                        channel.receive_into(into)
            except BaseException:
                threads.slots.give(batch.group, slots)
                raise
            threads.tell(BlocksArrived(self, batch.group, batch.first + begin, slots))
        channel.send(BatchAck(batch.number))
        return ""

    def _read(self, channel: PeerChannel, peer: Peer, batch: BlockBatch) -> str:
        """Lets the engine read a batch from the peer's cache. Returns the fault; "" if there is
        none."""
        blocks = batch.slots or []
        if not 0 < len(blocks) == batch.count <= _MOST_BLOCKS or not (
            0 <= min(blocks) <= max(blocks) <= _MOST_ID
        ):
            return "an invalid batch"
        arrived = BlocksArrived(self, batch.group, batch.first, blocks, peer.memory, batch.step)
        self._threads.tell(arrived)
        try:
            good = self._moved.get(timeout=self._threads.lease)
        except queue.Empty:
            raise TimeoutError from None
        if not good:
            raise ConnectionError("blocks could not be read")
        channel.send(BatchAck(batch.number))
        return ""


class PeerMemory:
    """A peer's memory, mapped for reading."""

    def __init__(self, handle: MemoryHandle, memory: mmap.mmap) -> None:
        self._handle = handle
        self._memory = memory
        self._bytes: Any = np.frombuffer(memory, dtype=np.uint8)

    def copy_block(self, group: int, slot: int, into: memoryview) -> None:
        """Copies a slot's bytes without holding the interpreter's lock. Raises BrokenMessageError
        if the slot is outside of the memory."""
        size = self._handle.sizes[group]
        begin = self._handle.starts[group] + slot * size
        if slot < 0 or begin + size > len(self._bytes):
            raise BrokenMessageError(f"slot {slot} of group {group}")
        np.copyto(np.frombuffer(into, dtype=np.uint8), self._bytes[begin : begin + size])

    def close(self) -> None:
        self._bytes = None  # This reference would keep the memory mapped.
        self._memory.close()


def map_memory(handle: MemoryHandle) -> PeerMemory | None:
    """Maps a peer's memory. Returns None if it is on another host or may not be read."""
    memory = read_shared(handle.pid, handle.descriptor, handle.size, handle.token)
    return None if memory is None else PeerMemory(handle, memory)
