"""Batches whose layers are yet to be written, for a reader that may come in the midst of a step."""

from __future__ import annotations

import threading
from typing import Generic, Protocol, TypeVar

from quire.disagg.messages import Accepted, BlockBatch, Message


class _Link(Protocol):
    def send(self, message: Message) -> None: ...


Link = TypeVar("Link", bound=_Link)


class LayerBatches(Generic[Link]):
    """Batches of a prompt for its reader, the first to show its grant. The loop names them, and the
    thread of the reader's connection sends those that were named before it came: the loop hears of
    it only when the step is over. From any thread.

    link: of the reader, once it has come.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self._named: list[BlockBatch] = []
        self._lock = threading.Lock()

    def send(self, batch: BlockBatch) -> None:
        """Sends a batch as soon as there is a reader."""
        with self._lock:
            if self.link is None:
                self._named.append(batch)
            else:
                self.link.send(batch)

    def meet(self, link: Link) -> None:
        """Greets the reader, if none has come before."""
        with self._lock:
            if self.link is None:
                self.link = link
                link.send(Accepted(None))
                for batch in self._named:
                    link.send(batch)
