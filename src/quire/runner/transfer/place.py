"""Places outside the device, to and from which KV blocks are moved."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.errors import QuireError
from quire.plan import Transfer


class Place(Protocol):
    """Holds KV blocks outside the device. Its calls begin moves, which end later, in any order.

    Blocks may be of any KV group. Each rank moves the heads that it holds.

    Attributes:
        slots: number of slots of each group that the scheduler books; () if it books none.
    """

    slots: tuple[int, ...]

    def out(self, transfer: Transfer) -> None:
        """Begins to move blocks to this place, with the contents that earlier steps have left."""
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


_PATIENCE = 2e-3
"""Most seconds that a step without rows waits for a transfer to end."""
_NAP = 5e-5


class KVTransfer:
    """Runs the transfers of plans.

    Args:
        places: by name (`Transfer.place`).
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places

    @property
    def slots(self) -> tuple[int, ...]:
        """Number of slots of each group in the place with slots; () without such a place."""
        return next((place.slots for place in self._places.values() if place.slots), ())

    def start(self, transfers: Sequence[Transfer], direction: str) -> None:
        """Begins the transfers of one direction."""
        for transfer in transfers:
            if transfer.direction != direction:
                continue
            place = self._places.get(transfer.place)
            if place is None:
                raise QuireError(f"there is no place {transfer.place!r} to move blocks to")
            if direction == "out":
                place.out(transfer)
            else:
                place.into(transfer)

    def ended(self, patient: bool) -> tuple[list[int], list[int]]:
        """Returns the ids of transfers that finished, and failed, since the last call.

        Args:
            patient: whether to wait a moment if none has ended.
        """
        finished, failed = self._ended()
        deadline = time.monotonic() + _PATIENCE
        while patient and not finished and not failed and self.busy:
            if time.monotonic() > deadline:
                break
            time.sleep(_NAP)
            finished, failed = self._ended()
        return finished, failed

    @property
    def busy(self) -> bool:
        """Whether any transfer has not ended."""
        return any(place.busy for place in self._places.values())

    def _ended(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        for place in self._places.values():
            good, bad = place.ended()
            finished += good
            failed += bad
        return finished, failed

    def close(self) -> None:
        """Waits for copies that have begun. Idempotent."""
        for place in reversed(list(self._places.values())):
            place.close()
