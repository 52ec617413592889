"""News from threads to the engine's loop."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Generic, TypeVar

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
