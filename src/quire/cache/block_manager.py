"""Books KV blocks for lanes, and shares them between requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.arrays import Int32, int32
from quire.cache.block_hash import Namespace
from quire.cache.block_tables import BlockTables
from quire.cache.node import NO_BLOCK, Node
from quire.cache.prefix_tree import EvictedRun, Match, PrefixTree
from quire.cache.state_slots import StateSlots
from quire.cache.tree_lanes import TreeLanes
from quire.cache.window_blocks import WindowTables
from quire.errors import ConfigError, RequestTooLargeError
from quire.plan import BlockAppends, BlockCopies, KVGroup

_LOADING_LANES = 64
"""Extra lanes, for prefixes that are being loaded (`cache/loading.py`)."""


@dataclass(slots=True)
class Usage:
    """Numbers of blocks of one group: `used` by requests, `cached` for reuse, and `free`."""

    total: int
    used: int
    cached: int
    free: int


@dataclass(slots=True)
class DetachedBlocks:
    """Blocks that were taken from a request's lane and are not freed yet.

    Attributes:
        blocks: block ids per group.
        starts: for each KV group, the block table index of the first block.
        last: the request's last node in the tree; None once the blocks are freed.
        tail: tokens of the partly filled block after that node, packed int32.
        length: number of tokens that stay for reuse.
    """

    blocks: list[Int32]
    starts: list[int]
    last: Node | None
    tail: bytes = b""
    length: int = 0


@dataclass(slots=True)
class Evicted:
    """A block that leaves the tree, its group, and the hash of the prefix that ends with it."""

    block_hash: bytes
    block: int
    group: int = 0


class BlockManager:
    """All blocks of an engine.

    A call that books blocks either books all of them, or changes nothing and returns False.

    A lane writes only to blocks that no other lane has. Lanes share only whole blocks: an earlier
    step has filled them, or the same step fills them before it reads them. A partly filled block is
    copied instead of shared.

    Attributes:
        on_evict: called with the blocks that leave the tree, before they may be overwritten.
        loading_lanes: the free extra lanes, which `PrefixLoader` uses.
        slides: whether any group has a window.
        evicted: number of evicted blocks, over all groups. `evict_all` counts too.
        copied: number of blocks copied because a prefix ends inside them, over all groups.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        num_lanes: int,
        max_len: int,
        caching: bool = True,
    ) -> None:
        _check(groups)
        lanes = num_lanes + _LOADING_LANES
        self.block_size = groups[0].tokens_per_block
        self.groups = [
            _tables(group)(group, count, lanes, max_len, index)
            for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True))
        ]
        self.caching = caching
        self.on_evict: Sequence[Callable[[Sequence[Evicted]], None]] = ()
        self.tree = PrefixTree(self.block_size, [group.sparse for group in self.groups])
        self._sparse = [group for group in self.groups if group.sparse is not None]
        self.slides = any(group.window is not None for group in self.groups)
        self.lanes = TreeLanes(self.tree, self.groups, lanes)
        self.loading_lanes = list(range(num_lanes, lanes))
        self.evicted = 0
        self.copied = 0

    @property
    def inserted(self) -> Int32:
        """int32 [lanes], number of each lane's tokens whose blocks are in the tree.

        It is larger than any length for a lane that `insert` must skip.
        """
        return self.lanes.inserted

    @property
    def loading(self) -> bool:
        """Whether any prefix is being loaded."""
        return len(self.loading_lanes) < _LOADING_LANES

    def check_fits(self, tokens: int, chunk: int) -> None:
        """Checks that a sequence could run alone.

        Args:
            tokens: number of positions that the sequence computes.
            chunk: most positions that it computes in one step.

        Raises:
            RequestTooLargeError: the sequence needs more blocks than a group has.
        """
        for group in self.groups:
            needed = group.most_needed(tokens, chunk)
            if needed > group.pool.num_blocks:
                raise RequestTooLargeError(needed, group.pool.num_blocks)

    # -- admission -----------------------------------------------------------------------------

    def match(
        self, namespace: Namespace, tokens: Int32, limit: int, *, whole_only: bool = False
    ) -> Match:
        """Returns the longest cached prefix.

        Args:
            tokens: int32 [n].
            limit: most tokens of the prefix.
            whole_only: whether to match only whole blocks, and no part of a block to copy.
        """
        limit = limit if self.caching else 0
        return self.tree.match(namespace, tokens, limit, whole_only=whole_only)

    def admit(
        self,
        lane: int,
        namespace: Namespace,
        match: Match,
        *,
        computed: int,
        chunk_end: int,
        known: int,
        spare: int,
    ) -> bool:
        """Gives an empty lane the matched blocks, which it shares, and new blocks.

        The source of a match is copied to the first new block before the next body runs. A group
        that keeps every position books all known tokens at once. So a started prompt never waits
        for blocks. A group with a window books up to `chunk_end`.

        Args:
            computed: first position of the request's first row, at least `match.length`.
            chunk_end: end of the first row.
            known: number of known tokens.
            spare: blocks that must stay available in each group with growing lanes.
        """
        shares, sources, ends = [], [], []
        for g, group in enumerate(self.groups):
            start, shared = group.share(match, computed)
            ends.append(group.admitted_tokens(known, chunk_end))
            needed = group.blocks(ends[g]) - start - len(shared) + spare * group.grows
            if needed + self.reclaimed(g, match, shared) > self.available(g):
                return False
            shares.append((start, shared))
            sources.append(group.source(match))
        self.lanes.enter(lane, namespace, match.node, match.whole)
        if match.tail is not None:
            self.tree.touch(match.tail)
        for group, (start, shared) in zip(self.groups, shares, strict=True):
            group.begin(lane, start, shared)
        self._append_blocks(int32([lane]), [int32([end]) for end in ends])
        for group, source in zip(self.groups, sources, strict=True):
            group.note(lane, match)
            if source is not None:
                self._copy(group, source, int(group.table[lane, match.length // group.block_size]))
        return True

    def reclaimed(self, g: int, match: Match, shared: Int32) -> int:
        """Returns how many available blocks of a group become used when a lane uses a match.

        Args:
            g: the group's index.
            shared: int32, the matched blocks that a lane would share.
        """
        if self.groups[g].sparse is None:
            return self.tree.idle_blocks(match)
        return int((self.groups[g].pool.holders[shared] == 1).sum())

    def _copy(self, group: BlockTables, source: int, target: int) -> None:
        group.copy(source, target)
        self.copied += 1

    def fork(
        self, lane: int, namespace: Namespace, parent: int, length: int, known: int, spare: int
    ) -> bool:
        """Gives an empty lane the first positions of another lane.

        The lanes share whole blocks. A partly filled block is copied before the next body runs.

        Also returns False if the parent has released a block that is needed, or if the parent has
        diverged. Lanes share only blocks of nodes that all of them use.

        Args:
            parent: the other lane.
            length: number of positions.
            known: number of tokens to book.
            spare: blocks that must stay available in each group.
        """
        if self.lanes.diverged(parent):
            return False
        whole, partial = divmod(length, self.block_size)
        for g, group in enumerate(self.groups):
            if not group.can_fork(parent, length):
                return False
            if group.blocks(known) - whole + spare > self.available(g):
                return False
        last = self.lanes.last(parent)
        in_tree = min(whole, last.end)
        self.lanes.enter(lane, namespace, last.upto(in_tree), in_tree)
        for group in self.groups:
            start = group.first_needed(length)
            group.begin(lane, start, group.table[parent, start:whole])
        self._append_blocks(int32([lane]), [int32([known]) for _ in self.groups])
        if partial:
            for group in self.groups:
                self._copy(group, int(group.table[parent, whole]), int(group.table[lane, whole]))
        return True

    # -- while a request runs ------------------------------------------------------------------

    def book(self, lanes: Int32, ends: Int32) -> bool:
        """Books blocks in every group, so that these distinct lanes can hold `ends` tokens each."""
        missing = [group.missing(lanes, ends) for group in self.groups]
        for g, (_, _, total) in enumerate(missing):
            if total and total > self.available(g):
                return False
        for g, (short, counts, total) in enumerate(missing):
            if total:
                self._reclaim(g, total)
                self.groups[g].append(short, counts, total)
        return True

    def _append_blocks(self, lanes: Int32, ends: list[Int32]) -> None:
        """Books blocks up to `ends` tokens per group. The caller knows that they are available."""
        for g, group in enumerate(self.groups):
            short, counts, total = group.missing(lanes, ends[g])
            if total:
                self._reclaim(g, total)
                group.append(short, counts, total)

    def slide(self, lanes: Int32, positions: Int32) -> None:
        """Frees blocks that no later query of these distinct lanes reads.

        Args:
            lanes: int32 [n].
            positions: int32 [n], the first position of each lane's later queries.
        """
        for group in self._sparse:
            group.slide(lanes, positions, self.lanes.last)

    def insert(self, lanes: Int32, tokens: Int32, lengths: Int32, *, ahead: bool = False) -> None:
        """Enters the whole blocks of distinct lanes into the tree.

        If the tree already has a lane's next block from another lane, the lane diverges: it keeps
        its own blocks, and inserts no more until it ends. It does not become a user of the other
        lane's node. Otherwise that node's block could not be evicted although nobody reads it.

        Args:
            lanes: int32 [n].
            tokens: int32 [all lanes, longest sequence], each lane's tokens from column 0.
            lengths: int32 [n], number of computed tokens of each lane.
            ahead: True if the next plan computes the blocks, False if earlier plans did.
        """
        if self.caching:
            self.lanes.insert(lanes, tokens, lengths, ahead)

    def close(self, lanes: Int32) -> None:
        """Keeps further blocks of these lanes out of the tree, because later steps compute them
        with other weights. The caller releases such a lane without tokens.

        Args:
            lanes: int32 [n].
        """
        self.lanes.close(lanes)

    def compute(self, lane: int, tokens: Int32, start: int, end: int, known: int) -> None:
        """Records that the next plan computes positions `start` to `end` of a lane.

        Args:
            tokens: int32 [>= known], the lane's tokens. The array is read until the request ends.
            known: number of the lane's known tokens.
        """
        if self.caching:
            for group in self._sparse:
                group.compute(lane, tokens, start, end, known)

    def enter_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """Enters the whole blocks of a lane that is about to be released.

        Blocks that are already in the tree do not change.

        Args:
            tokens: int32 [>= length].
        """
        self.lanes.enter_rest(lane, tokens, length)

    # -- release -------------------------------------------------------------------------------

    def release(self, lane: int, tokens: Int32 | None = None, length: int = 0) -> None:
        """Detaches and frees all blocks of a lane. Idempotent."""
        self.free(self.detach(lane, tokens, length))

    def detach(
        self, lane: int, tokens: Int32 | None = None, length: int = 0, *, exact: bool = True
    ) -> DetachedBlocks:
        """Empties the lane, but keeps its blocks as they are until `free`.

        Args:
            tokens: int32 [>= length], or None to keep nothing for reuse.
            length: number of computed tokens, which stay for reuse.
            exact: whether no step in flight computes more tokens.
        """
        tail, kept = b"", 0
        if tokens is not None and self.caching:
            if self.lanes.diverged(lane):
                self.enter_rest(lane, tokens, length)
            end = self.lanes.last(lane).end
            if end == length // self.block_size:
                tail, kept = tokens[end * self.block_size : length].tobytes(), length
        last = self.lanes.clear(lane)
        if last is not None:
            for group in self._sparse:
                group.leave(lane, last)
        return DetachedBlocks(
            starts=[int(group.start[lane]) for group in self.groups],
            blocks=[group.detach(lane, exact and kept > 0) for group in self.groups],
            last=last,
            tail=tail,
            length=kept,
        )

    def free(self, detached: DetachedBlocks) -> None:
        """Frees detached blocks. Idempotent."""
        if detached.last is None:
            return
        last = self._keep_tail(detached, detached.last)
        for group, ids, start in zip(self.groups, detached.blocks, detached.starts, strict=True):
            group.drop(ids, start, last, detached.length)
        self.tree.leave(detached.last)
        detached.blocks, detached.starts, detached.last = [], [], None

    def _keep_tail(self, detached: DetachedBlocks, last: Node) -> Node:
        """Enters the partly filled last block. Returns the last node of the blocks."""
        if not detached.tail or any(start > last.end for start in detached.starts):
            return last
        blocks = [
            group.tail(ids, last.end - start)
            for group, ids, start in zip(self.groups, detached.blocks, detached.starts, strict=True)
        ]
        return self.lanes.keep_tail(last, detached.tail, blocks)

    # -- available blocks and eviction ---------------------------------------------------------

    def available(self, g: int) -> int:
        """Counts the blocks of a group that are free or evictable."""
        group = self.groups[g]
        return group.pool.num_free + group.evictable(self.tree.num_idle)

    def _reclaim(self, g: int, n: int) -> None:
        """Makes `n` blocks of a group free. The caller knows that they are available."""
        group = self.groups[g]
        missing = n - group.pool.num_free
        if missing <= 0:
            return
        if group.sparse is not None:
            group.pool.drop(int32([group.sparse.take() for _ in range(missing)]))
            self.evicted += missing
            return
        self.evict(g, missing)

    def evict_all(self) -> None:
        """Evicts every prefix that no request uses, as if the blocks were needed."""
        self.evict(0, self.tree.num_idle)

    def evict(self, g: int, count: int) -> None:
        """Evicts blocks of a group that keeps every position.

        The other groups lose their blocks for the same tokens.

        Args:
            g: the group's index.
            count: number of blocks.
        """
        evicted = self.tree.evict(count, hashed=bool(self.on_evict))
        if self.on_evict:
            blocks_left = [
                Evicted(block_hash, block, group)
                for group, ids in enumerate(evicted.blocks)
                for block_hash, block in zip(evicted.hashes, ids.tolist(), strict=True)
                if block_hash and block != NO_BLOCK
            ]
            for on_evict in self.on_evict:
                on_evict(blocks_left)
        self.evicted += self._return_to_pool(evicted)

    def _return_to_pool(self, evicted: EvictedRun) -> int:
        """Frees evicted blocks in the pools. Returns their number, of all groups."""
        count = 0
        for group, ids in zip(self.groups, evicted.blocks, strict=True):
            left = ids if group.sparse is None else ids[ids != NO_BLOCK]
            group.pool.free(left)
            count += len(left)
        return count

    def reset_cache(self) -> bool:
        """Forgets every prefix that no request uses. Returns whether the tree is then empty."""
        self._return_to_pool(self.tree.evict(self.tree.num_idle, hashed=False))
        return self.tree.num_nodes == 0

    # -- contents of the next plan -------------------------------------------------------------

    def take_appends(self) -> list[BlockAppends]:
        """Returns the block table entries added since the last call, per group."""
        return [group.take_appends() for group in self.groups]

    def take_copies(self) -> list[BlockCopies]:
        """Returns the copies that were requested since the last call, per group.

        This completes the plan. Later plans can copy the blocks that it computes.
        """
        self.tree.mark_written()
        self.lanes.adjust()
        for group in self._sparse:
            group.planned(self.lanes.last)
        return [group.take_copies() for group in self.groups]

    def usage(self) -> list[Usage]:
        """Returns each group's block counts."""
        out = []
        for g, group in enumerate(self.groups):
            total, free = group.pool.num_blocks, group.pool.num_free
            cached = self.available(g) - free
            out.append(Usage(total=total, used=total - free - cached, cached=cached, free=free))
        return out


def _tables(group: KVGroup) -> type[BlockTables]:
    """Returns the class of block tables for a group's kind."""
    if group.kind == "window":
        return WindowTables
    return StateSlots if group.kind == "state" else BlockTables


def _check(groups: Sequence[KVGroup]) -> None:
    if not groups or groups[0].kind == "state":
        raise ConfigError("a model without KV groups cannot be scheduled")
    sizes = {group.tokens_per_block for group in groups if group.kind != "state"}
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"all KV groups must have the same number of tokens per block, got {listed}"
        )
