"""Blocks whose contents are being transferred to the device."""

from __future__ import annotations

from dataclasses import dataclass

from quire.arrays import Int32, int32
from quire.cache.block_hash import Namespace
from quire.cache.block_manager import BlockManager
from quire.cache.prefix_tree import Match, pack


@dataclass(slots=True)
class LoadingPrefix:
    """Blocks booked for a prefix that a transfer brings.

    Attributes:
        lane: the loading lane that holds the blocks.
        tokens: int32 [n], the prefix.
        start: number of leading tokens that are on the device already.
        places: for each KV group, the block table index of the first block to fill.
        blocks: for each KV group, int32 [n], the blocks to fill. A group of recurrent states has
            one block.
        tail: whether the last block is a partly filled one that the tree gave up.
        copied: whether the next plan copies the last block, so that its contents come later.
    """

    lane: int
    tokens: Int32
    start: int
    places: list[int]
    blocks: list[Int32]
    tail: bool = False
    copied: bool = False


class PrefixLoader:
    """Books blocks for prefixes that transfers bring, and enters them into the prefix tree.

    Until a transfer ends, a lane of `BlockManager.loading_lanes` holds all blocks of the prefix,
    like a request's lane.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    @property
    def tails(self) -> bool:
        """Whether a prefix may end inside a block. A recurrent state belongs to a block's end."""
        return all(group.grows for group in self._manager.groups)

    def block_hash(self, namespace: Namespace, match: Match) -> bytes:
        """Returns the hash of a match's last whole block."""
        return self._manager.tree.block_hash(match, namespace)

    def kept(self, match: Match, tokens: Int32) -> Match:
        """Returns the longest prefix, in whole blocks, whose KV is on the device.

        Some groups may be unable to resume after it.

        Args:
            match: the longest prefix after which every group can resume.
            tokens: int32 [n].
        """
        size = self._manager.block_size
        above = match.node.parent or match.node
        node, whole, _ = above.follow(pack(tokens[above.end * size :]), 4 * size)
        return Match(whole * size, whole, node, known=whole)

    def kept_tail(self, kept: Match, tokens: Int32) -> Match | None:
        """Returns the prefix `kept` with a tail after it, or None if the tree has no such tail."""
        size = self._manager.block_size
        if kept.whole < kept.node.end:
            return None
        child, shared = kept.node.closest(tokens[kept.length : kept.length + size].tobytes())
        if child is None or shared < child.tokens or shared == size:
            return None
        length = kept.length + shared
        return Match(length, kept.whole, kept.node, child.at(0), child, kept.whole)

    def block_hashes(self, namespace: Namespace, match: Match, first: int) -> list[bytes]:
        """Returns the hashes of a match's whole blocks from `first` on."""
        stride, hashes = 4 * self._manager.block_size, list[bytes]()
        end, node = match.whole, match.node.upto(match.whole)
        while end > first and node.parent is not None:
            begin = max(first, node.start)
            own = range(end - node.start - 1, begin - node.start - 1, -1)
            hashes += [node.block_hash(place, stride) for place in own]
            end, node = begin, node.parent
        return hashes[::-1]

    def begin(
        self, namespace: Namespace, match: Match, tokens: Int32, known: int
    ) -> LoadingPrefix | None:
        """Books blocks for the rest of a prefix after a match, and a block for a recurrent state.

        Returns None if too few blocks are available for `known` tokens and one spare block for each
        running request.

        Args:
            tokens: int32 [n], the prefix; in whole blocks unless `tails`.
            known: number of tokens of the request that waits for the prefix.
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
            computed=length,
            chunk_end=length,
            known=length,
            spare=spare,
        )
        if not admitted:
            return None
        for group, mark in zip(manager.groups, marks, strict=True):
            group.forget_appends(mark)
        manager.loading_lanes.pop()
        groups = manager.groups
        here = -(-match.length // manager.block_size)
        places = [max(int(group.start[lane]), here * group.grows) for group in groups]
        blocks = [
            group.table[lane, place : group.end[lane]].copy()
            for group, place in zip(groups, places, strict=True)
        ]
        return LoadingPrefix(lane, tokens, match.length, places, blocks)

    def _has_room(self, match: Match, known: int, spare: int) -> bool:
        """Whether the request can book its blocks once the prefix has arrived.

        Checks only groups that keep every position. In other groups the request needs no more
        blocks than the prefix.
        """
        manager = self._manager
        return all(
            group.blocks(known) - match.whole + manager.reclaimed(g, match, int32([])) + spare
            <= manager.available(g)
            for g, group in enumerate(manager.groups)
            if group.sparse is None
        )

    def hold(self, namespace: Namespace, tokens: Int32) -> LoadingPrefix | None:
        """Holds the blocks that a request would need to resume after a prefix, until `release`.

        The tree gives up a tail that ends with the prefix. The next plan copies a recurrent state,
        and a last block that other requests have filled further.

        Returns None if the prefix is not cached, or if no slot is available to copy a state to.

        Args:
            tokens: int32 [n], the prefix; in whole blocks unless `tails`.
        """
        manager, length = self._manager, len(tokens)
        match = manager.match(namespace, tokens, length, whole_only=not self.tails)
        if not manager.loading_lanes or match.length < length:
            return None
        lane = manager.loading_lanes[-1]
        marks = [group.mark() for group in manager.groups]
        known, tail = length, match.tail
        if tail is not None and length - match.whole * manager.block_size == tail.tokens:
            known = match.whole * manager.block_size
            match = Match(known, match.whole, match.node, known=match.known)
        else:
            tail = None
        admitted = manager.admit(
            lane, namespace, match, computed=length, chunk_end=known, known=known, spare=0
        )
        if not admitted:
            return None
        for group, mark in zip(manager.groups, marks, strict=True):
            group.forget_appends(mark)
        manager.loading_lanes.pop()
        if tail is not None:
            for group, block in zip(manager.groups, manager.tree.take_tail(tail), strict=True):
                group.adopt_tail(lane, block)
        places = [int(group.start[lane]) for group in manager.groups]
        blocks = [group.held(lane).copy() for group in manager.groups]
        copied = match.source is not None
        return LoadingPrefix(lane, tokens, length, places, blocks, tail is not None, copied)

    def release(self, held: LoadingPrefix) -> None:
        """Releases the blocks of `hold`. The tree gets its tail back."""
        self._manager.release(held.lane, held.tokens if held.tail else None, len(held.tokens))
        self._manager.loading_lanes.append(held.lane)

    def end(self, loading: LoadingPrefix, good: bool) -> None:
        """Frees the lane. The prefix enters the tree if its contents have arrived (`good`)."""
        length = len(loading.tokens) if good else 0
        if good:
            self._manager.enter_rest(loading.lane, loading.tokens, length)
        self._manager.release(loading.lane, loading.tokens if good else None, length)
        self._manager.loading_lanes.append(loading.lane)
