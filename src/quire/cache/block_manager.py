"""Books KV blocks for lanes and shares them between requests: the only caller of pool and tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.block_tables import BlockTables
from quire.cache.chain import Namespace
from quire.cache.incoming import RECEIVERS, Receiver
from quire.cache.prefix_tree import NO_BLOCK, Match, Node, PrefixTree
from quire.errors import ConfigError, RequestTooLargeError
from quire.plan import BlockAppends, BlockCopies, Int32, KVGroup, int32

_APART = np.iinfo(np.int32).max


@dataclass(slots=True)
class Usage:
    """Blocks of one group: `used` by requests, `cached` for reuse, `free`."""

    total: int
    used: int
    cached: int
    free: int


@dataclass(slots=True)
class Hold:
    """What a request held: per group, block ids from table entry `starts` on; and its place in the
    tree, which keeps the nodes of those blocks."""

    blocks: list[Int32]
    starts: list[int]
    path: list[Node]


@dataclass(slots=True)
class Evicted:
    """A block that leaves the tree, and the name of its contents (`cache/chain.py`)."""

    key: bytes
    block: int


class BlockManager:
    """All blocks of an engine.

    Whatever asks for blocks either gets all it asks for or changes nothing and answers False. A
    lane's blocks are written by that lane alone: what is shared is whole, and complete before the
    sharer's first step ends its writes; a partly filled block is shared by copying it.
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
        self.block_size = groups[0].tokens_per_block
        self.groups = [
            BlockTables(g, n, num_lanes + RECEIVERS, max_len)
            for g, n in zip(groups, num_blocks, strict=True)
        ]
        self.caching = caching
        self.on_evict: Sequence[Callable[[Sequence[Evicted]], None]] = ()
        """Told what leaves the tree, before it may be overwritten."""
        self.tree = PrefixTree(self.block_size, [g.window for g in self.groups])
        self.slides = any(g.window is not None for g in self.groups)
        self._paths: list[list[Node]] = [[] for _ in range(num_lanes + RECEIVERS)]
        self.receiver = Receiver(self, num_lanes)
        self.inserted: Int32 = np.zeros(num_lanes + RECEIVERS, dtype=np.int32)
        """Tokens of each lane up to the last insertion, or `_APART`."""

    def check_fits(self, tokens: int, chunk: int) -> None:
        """`RequestTooLargeError` if a sequence that computes `tokens` positions, at most `chunk` at
        a time, could not run even alone."""
        for group in self.groups:
            needed = group.most_needed(tokens, chunk)
            if needed > group.pool.num_blocks:
                raise RequestTooLargeError(needed, group.pool.num_blocks)

    # -- a request comes -----------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: Int32, limit: int) -> Match:
        """The longest prefix of at most `limit` tokens that blocks are there for."""
        return self.tree.match(namespace, tokens, limit if self.caching else 0)

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
        """Seat a request on an empty lane: the matched blocks, shared, and new ones.

        All of its `known` tokens are booked at once where every position is kept, so that a prompt
        once begun never waits for blocks; groups with a window book up to `chunk_end`. `computed`
        (>= match.length) is where the request's first row starts. `spare` blocks per group must
        stay available.
        """
        matched = match.length // self.block_size
        shares: list[Int32] = []
        starts: list[int] = []
        ends: list[int] = []
        for g, group in enumerate(self.groups):
            start = min(group.first_needed(computed), matched)
            shared = int32([node.blocks[g] for node in match.path[1 + start : 1 + matched]])
            end = known if group.window is None else chunk_end
            needed = group.blocks(end) - matched + self.woken(g, match, shared)
            if needed + spare > self.available(g):
                return False
            shares.append(shared)
            starts.append(start)
            ends.append(end)
        self.tree.enter(namespace, match.path)
        self._paths[lane] = match.path
        self.inserted[lane] = match.length
        for g, group in enumerate(self.groups):
            group.seat(lane, starts[g], shares[g])
            if group.window is not None:
                for node in match.path[1 + starts[g] :]:
                    self.tree.tighten(g, node)
        self._reach(int32([lane]), [int32([end]) for end in ends])
        return True

    def woken(self, g: int, match: Match, shared: Int32) -> int:
        """How many of the matched blocks are counted as available now."""
        if self.groups[g].window is None:
            return sum(node.users == 0 for node in match.path[1:])
        return int((self.groups[g].pool.holders[shared] == 1).sum())

    def fork(
        self, lane: int, namespace: Namespace, parent: int, length: int, known: int, spare: int
    ) -> bool:
        """Seat a request on an empty lane with the first `length` positions of another lane: whole
        blocks by reference, a partly filled one by copy, done before the next body runs. Room is
        booked up to `known` tokens. False as well if the parent let go of a block it would need, or
        goes apart from the tree: blocks that lanes share must be of nodes that all of them use.
        """
        if self.inserted[parent] == _APART:
            return False
        whole, partial = divmod(length, self.block_size)
        for g, group in enumerate(self.groups):
            if group.start[parent] > group.first_needed(length):
                return False
            if group.blocks(known) - whole + spare > self.available(g):
                return False
        path = self._paths[parent][: 1 + whole]
        self.tree.enter(namespace, path)
        self._paths[lane] = path
        self.inserted[lane] = (len(path) - 1) * self.block_size
        for group in self.groups:
            start = group.first_needed(length)
            group.seat(lane, start, group.table[parent, start:whole])
        self._reach(int32([lane]), [int32([known]) for _ in self.groups])
        if partial:
            for group in self.groups:
                group.copy(int(group.table[parent, whole]), int(group.table[lane, whole]))
        return True

    # -- a request runs ------------------------------------------------------------------------

    def book(self, lanes: Int32, ends: Int32) -> bool:
        """Room up to `ends` tokens for these distinct lanes, in every group."""
        lacking = [group.lacking(lanes, ends) for group in self.groups]
        for g, (_, _, total) in enumerate(lacking):
            if total and total > self.available(g):
                return False
        for g, (short, counts, total) in enumerate(lacking):
            if total:
                self._reclaim(g, total)
                self.groups[g].append(short, counts, total)
        return True

    def _reach(self, lanes: Int32, ends: list[Int32]) -> None:
        """As `book`, with the ends per group, for what is known to be available."""
        for g, group in enumerate(self.groups):
            short, counts, total = group.lacking(lanes, ends[g])
            if total:
                self._reclaim(g, total)
                group.append(short, counts, total)

    def slide(self, lanes: Int32, positions: Int32) -> None:
        """Free what no query from `positions` on, of these distinct lanes, reads any more."""
        for g, group in enumerate(self.groups):
            owners, columns, blocks = group.slipped(lanes, positions)
            for lane, column, block in zip(
                owners.tolist(), columns.tolist(), blocks.tolist(), strict=True
            ):
                self._drop_window_block(g, self._paths[lane], column, block)

    def _drop_window_block(self, g: int, path: list[Node], column: int, block: int) -> None:
        pool = self.groups[g].pool
        pool.drop(int32([block]))
        if pool.holders[block] == 1 and column + 1 < len(path):
            node = path[column + 1]
            if node.blocks[g] == block:
                self.tree.loosen(g, node)

    def insert(self, lanes: Sequence[int], tokens: Int32, lengths: Sequence[int]) -> None:
        """Enter the whole blocks among each lane's first `lengths` tokens into the tree. `tokens`
        int32 [all lanes, room]: a lane's tokens are its line's first ones.

        A lane that meets an equal prefix, computed by another at the same time, goes on with its
        own blocks and stops inserting until `insert_rest`: a node that it used without holding its
        block would keep that block from being reused, for nobody.
        """
        if not self.caching:
            return
        fresh: list[list[int]] = [[] for _ in self.groups]
        for lane, length in zip(lanes, lengths, strict=True):
            if self.inserted[lane] != _APART:
                apart = self._insert(lane, tokens[lane], length // self.block_size, fresh, False)
                self.inserted[lane] = (
                    _APART if apart else length // self.block_size * self.block_size
                )
        for group, ids in zip(self.groups, fresh, strict=True):
            if ids:
                group.pool.hold(int32(ids))

    def insert_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """Before a release: enter what the lane kept apart. tokens: int32 [>= length]."""
        if self.inserted[lane] == _APART:
            self.enter_rest(lane, tokens, length)

    def enter_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """Enter the whole blocks of a lane that is about to be released; where there is a node
        already, it stays as it is."""
        fresh: list[list[int]] = [[] for _ in self.groups]
        self._insert(lane, tokens, length // self.block_size, fresh, True)
        for group, ids in zip(self.groups, fresh, strict=True):
            group.pool.hold(int32(ids))

    def _insert(
        self, lane: int, tokens: Int32, whole: int, fresh: list[list[int]], through: bool
    ) -> bool:
        """Extend a lane's path to `whole` blocks, noting blocks that got a node in `fresh`.
        Whether an equal prefix stopped it, which `through` forbids."""
        path, size = self._paths[lane], self.block_size
        for i in range(len(path) - 1, whole):
            key = tokens[i * size : (i + 1) * size].tobytes()
            if not through and key in path[-1].children:
                return True
            blocks = [
                int(group.table[lane, i]) if i >= group.start[lane] else NO_BLOCK
                for group in self.groups
            ]
            if not self.tree.extend(path, key, blocks):
                self._adopt(path[-1], blocks, fresh)
                continue
            for ids, block in zip(fresh, blocks, strict=True):
                if block != NO_BLOCK:
                    ids.append(block)
        return False

    def _adopt(self, node: Node, blocks: list[int], fresh: list[list[int]]) -> None:
        """Give an existing node the window blocks it has lost."""
        for g, block in enumerate(blocks):
            if node.blocks[g] == NO_BLOCK and block != NO_BLOCK:
                node.blocks[g] = block
                fresh[g].append(block)

    # -- a request goes ------------------------------------------------------------------------

    def release(self, lane: int) -> None:
        """Give back all the lane holds. Idempotent."""
        self.drop(self.keep(lane))

    def keep(self, lane: int) -> Hold:
        """Empty the lane, but leave its blocks as they are until `drop`."""
        hold = Hold(
            blocks=[group.held(lane).copy() for group in self.groups],
            starts=[int(group.start[lane]) for group in self.groups],
            path=self._paths[lane],
        )
        for group in self.groups:
            group.clear(lane)
        self._paths[lane] = []
        self.inserted[lane] = 0
        return hold

    def drop(self, hold: Hold) -> None:
        """Give back what was kept. Idempotent."""
        for g, (ids, start) in enumerate(zip(hold.blocks, hold.starts, strict=True)):
            if self.groups[g].window is None:
                self.groups[g].pool.drop(ids)
                continue
            for i, block in enumerate(ids.tolist()):
                self._drop_window_block(g, hold.path, start + i, block)
        self.tree.leave(hold.path)
        hold.blocks, hold.starts, hold.path = [], [], []

    # -- blocks to be had ----------------------------------------------------------------------

    def available(self, g: int) -> int:
        """Blocks of a group that are free, or that the tree can give up."""
        group = self.groups[g]
        cached = self.tree.num_idle if group.window is None else self.tree.num_loose(g)
        return group.pool.num_free + cached

    def _reclaim(self, g: int, n: int) -> None:
        """Make `n` blocks of a group free; they are known to be available."""
        group = self.groups[g]
        lacking = n - group.pool.num_free
        if lacking <= 0:
            return
        if group.window is not None:
            group.pool.drop(int32([self.tree.evict_block(g) for _ in range(lacking)]))
            return
        self._evict(g, lacking)

    def push_out(self) -> None:
        """Give up every prefix that no request runs on, as if the blocks were needed."""
        self._evict(0, self.tree.num_idle)

    def _evict(self, g: int, count: int) -> None:
        """Free the blocks of that many nodes, all of which have one in group `g`."""
        if not count:
            return
        evicted: list[list[int]] = []
        told: list[Evicted] = []
        for _ in range(count):
            key = self.tree.chain(self.tree.oldest()) if self.on_evict else b""
            evicted.append(self.tree.evict())
            told.append(Evicted(key, evicted[-1][g]))
        for tell in self.on_evict:
            tell(told)
        for each, blocks in zip(self.groups, zip(*evicted, strict=True), strict=True):
            ids = int32(blocks)
            each.pool.drop(ids[ids != NO_BLOCK])

    def reset_cache(self) -> bool:
        """Forget every prefix that no request runs on; whether the tree is empty now."""
        while self.tree.num_idle:
            for group, block in zip(self.groups, self.tree.evict(), strict=True):
                if block != NO_BLOCK:
                    group.pool.drop(int32([block]))
        return self.tree.num_nodes == 0

    # -- what the next plan tells --------------------------------------------------------------

    def take_appends(self) -> list[BlockAppends]:
        return [group.take_appends() for group in self.groups]

    def take_copies(self) -> list[BlockCopies]:
        return [group.take_copies() for group in self.groups]

    def usage(self) -> list[Usage]:
        """Per group."""
        out = []
        for g, group in enumerate(self.groups):
            total, free = group.pool.num_blocks, group.pool.num_free
            cached = self.available(g) - free
            out.append(Usage(total=total, used=total - free - cached, cached=cached, free=free))
        return out


def _check(groups: Sequence[KVGroup]) -> None:
    if not groups:
        raise ConfigError("a model without KV groups cannot be scheduled")
    for group in groups:
        if group.kind == "state":
            raise ConfigError("recurrent state groups are not supported yet")
        if group.kind == "window" and (group.window is None or group.window < 1):
            raise ConfigError(f"a window group needs a window of at least 1, got {group.window}")
        if group.tokens_per_block != groups[0].tokens_per_block:
            raise ConfigError("all KV groups must have the same number of tokens per block")
