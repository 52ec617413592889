"""An index from token prefixes to KV blocks: a radix tree whose nodes are runs of tokens.

Prefix sharing by a tree over tokens follows SGLang's RadixAttention (Zheng et al., 2024). Here
nodes begin at block boundaries, so that a block belongs to one node. If two prompts share only the
first tokens of a block, the second prompt copies the block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from quire.arrays import Int32
from quire.cache.block_hash import HASH_BYTES, Namespace, root_hash
from quire.cache.node import NO_BLOCK, Node


def pack(tokens: Int32) -> memoryview:
    """Returns the bytes of contiguous tokens, without a copy."""
    return tokens.view(np.uint8).data


@dataclass(slots=True)
class Match:
    """The longest reusable prefix. Valid until the tree changes.

    Attributes:
        length: number of tokens.
        whole: number of whole blocks. The request shares them.
        node: the node that contains the last whole block. The node may continue after this block.
        source: for each KV group, the block to copy for the remaining tokens. None if no tokens
            remain.
        tail: the node of `source` if it is a tail, or None.
        known: number of the prompt's whole blocks in the tree. Some groups may be unable to resume
            after them.
    """

    length: int
    whole: int
    node: Node
    source: list[int] | None = None
    tail: Node | None = None
    known: int = 0


class SparseBlocks(Protocol):
    """One group's blocks that only the tree holds.

    Any of them can be taken from its node, which keeps the blocks of the other groups.

    Attributes:
        exact: whether a request can resume only after a block's last token.
    """

    exact: bool

    def __len__(self) -> int: ...

    def add(self, last: Node, place: int, block: int) -> None:
        """Adds a block at a place, in blocks from the root, on the path to node `last`."""
        ...

    def discard(self, blocks: Iterable[int]) -> None:
        """Removes blocks that requests hold again, or that the tree has evicted."""
        ...

    def take(self) -> int:
        """Takes the least useful block from its node."""
        ...

    def resumable(self, blocks: Int32, held: Int32) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns where a request could resume on a path, bool [n + 1].

        Entry 0 is the start of the path, entry i is the end of block i - 1.

        Args:
            blocks: int32 [n], the path's blocks, or `NO_BLOCK`.
            held: int32 [n + 1], number of tokens up to each of these places. The last one may
                include tokens of a block to copy.
        """
        ...


@dataclass(slots=True)
class EvictedRun:
    """Blocks that the tree evicted.

    Attributes:
        blocks: block ids per group, or `NO_BLOCK`.
        hashes: their block hashes, b"" for a tail that lower tiers cannot use. Empty unless the
            caller asked for hashes.
    """

    blocks: list[Int32]
    hashes: list[bytes]


