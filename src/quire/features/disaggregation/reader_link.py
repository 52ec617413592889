"""Events from threads to the engine's loop."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from quire.features.disaggregation.messages import End, Message

Event = TypeVar("Event")


class Inbox(Generic[Event]):
    """A queue of events. Its descriptor is readable while the queue may hold an event.

    Any thread may `put`; the loop calls `drain`.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        self._events.put(event)
        self.wake()

    def wake(self) -> None:
        """Wakes the loop."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def drain(self) -> list[Event]:
        """Returns all events that have come, in order."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._open:
                os.eventfd_read(self.fd)
        found: list[Event] = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def close(self) -> None:
        """Closes the descriptor. The inbox then wakes the loop no more. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


# A reader's connection as the engine's loop sees it: the loop's calls to it, and its events.


class ReaderLink(Protocol):
    """A connection to a reader. No call waits."""

    def send(self, message: Message) -> None:
        """Sends a message. After a `BlockBatch` it also sends the blocks, if they must follow."""
        ...

    def end_after(self, numbers: Collection[int], end: End) -> None:
        """Sends `end` once the reader has acknowledged the batches of these numbers.

        The connection does this by itself because the loop may be in the midst of a step. After
        `close` it sends nothing.
        """
        ...

    def close(self) -> None:
        """Ends the connection once every earlier message has left, or cannot leave.

        A `LinkClosed` event follows when none of its threads touches memory any more. Idempotent.
        """
        ...


@dataclass(slots=True)
class ReaderMessage:
    """A reader's message."""

    link: ReaderLink
    message: Message


@dataclass(slots=True)
class LinkClosed:
    """The end of a connection. None of its threads reads memory any more.

    Attributes:
        broken: Whether an invalid message ended it.
    """

    link: ReaderLink
    broken: bool = False
