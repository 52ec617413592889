"""The interface of places outside the device, to and from which KV blocks are moved."""

from __future__ import annotations

from typing import Protocol

from quire.plan import Transfer


class Place(Protocol):
    """Holds KV blocks outside the device. Its calls begin moves, which end later, in any order.

    Blocks may be of any KV group. Each rank moves the heads that it holds.
    """

    def out(self, transfer: Transfer) -> None:
        """Begins to move blocks to this place, as earlier steps have left them."""
        ...

    def into(self, transfer: Transfer) -> None:
        """Begins to move blocks from this place to the device."""
        ...

    def ended(self) -> tuple[list[int], list[int]]:
        """Returns the ids of the moves that finished, and failed, since the last call."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any move has not ended."""
        ...

    def close(self) -> None:
        """Waits for all work that still reads or writes memory. Idempotent."""
        ...
