"""Books KV blocks for lanes, and shares them between requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.arrays import Int32, int32
from quire.cache.block_tables import BlockTables
from quire.cache.chain import Namespace
from quire.cache.incoming import RECEIVERS, Receiver
from quire.cache.node import NO_BLOCK, Node
from quire.cache.prefix_tree import Given, Match, PrefixTree
from quire.cache.tree_lanes import TreeLanes
from quire.errors import ConfigError, RequestTooLargeError
from quire.plan import BlockAppends, BlockCopies, KVGroup


@dataclass(slots=True)
class Usage:
    """Blocks of one group: `used` by requests, `cached` for reuse, `free`."""

    total: int
    used: int
    cached: int
    free: int


@dataclass(slots=True)
class Hold:
    """What a request held: per group, block ids from table entry `starts` on; its last node in the
    tree; and the tokens, packed, of the partly filled block after that, which is kept as well."""

    blocks: list[Int32]
    starts: list[int]
    last: Node | None
    tail: bytes = b""


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
        self.lanes = TreeLanes(self.tree, self.groups, num_lanes + RECEIVERS)
        self.receiver = Receiver(self, num_lanes)
        self.evicted = 0
        """Blocks, of all groups, that were given up for others, or because `push_out` asked."""
        self.copied = 0
        """Blocks, of all groups, that were copied because they are shared up to their middle."""

    @property
    def inserted(self) -> Int32:
        """int32 [lanes], tokens of each lane's blocks that the tree has. Of one that `insert` has
        nothing to do for, more than there can be."""
        return self.lanes.inserted

    def check_fits(self, tokens: int, chunk: int) -> None:
        """`RequestTooLargeError` if a sequence that computes `tokens` positions, at most `chunk` at
        a time, could not run even alone."""
        for group in self.groups:
            needed = group.most_needed(tokens, chunk)
            if needed > group.pool.num_blocks:
                raise RequestTooLargeError(needed, group.pool.num_blocks)

    # -- a request comes -----------------------------------------------------------------------

    def match(
        self, namespace: Namespace, tokens: Int32, limit: int, *, whole_only: bool = False
    ) -> Match:
        """The longest prefix of at most `limit` tokens that blocks are there for, of which the last
        may be partly shared."""
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
        """Seat a request on an empty lane: the matched blocks, shared, and new ones, to the first
        of which a partly matched block is copied, before the next body runs.

        All of its `known` tokens are booked at once where every position is kept, so that a prompt
        once begun never waits for blocks; groups with a window book up to `chunk_end`. `computed`
        (>= match.length) is where the request's first row starts. `spare` blocks per group must
        stay available.
        """
        matched = match.whole
        shares: list[Int32] = []
        starts: list[int] = []
        ends: list[int] = []
        for g, group in enumerate(self.groups):
            start = min(group.first_needed(computed), matched)
            shared = match.node.path(g, start, matched)
            end = known if group.window is None else chunk_end
            needed = group.blocks(end) - matched + self.woken(g, match, shared)
            if needed + spare > self.available(g):
                return False
            shares.append(shared)
            starts.append(start)
            ends.append(end)
        self.lanes.enter(lane, namespace, match.node, matched)
        if match.tail is not None:
            self.tree.touch(match.tail)
        for g, group in enumerate(self.groups):
            group.seat(lane, starts[g], shares[g])
            if group.window is not None:
                self.tree.loose[g].discard(shares[g].tolist())
        self._reach(int32([lane]), [int32([end]) for end in ends])
        if match.source is not None:
            for source, group in zip(match.source, self.groups, strict=True):
                self._copy(group, source, int(group.table[lane, matched]))
        return True

    def woken(self, g: int, match: Match, shared: Int32) -> int:
        """How many of the matched blocks are counted as available now."""
        if self.groups[g].window is None:
            return self.tree.idle_blocks(match)
        return int((self.groups[g].pool.holders[shared] == 1).sum())

    def _copy(self, group: BlockTables, source: int, target: int) -> None:
        group.copy(source, target)
        self.copied += 1

    def fork(
        self, lane: int, namespace: Namespace, parent: int, length: int, known: int, spare: int
    ) -> bool:
        """Seat a request on an empty lane with the first `length` positions of another lane: whole
        blocks by reference, a partly filled one by copy, done before the next body runs. Room is
        booked up to `known` tokens. False as well if the parent let go of a block it would need, or
        goes apart from the tree: blocks that lanes share must be of nodes that all of them use.
        """
        if self.lanes.apart(parent):
            return False
        whole, partial = divmod(length, self.block_size)
        for g, group in enumerate(self.groups):
            if group.start[parent] > group.first_needed(length):
                return False
            if group.blocks(known) - whole + spare > self.available(g):
                return False
        last = self.lanes.last(parent)
        in_tree = min(whole, last.end)
        self.lanes.enter(lane, namespace, last.upto(in_tree), in_tree)
        for group in self.groups:
            start = group.first_needed(length)
            group.seat(lane, start, group.table[parent, start:whole])
        self._reach(int32([lane]), [int32([known]) for _ in self.groups])
        if partial:
            for group in self.groups:
                self._copy(group, int(group.table[parent, whole]), int(group.table[lane, whole]))
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
                self._drop_window_block(g, self.lanes.last(lane), column, block)

    def _drop_window_block(self, g: int, last: Node, column: int, block: int) -> None:
        pool = self.groups[g].pool
        pool.drop(int32([block]))
        if pool.holders[block] == 1:
            self.tree.loose[g].add(last, column, block)

    def insert(self, lanes: Int32, tokens: Int32, lengths: Int32, *, ahead: bool = False) -> None:
        """Enter the whole blocks among these distinct lanes' first `lengths` tokens into the tree.
        `tokens` int32 [all lanes, room]: a lane's tokens are its line's first ones. ahead: the plan
        that is being made computes them; others have been computed by earlier ones.

        A lane that meets an equal prefix, computed by another at the same time, goes on with its
        own blocks and stops inserting until it ends: a node that it used without holding its block
        would keep that block from being reused, for nobody.
        """
        if self.caching:
            self.lanes.insert(lanes, tokens, lengths, ahead)

    def enter_rest(self, lane: int, tokens: Int32, length: int) -> None:
        """Enter the whole blocks of a lane that is about to be released, int32 [>= length]; what is
        known already stays as it is."""
        self.lanes.enter_rest(lane, tokens, length)

    # -- a request goes ------------------------------------------------------------------------

    def release(self, lane: int, tokens: Int32 | None = None, length: int = 0) -> None:
        """Give back all the lane holds, as `keep` and `drop` do. Idempotent."""
        self.drop(self.keep(lane, tokens, length))

    def keep(self, lane: int, tokens: Int32 | None = None, length: int = 0) -> Hold:
        """Empty the lane, but leave its blocks as they are until `drop`. tokens, int32 [>= length]:
        the first `length` are computed, and all of them stay for reuse."""
        tail = b""
        if tokens is not None and self.caching:
            if self.lanes.apart(lane):
                self.enter_rest(lane, tokens, length)
            end = self.lanes.last(lane).end
            if end == length // self.block_size:
                tail = tokens[end * self.block_size : length].tobytes()
        hold = Hold(
            blocks=[group.held(lane).copy() for group in self.groups],
            starts=[int(group.start[lane]) for group in self.groups],
            last=self.lanes.clear(lane),
            tail=tail,
        )
        for group in self.groups:
            group.clear(lane)
        return hold

    def drop(self, hold: Hold) -> None:
        """Give back what was kept. Idempotent."""
        if hold.last is None:
            return
        last = self._keep_tail(hold, hold.last)
        for g, (ids, start) in enumerate(zip(hold.blocks, hold.starts, strict=True)):
            if self.groups[g].window is None:
                self.groups[g].pool.drop(ids)
                continue
            for i, block in enumerate(ids.tolist()):
                self._drop_window_block(g, last, start + i, block)
        self.tree.leave(hold.last)
        hold.blocks, hold.starts, hold.last = [], [], None

    def _keep_tail(self, hold: Hold, last: Node) -> Node:
        """Enter the partly filled block of a request that is going; the last node of its blocks."""
        if not hold.tail or any(start > last.end for start in hold.starts):
            return last
        blocks = [
            int(ids[last.end - start]) for ids, start in zip(hold.blocks, hold.starts, strict=True)
        ]
        return self.lanes.keep_tail(last, hold.tail, blocks)

    # -- blocks to be had ----------------------------------------------------------------------

    def available(self, g: int) -> int:
        """Blocks of a group that are free, or that the tree can give up."""
        group = self.groups[g]
        cached = self.tree.num_idle if group.window is None else len(self.tree.loose[g])
        return group.pool.num_free + cached

    def _reclaim(self, g: int, n: int) -> None:
        """Make `n` blocks of a group free; they are known to be available."""
        group = self.groups[g]
        lacking = n - group.pool.num_free
        if lacking <= 0:
            return
        if group.window is not None:
            loose = self.tree.loose[g]
            group.pool.drop(int32([loose.take() for _ in range(lacking)]))
            self.evicted += lacking
            return
        self.evict(g, lacking)

    def push_out(self) -> None:
        """Give up every prefix that no request runs on, as if the blocks were needed."""
        self.evict(0, self.tree.num_idle)

    def evict(self, g: int, count: int) -> None:
        """Free that many blocks of group `g`, which keeps every position, and those of the other
        groups for the same tokens."""
        given = self.tree.evict(count, named=bool(self.on_evict))
        if self.on_evict:
            blocks = given.blocks[g].tolist()
            told = [Evicted(*one) for one in zip(given.names, blocks, strict=True) if one[0]]
            for tell in self.on_evict:
                tell(told)
        self.evicted += self._let_go(given)

    def _let_go(self, given: Given) -> int:
        """The pools follow the tree; how many blocks of all groups that is."""
        count = 0
        for group, ids in zip(self.groups, given.blocks, strict=True):
            left = ids if group.window is None else ids[ids != NO_BLOCK]
            group.pool.free(left)
            count += len(left)
        return count

    def reset_cache(self) -> bool:
        """Forget every prefix that no request runs on; whether the tree is empty now."""
        self._let_go(self.tree.evict(self.tree.num_idle, named=False))
        return self.tree.num_nodes == 0

    # -- what the next plan tells --------------------------------------------------------------

    def take_appends(self) -> list[BlockAppends]:
        return [group.take_appends() for group in self.groups]

    def take_copies(self) -> list[BlockCopies]:
        """Completes the plan: what it computes can be copied from by later ones."""
        self.tree.settle()
        self.lanes.adjust()
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