class PrefixTree:
    """The tree of one engine. Keeps block ids but never touches the pools.

    **Shape.** A node's children differ in their first block. A request holds its last node, and
    uses all blocks of that node and of its ancestors. If a match ends inside a node, the node is
    split: its first blocks move to a new node above it. Requests whose last node was the old node
    keep it. A node with one user, no children and no leases grows in place with that request. A
    node with a single child merges with it when a request uses both.

    **Eviction.** `_idle` lists the nodes without users in the order in which their last user left.
    A request leaves its nodes from the last one up to the root, so a node comes after all of its
    descendants. The first node of the list is therefore the least recently used leaf. It loses its
    last blocks, as many as the caller needs. `OrderedDict` is a hash table with a doubly linked
    list, so adding, removing and taking the first node are O(1). The upper node of a split is made
    for a request that uses it, so it joins the list after its descendants.

    **Tails.** When a request ends in a partly filled block, the block's tokens become a child of
    its last node. The tail has fewer tokens than a block. It is not added if another child begins
    with its tokens, and it is removed when such a child is added. So no tail is a prefix of a
    sibling.

    **Leases.** A lease marks the path to a node. Marked nodes without users are in a list of their
    own, `_leased`, whose nodes are evicted after all of `_idle`. So a lease never makes a request
    wait. A mark is on all ancestors too, so a node without one has no marked descendants, and both
    lists keep descendants before ancestors. Eviction leaves the marks of the other nodes as they
    are.

    **Sparse groups.** Groups with windows or states can lose any block that no request holds, while
    its node keeps the blocks of the other groups.

    Args:
        sparse: for each KV group, the blocks that only the tree holds; None for a group whose
            blocks are evicted together with their nodes.

    Attributes:
        num_idle: number of evictable blocks, in each group that keeps every position.
        num_leased: number of blocks of nodes with leases.
    """

    def __init__(self, block_size: int, sparse: Sequence[SparseBlocks | None]) -> None:
        self.block_size = block_size
        self.num_groups = len(sparse)
        self._stride = 4 * block_size
        self._sparse = [(g, blocks) for g, blocks in enumerate(sparse) if blocks is not None]
        self._exact = any(blocks.exact for _, blocks in self._sparse)
        self._roots: dict[Namespace, Node] = {}
        self._namespaces: dict[Node, Namespace] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._leased: OrderedDict[Node, None] = OrderedDict()
        self._ahead: list[Node] = []
        self._dropped_tails: list[list[int]] = []
        self.num_nodes = 0
        self.num_idle = 0
        self.num_leased = 0

    # -- finding -------------------------------------------------------------------------------

    def match(
        self, namespace: Namespace, tokens: Int32, limit: int, *, whole_only: bool = False
    ) -> Match:
        """Returns the longest prefix after which every group can resume.

        Changes nothing. The caller must `enter` the match before anything else happens.

        Args:
            tokens: int32 [n].
            limit: most tokens of the prefix.
            whole_only: match whole blocks only.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, 0, Node(None, b"", 0, 0, self.num_groups))
        data = pack(tokens[:limit])
        node, whole, more = root.follow(data, self._stride)
        match = Match(whole * self.block_size, whole, node, known=whole)
        if not whole_only:
            self._find_source(match, data, more)
        if self._sparse:
            self._fall_back(match)
        return match

    def _find_source(self, match: Match, data: memoryview, more: int) -> None:
        """Lengthens a match by the tokens of a block to copy.

        Args:
            more: number of tokens that match in the node's next block.
        """
        node, index = match.node, match.whole - match.node.start
        if index == node.count:
            at = match.whole * self._stride
            child, more = node.closest(bytes(data[at : at + self._stride]))
            if child is None:
                return
            node, index = child, 0
            match.tail = child if len(child.run) < self._stride else None
        elif not more or index >= node.written:
            return
        source = node.at(index)
        inside = match.tail is None or more < match.tail.tokens
        if NO_BLOCK in source or (self._exact and inside):
            match.tail = None
            return
        match.length += more
        match.source = source

    def _fall_back(self, match: Match) -> None:
        """Shortens a match to the longest one after which every group can resume."""
        whole = match.whole
        held = np.arange(whole + 1, dtype=np.int32) * self.block_size
        held[whole] = match.length
        good = np.ones(whole + 1, dtype=bool)
        for g, blocks in self._sparse:
            good &= blocks.resumable(match.node.path(g, 0, whole), held)
        if not good[whole]:
            match.whole = int(np.flatnonzero(good)[-1])
            match.length = match.whole * self.block_size
            match.node = match.node.upto(match.whole)
            match.source = match.tail = None

    def idle_blocks(self, match: Match) -> int:
        """Counts the whole blocks of a match that no request uses."""
        end, count = match.whole, 0
        at: Node | None = match.node
        while at is not None and not at.users:
            count += end - at.start
            end, at = at.start, at.parent
        return count

    # -- using ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace, node: Node, whole: int) -> Node:
        """Makes a request a user of its first `whole` blocks, the last of which `node` holds.

        Returns the request's last node.
        """
        if node.parent is None and node not in self._namespaces:
            self._roots[namespace] = node
            self._namespaces[node] = namespace
            node.block_hashes += root_hash(namespace)
        return self._use(node, whole, None)

    def advance(self, node: Node, data: memoryview) -> Node:
        """Makes a request a user of the blocks after its last node, as far as `data` matches.

        Returns the request's new last node.

        Args:
            data: packed int32 tokens after the node's end.
        """
        last, whole, _ = node.follow(data, self._stride)
        return self._use(last, whole, node)

    def _use(self, last: Node, whole: int, after: Node | None) -> Node:
        """Adds a user to the nodes below `after`, down to block `whole - 1`, which `last` holds.

        Splits `last` if it continues after that block. Returns the last node in use."""
        if whole < last.end:
            last = self._split(last, whole - last.start)
        at: Node | None = last
        while at is not after and at is not None:
            if not at.users and at.parent is not None:
                del self._queue(at)[at]
                self.num_idle -= at.count
            at.users += 1
            above = at.parent
            if above is not None and above is not after and len(above.children) == 1:
                self._merge(at, above)
            at = at.parent
        return last

    def _merge(self, node: Node, above: Node) -> None:
        """Merges a node and its parent `above`, which has no other child, if that is possible.

        They merge if both will have the same users and leases, and the parent's blocks are written.
        `node.users` already includes the new user, `above.users` does not.
        """
        parent = above.parent
        if parent is None or above.users + 1 != node.users or above.written < above.count:
            return
        if above.leases != node.leases:
            return
        if not above.users:
            del self._queue(above)[above]
            self.num_idle -= above.count
        node.absorb_parent()
        parent.children[node.first_tokens] = node
        self.num_nodes -= 1

    def _split(self, node: Node, count: int) -> Node:
        """Moves the first `count` blocks of a node to a new parent, which is returned."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("split a root")
        upper = node.split(count, self._stride)
        parent.children[upper.first_tokens] = upper
        upper.children[node.first_tokens] = node
        if node.written:
            upper.index(node.first_tokens)
        if upper.written < count:
            self._ahead.append(upper)
        if not upper.users:
            self._queue(upper)[upper] = None
        self.num_nodes += 1
        return upper

    def leave(self, last: Node) -> None:
        """Ends a request's use of the path to node `last`."""
        at: Node | None = last
        while at is not None:
            at.users -= 1
            if not at.users:
                if at.parent is None:
                    self._prune(at)
                else:
                    self._queue(at)[at] = None
                    self.num_idle += at.count
            at = at.parent

    def touch(self, tail: Node) -> None:
        """Records that a tail is copied, which moves it to the end of the eviction order."""
        self._queue(tail).move_to_end(tail)

    def _queue(self, node: Node) -> OrderedDict[Node, None]:
        """Returns the list that holds a node while it has no users."""
        return self._leased if node.leases else self._idle

    def lease(self, last: Node) -> None:
        """Marks the path to a node, whose blocks are then evicted after all others."""
        at = last
        while at.parent is not None:
            if not at.users:
                del self._queue(at)[at]
                self._leased[at] = None
            at.leases += 1
            if at.leases == 1:
                self.num_leased += at.count
            at = at.parent

    def end_lease(self, last: Node) -> None:
        """Takes back the mark of `lease`. Nodes may have been evicted in the meantime."""
        at = last
        while at.parent is not None:
            at.leases -= 1
            if not at.leases:
                self.num_leased -= at.count
                if at in self._leased:
                    del self._leased[at]
                    self._idle[at] = None
            at = at.parent

    def _prune(self, root: Node) -> None:
        """Forgets a root without users and children, so that unused cache salts take no memory."""
        if not root.users and not root.children:
            del self._roots[self._namespaces.pop(root)]

    # -- growing -------------------------------------------------------------------------------

    def extend(
        self, node: Node, data: bytes | memoryview, blocks: Sequence[bytes], ahead: bool
    ) -> Node:
        """Appends whole blocks to the path of a request. Returns its new last node.

        Args:
            node: the request's last node, none of whose children begins with the first new block.
            data: the blocks' tokens, packed int32.
            blocks: their ids per group, packed int32.
            ahead: whether the next plan will fill them.
        """
        key = bytes(data[: self._stride])
        if node.children:
            self._drop_shadowed_tail(node, key)
        if node.users > 1 or node.children or node.leases or node.parent is None:
            parent, node = node, Node(node, key, node.end, 1, self.num_groups)
            parent.children[key] = node
            self.num_nodes += 1
        count = node.count
        pending = node.written < count
        node.grow(data, blocks)
        if pending:
            pass  # `mark_written` counts these blocks too.
        elif ahead:
            self._ahead.append(node)
        elif count:
            node.written = node.count
        else:
            self._mark_written(node)
        return node

    def mark_written(self) -> None:
        """Lets later plans copy the blocks that the completed plan will fill."""
        for node in self._ahead:
            if node.count:
                self._mark_written(node)
        self._ahead.clear()

    def _mark_written(self, node: Node) -> None:
        new, node.written = not node.written, node.count
        if new and node.parent is not None:
            self._drop_shadowed_tail(node.parent, node.first_tokens)
            node.parent.index(node.first_tokens)

    def add_tail(self, node: Node, data: bytes, blocks: Sequence[bytes]) -> Node | None:
        """Keeps a partly filled block after a node's end, for requests to copy.

        Returns its node, or None if a child begins with these tokens.

        Args:
            data: the block's tokens, packed int32.
            blocks: its id per group, packed int32.
        """
        if node.order is not None:
            _, after = node.order.around(data)
            if after is not None and after.startswith(data):
                return None
            self._drop_shadowed_tail(node, data)
        tail = Node(node, data, node.end, 0, self.num_groups)
        tail.grow(data, blocks)
        tail.written = 1
        node.children[data] = tail
        node.index(data)
        self._idle[tail] = None
        self.num_idle += 1
        self.num_nodes += 1
        return tail

    # -- eviction ------------------------------------------------------------------------------

    def block_hash(self, match: Match, namespace: Namespace) -> bytes:
        """Returns the hash of a match's last whole block."""
        if not match.whole:
            return root_hash(namespace)
        return match.node.block_hash(match.whole - match.node.start - 1, self._stride)

    def evict(self, count: int, hashed: bool) -> EvictedRun:
        """Evicts the last blocks of the least recently used nodes.

        Args:
            count: number of blocks of each group that keeps every position. At least as many must
                be evictable.
            hashed: whether to return hashes too. The blocks are then in the order in which lower
                tiers should evict them: longer prefixes before shorter ones.
        """
        parts: list[list[array[int]]] = []
        hashes: list[bytes] = []
        while count:
            node = next(iter(self._idle or self._leased))
            if node.children:
                raise RuntimeError("evicted a node that has children")
            size = node.count
            take = min(count, size)
            count -= take
            self._count_out(node, take)
            last_hashes = self._last_hashes(node, take) if hashed else []
            if take == size:
                self._remove(node)
            taken = node.trim(take, self._stride)
            self._forget_sparse(taken)
            parts.append([ids[::-1] for ids in taken] if hashed else taken)
            hashes += last_hashes[::-1]
        blocks = [
            np.frombuffer(b"".join([part[g] for part in parts]), dtype=np.int32)
            for g in range(self.num_groups)
        ]
        return EvictedRun(blocks, hashes)

    def _last_hashes(self, node: Node, count: int) -> list[bytes]:
        """Returns the hashes of a node's last `count` blocks.

        A tail has b"", unless a recurrent state is stored with it.
        """
        if len(node.run) < self._stride and not self._exact:
            return [b""]
        node.block_hash(node.count - 1, self._stride)
        hashes = node.block_hashes[-count * HASH_BYTES :]
        return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]

    def _remove(self, node: Node) -> None:
        """Removes an idle leaf from the tree."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("removed a root")
        del self._queue(node)[node]
        del parent.children[node.first_tokens]
        if not parent.children:
            parent.order = None
        elif node.written and parent.order is not None:
            parent.order.remove(node.first_tokens)
        self.num_nodes -= 1
        if parent.parent is None:
            self._prune(parent)

    def _drop_shadowed_tail(self, parent: Node, key: bytes) -> None:
        """Removes a child of `parent` that is a tail and a prefix of `key`, if there is one."""
        before = None if parent.order is None else parent.order.around(key)[0]
        if before is not None and key.startswith(before):
            self._dropped_tails.append(self.take_tail(parent.children[before]))

    def take_tail(self, tail: Node) -> list[int]:
        """Removes a tail from the tree. Returns its block per group, which the caller now holds in
        the tree's place."""
        self._remove(tail)
        self._count_out(tail, 1)
        blocks = tail.at(0)
        self._forget_sparse(tail.trim(1, self._stride))
        return blocks

    def _count_out(self, node: Node, count: int) -> None:
        """Counts blocks that leave a node without users."""
        self.num_idle -= count
        if node.leases:
            self.num_leased -= count

    def take_dropped_tails(self) -> list[list[int]]:
        """Returns the blocks of the tails dropped since the last call. Each tail has one block (or
        `NO_BLOCK`) per group."""
        dropped, self._dropped_tails = self._dropped_tails, []
        return dropped

    def _forget_sparse(self, blocks: Sequence[array[int]]) -> None:
        for g, sparse in self._sparse:
            sparse.discard(blocks[g])

    # -- inspection ----------------------------------------------------------------------------

    def roots(self, most: int) -> list[Node]:
        """Returns the roots of the newest namespaces."""
        return list(islice(reversed(self._roots.values()), most))
