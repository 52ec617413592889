"""News from threads to the engine's loop."""

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
    """A queue with a descriptor that is readable while something may be in it.

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
        """Makes the loop turn."""
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
        """Closes the descriptor; nothing wakes the loop any more. Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


# The connection of a reader, as the engine's loop sees it: calls to it, and news of it.


class ReaderLink(Protocol):
    """A connection to a reader. Neither call waits."""

    def send(self, message: Message) -> None:
        """Sends a message, a batch with its blocks."""
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
    """The end of a connection: nothing reads memory for it any more.

    Attributes:
        broken: Whether an invalid message ended it.
    """

    link: ReaderLink
    broken: bool = False
