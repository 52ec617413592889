"""Blocks whose contents are on their way from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.arrays import Int32, int32
from quire.cache.chain import Namespace

if TYPE_CHECKING:
    from quire.cache.block_manager import BlockManager
    from quire.cache.prefix_tree import Match

RECEIVERS = 64
"""Lanes beyond those of requests, which no plan knows. Each holds what one `Incoming` needs."""


@dataclass(slots=True)
class Incoming:
    """Blocks booked for what follows the first `start` of `tokens`, int32 [whole blocks]. blocks:
    int32 [n], of the group that keeps every position."""

    lane: int
    tokens: Int32
    start: int
    blocks: Int32


class Receiver:
    """Books blocks for a prefix that comes by transfers, and makes it one like any other once it
    has come. Until then its blocks, and the prefix that it continues, are held as by a request."""

    def __init__(self, manager: BlockManager, first_lane: int) -> None:
        self._manager = manager
        self.free = list(range(first_lane, first_lane + RECEIVERS))

    @property
    def busy(self) -> bool:
        return len(self.free) < RECEIVERS

    def name(self, namespace: Namespace, match: Match) -> bytes:
        """Of the contents that a match ends with (`cache/chain.py`)."""
        return self._manager.tree.name(match, namespace)

    def begin(
        self, namespace: Namespace, match: Match, tokens: Int32, known: int
    ) -> Incoming | None:
        """Book blocks for what follows a match, up to the end of `tokens`, int32 [whole blocks].
        None where there is no room for `known` tokens now, with a block to spare for each running
        request."""
        manager, length = self._manager, len(tokens)
        spare = int((manager.groups[0].end > 0).sum())
        if not self.free or not self._has_room(match, known, spare):
            return None
        lane = self.free[-1]
        marks = [group.mark() for group in manager.groups]
        admitted = manager.admit(
            lane,
            namespace,
            match,
            computed=match.length,
            chunk_end=length,
            known=length,
            spare=spare,
        )
        if not admitted:
            return None
        for group, mark in zip(manager.groups, marks, strict=True):
            group.forget_appends(mark)
        self.free.pop()
        size = manager.block_size
        blocks = manager.groups[0].table[lane, match.length // size : length // size].copy()
        return Incoming(lane, tokens, match.length, blocks)

    def _has_room(self, match: Match, known: int, spare: int) -> bool:
        manager = self._manager
        held = match.length // manager.block_size
        return all(
            group.blocks(known) - held + manager.woken(g, match, int32([])) + spare
            <= manager.available(g)
            for g, group in enumerate(manager.groups)
        )

    def end(self, incoming: Incoming, good: bool) -> None:
        """The contents are there, or they are not."""
        if good:
            self._manager.enter_rest(incoming.lane, incoming.tokens, len(incoming.tokens))
        self._manager.release(incoming.lane)
        self.free.append(incoming.lane)
