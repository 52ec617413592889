"""The connection of a reader, as the engine's loop sees it: calls to it, and news of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from quire.disagg.messages import End, Message


class ReaderLink(Protocol):
    """A connection to a reader. Neither call waits."""

    def send(self, message: Message) -> None:
        """Sends a message, a batch with its blocks."""
        ...

    def end_after(self, numbers: Collection[int], end: End) -> None:
        """Sends `end` once the reader took the batches of these numbers, unless `close` was called
        before. So it need not wait for the loop, which may be in the midst of a step."""
        ...

    def close(self) -> None:
        """Ends the connection once what was sent before has left, or cannot. `Stopped` is told when
        no thread of it touches memory any more. Idempotent."""
        ...


@dataclass(slots=True)
class Heard:
    """A reader's message."""

    link: ReaderLink
    message: Message


@dataclass(slots=True)
class Stopped:
    """The end of a connection: nothing reads memory for it any more. broken: by what was no valid
    message."""

    link: ReaderLink
    broken: bool = False
