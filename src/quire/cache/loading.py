"""Blocks whose contents are being transferred to the device."""

from __future__ import annotations

from dataclasses import dataclass

from quire.arrays import Int32, int32
from quire.cache.block_hash import Namespace
from quire.cache.block_manager import BlockManager
from quire.cache.prefix_tree import Match


@dataclass(slots=True)
class LoadingPrefix:
    """Blocks booked for a prefix on its way.

    lane: the loading lane that holds them.
    tokens: int32 [whole blocks], the prefix; its first `start` tokens are on the device already.
    blocks: int32 [n], blocks of the group that keeps every position.
    """

    lane: int
    tokens: Int32
    start: int
    blocks: Int32


class PrefixLoader:
    """Books blocks for prefixes that transfers bring, and enters them into the prefix tree.

    Until a transfer ends, a lane of `BlockManager.loading_lanes` holds its blocks and the prefix
    before them, as a request's lane would.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def block_hash(self, namespace: Namespace, match: Match) -> bytes:
        """Returns the hash of a match's last whole block."""
        return self._manager.tree.block_hash(match, namespace)

    def begin(
        self, namespace: Namespace, match: Match, tokens: Int32, known: int
    ) -> LoadingPrefix | None:
        """Books blocks for the rest of `tokens`, int32 [whole blocks], after a match.

        Returns None if there is no room now for `known` tokens and one spare block for each
        running request.
        """
        manager, length = self._manager, len(tokens)
        spare = int((manager.groups[0].end > 0).sum())
        if not manager.loading_lanes or not self._has_room(match, known, spare):
            return None
        lane = manager.loading_lanes[-1]
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
        manager.loading_lanes.pop()
        size = manager.block_size
        blocks = manager.groups[0].table[lane, match.length // size : length // size].copy()
        return LoadingPrefix(lane, tokens, match.length, blocks)

    def _has_room(self, match: Match, known: int, spare: int) -> bool:
        manager = self._manager
        held = match.length // manager.block_size
        return all(
            group.blocks(known) - held + manager.reclaimed(g, match, int32([])) + spare
            <= manager.available(g)
            for g, group in enumerate(manager.groups)
        )

    def end(self, loading: LoadingPrefix, good: bool) -> None:
        """Frees the lane; the prefix enters the tree if its contents have arrived (`good`)."""
        if good:
            self._manager.enter_rest(loading.lane, loading.tokens, len(loading.tokens))
        self._manager.release(loading.lane)
        self._manager.loading_lanes.append(loading.lane)
