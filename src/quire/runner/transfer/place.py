"""The interface of places outside of the device, where KV blocks go to and come from."""

from __future__ import annotations

from typing import Protocol

from quire.plan import Transfer


class Place(Protocol):
    """Holds KV blocks outside of the device. Its calls begin moves, which end later, in any order.

    Blocks are of any KV group. On each rank a move is of the heads that the rank holds.
    """

    def out(self, transfer: Transfer) -> None:
        """Begins to move blocks here. They are read as the steps before left them."""
        ...

    def into(self, transfer: Transfer) -> None:
        """Begins to bring blocks from here."""
        ...

    def ended(self) -> tuple[list[int], list[int]]:
        """Returns the ids of the moves that finished, and failed, since the last call."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any move has not ended."""
        ...

    def close(self) -> None:
        """Waits for what still reads or writes memory. Idempotent."""
        ...
