"""The block tables of one KV group, and the rules of the kind `full`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_pool import BlockPool
from quire.cache.node import Node
from quire.cache.prefix_tree import Match, SparseBlocks
from quire.plan import BlockAppends, BlockCopies, KVGroup

_NONE = int32([])
_NO_APPENDS = BlockAppends(lanes=_NONE, starts=_NONE, counts=_NONE, ids=_NONE)
_NO_COPIES = BlockCopies(src=_NONE, dst=_NONE)


class BlockTables:
    """The blocks that each lane holds in one group, and the changes for the next plan.

    This class is the kind `full`, which keeps every position. Other kinds override the rules.

    Attributes:
        index: the group's index.
        window: number of tokens, or None.
        sparse: the blocks that only the tree holds. None if nodes cannot lose single blocks of this
            group.
        grows: whether a lane needs more blocks as its request goes on.
        table: int32 [lanes, blocks of the longest sequence]. A lane holds its entries from `start`
            to `end - 1`; earlier ones have left the window.
        start: int32 [lanes], number of blocks.
        end: int32 [lanes], number of blocks.
        booked: int32 [lanes], `end` in tokens.
    """

    window: int | None = None
    sparse: SparseBlocks | None = None
    grows = True

    def __init__(
        self, group: KVGroup, num_blocks: int, num_lanes: int, max_len: int, index: int = 0
    ) -> None:
        self.index = index
        self.pool = BlockPool(num_blocks)
        self.block_size = group.tokens_per_block
        width = -(-max_len // self.block_size)
        self.table: Int32 = np.empty((num_lanes, width), dtype=np.int32)
        self.start: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.end: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self.booked: Int32 = np.zeros(num_lanes, dtype=np.int32)
        self._appends: list[tuple[Int32, Int32, Int32, Int32]] = []
        self._copies: list[tuple[int, int]] = []

    def first_needed(self, position: int) -> int:
        """Returns the first block that a query at `position` reads."""
        return 0

    def blocks(self, tokens: int) -> int:
        """Returns how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def most_needed(self, tokens: int, chunk: int) -> int:
        """Returns the most blocks that a sequence holds at once.

        Args:
            tokens: length of the sequence.
            chunk: most tokens that a step computes.
        """
        return self.blocks(tokens)

    def admitted_tokens(self, known: int, chunk_end: int) -> int:
        """Returns the number of tokens that a request books when it is admitted.

        Args:
            known: number of known tokens.
            chunk_end: end of its first row.
        """
        return known

    # -- sharing -------------------------------------------------------------------------------

    def share(self, match: Match, computed: int) -> tuple[int, Int32]:
        """Returns the table index of the first matched block that a request shares, and the blocks.

        Args:
            computed: the first position that the request computes.
        """
        start = self.first_needed(computed)
        return start, match.node.path(self.index, start, match.whole)

    def source(self, match: Match) -> int | None:
        """Returns the block to copy to the request's first own block, or None."""
        return None if match.source is None else match.source[self.index]

    def note(self, lane: int, match: Match) -> None:
        """Records that a lane begins with the tokens of a match."""

    def can_fork(self, parent: int, length: int) -> bool:
        """Whether `parent` still has the blocks that a fork needs after `length` positions."""
        return True

    def held(self, lane: int) -> Int32:
        """Returns the lane's blocks, int32 [end - start]."""
        return self.table[lane, self.start[lane] : self.end[lane]]

    def entries(self, lane: int, first: int, last: int) -> Int32:
        """Returns a lane's blocks `first` to `last - 1`, int32; -1 for blocks it does not have."""
        return self.table[lane, first:last]

    def entries_at(self, lanes: Int32, places: Int32) -> Int32:
        """Returns one block of each lane, int32 [n]; -1 as in `entries`."""
        return self.table[lanes, places]

    def missing(self, lanes: Int32, ends: Int32) -> tuple[Int32, Int32, int]:
        """Counts the blocks that lanes must get to hold `ends` tokens.

        Args:
            lanes: int32 [n], distinct.
            ends: int32 [n], in tokens.

        Returns:
            The lanes that must get blocks, int32 [m], the count of each, int32 [m], and the total.
        """
        short = ends > self.booked[lanes]
        if not short.any():
            return _NONE, _NONE, 0
        lanes = lanes[short]
        counts: Int32 = -(-ends[short] // self.block_size) - self.end[lanes]
        return lanes, counts, int(counts.sum())

    def append(self, lanes: Int32, counts: Int32, total: int) -> None:
        """Gives each lane `counts` fresh blocks, `total` in all."""
        ids = self.pool.take(total)
        starts = self.end[lanes]
        if total == len(lanes):
            self.table[lanes, starts] = ids
        else:
            # Lanes get different counts. A block's column is its lane's first free column plus the
            # block's index among the lane's new blocks.
            before = np.cumsum(counts) - counts
            columns = np.repeat(starts - before, counts) + np.arange(total, dtype=np.int32)
            self.table[np.repeat(lanes, counts), columns] = ids
        ends = starts + counts
        self.end[lanes] = ends
        self.booked[lanes] = ends * self.block_size
        self._appends.append((lanes, starts, counts, ids))

    def begin(self, lane: int, start: int, shared: Int32) -> None:
        """Gives an empty lane shared blocks, from entry `start` on."""
        end = start + len(shared)
        self.pool.hold(shared)
        self.table[lane, start:end] = shared
        self.start[lane] = start
        self.end[lane] = end
        self.booked[lane] = end * self.block_size
        if len(shared):
            one = int32([lane]), int32([start]), int32([len(shared)]), shared.copy()
            self._appends.append(one)

    def adopt_tail(self, lane: int, block: int) -> None:
        """Appends a block to a lane, which becomes its holder in the place of the tree."""
        end = int(self.end[lane])
        self.table[lane, end] = block
        self.end[lane] = end + 1
        self.booked[lane] = (end + 1) * self.block_size

    def copy(self, src: int, dst: int) -> None:
        """Makes the next plan copy a block before its body runs."""
        self._copies.append((src, dst))

    def slide(self, lanes: Int32, positions: Int32, last: Callable[[int], Node]) -> None:
        """See `BlockManager.slide`.

        Args:
            last: returns a lane's last node.
        """

    def compute(self, lane: int, tokens: Int32, start: int, end: int, known: int) -> None:
        """See `BlockManager.compute`."""

    def planned(self, last: Callable[[int], Node]) -> None:
        """Completes the next plan.

        Args:
            last: returns a lane's last node.
        """

    def adopt(self, lane: int, last: Node, first: int) -> Int32:
        """Gives blocks of a lane to nodes on its path whose own blocks were evicted.

        Returns these blocks, int32. The caller makes the tree their holder.

        Args:
            last: the last node of the path.
            first: index of the first block on the path that may be replaced.
        """
        return _NONE

    # -- release -------------------------------------------------------------------------------

    def leave(self, lane: int, last: Node) -> None:
        """Adds the blocks that a lane has prepared for the tree. The caller empties the lane next.

        Args:
            last: the lane's last node.
        """

    def detach(self, lane: int, exact: bool) -> Int32:
        """Empties a lane, and returns the blocks that it held.

        Args:
            exact: whether no step in flight changes their contents.
        """
        held = self.held(lane).copy()
        self.clear(lane)
        return held

    def tail(self, blocks: Int32, index: int) -> int:
        """Returns the partly filled one of a lane's detached blocks, which has index `index`."""
        return int(blocks[index])

    def drop(self, blocks: Int32, start: int, last: Node, length: int) -> None:
        """Drops detached blocks.

        Args:
            start: block table index of the first block.
            last: the node that holds the last of the lane's tokens in the tree.
            length: number of the lane's tokens.
        """
        self.pool.drop(blocks)

    def evictable(self, idle: int) -> int:
        """Returns how many blocks can be evicted.

        Args:
            idle: number of blocks of nodes without users.
        """
        return idle

    # -- contents of the next plan -------------------------------------------------------------

    def clear(self, lane: int) -> None:
        self.start[lane] = self.end[lane] = self.booked[lane] = 0

    def mark(self) -> int:
        """Returns a position in the appends, for `forget_appends`."""
        return len(self._appends)

    def forget_appends(self, mark: int) -> None:
        """Leaves the entries appended since `mark` out of the next plan."""
        del self._appends[mark:]

    def take_appends(self) -> BlockAppends:
        """Returns the entries appended since the last call."""
        if not self._appends:
            return _NO_APPENDS
        if len(self._appends) == 1:
            lanes, starts, counts, ids = self._appends[0]
        else:
            lanes, starts, counts, ids = map(np.concatenate, zip(*self._appends, strict=True))
        self._appends = []
        return BlockAppends(lanes=lanes, starts=starts, counts=counts, ids=ids)

    def take_copies(self) -> BlockCopies:
        """Returns the copies that were requested since the last call."""
        if not self._copies:
            return _NO_COPIES
        src, dst = zip(*self._copies, strict=True)
        self._copies = []
        return BlockCopies(src=int32(src), dst=int32(dst))
