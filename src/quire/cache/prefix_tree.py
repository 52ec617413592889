"""An index from token prefixes to KV blocks: a radix tree whose nodes are runs of tokens.

Prefix sharing by a tree over tokens follows SGLang's RadixAttention (Zheng et al., 2024). Here
nodes begin at block boundaries, so that a block belongs to one node, and what two prompts share of
a block that they do not share as a whole is copied.
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

    length: in tokens. whole: in whole blocks, which are shared. node: where they end, maybe before
        its own end.
    source: the block per group that holds the remaining tokens, to be copied; None if there are
        none. tail: the node of that block, if it is a tail.
    known: how many whole blocks the tree has of the prompt; not every group can resume there.
    """

    length: int
    whole: int
    node: Node
    source: list[int] | None = None
    tail: Node | None = None
    known: int = 0


class SparseBlocks(Protocol):
    """One group's blocks that only the tree holds, where any can be taken from its node, which
    lives on for the other groups.

    exact: a request can go on behind a block's last token only.
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
        """Takes the block that is needed least from its node."""
        ...

    def resumable(self, blocks: Int32, held: Int32) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tells where a request could go on, bool [n + 1]: before the first of these n blocks on a
        path (or `NO_BLOCK`), and behind each. held: int32 [n + 1], in tokens; the last may lie
        within the block behind the path's."""
        ...


@dataclass(slots=True)
class EvictedRun:
    """Blocks that the tree evicted: ids per group (or `NO_BLOCK`), and block hashes, b"" for a
    tail that nobody below can use. `hashes` is empty if they were not asked for."""

    blocks: list[Int32]
    hashes: list[bytes]


class PrefixTree:
    """The tree of one engine. Keeps block ids but never touches the pools.

    **Shape.** A node's children differ in their first block. A request holds its last node, and
    uses that and its ancestors to their ends: where a match ends inside a node, the part before is
    split off as a new node above, and the old one stays the last of those that it was the last of.
    A node that one request uses, and nothing hangs on, grows in place with that request. Where all
    but one child of a node are gone, it merges with that again when a request uses both.

    **Eviction.** `_idle` lists the nodes without users in the order in which their last user left.
    Leaving happens from the last node up to the root, and a request that uses a node uses its
    ancestors, so a node always comes after all of its descendants: the first of the list is a leaf,
    and the least recently used one, which loses as many blocks from its end as are wanted.
    `OrderedDict` is a hash table with a doubly linked list through it, so adding, removing and
    taking the first are O(1). A split node above is made for a request that uses it, so it joins
    the list after the rest.

    **Tails.** What a request leaves in a partly filled block becomes a child of its last node with
    fewer tokens than a block, unless another child begins with them. Such a child goes when one
    comes that begins with all of its tokens. So the tokens of no tail begin a sibling's.

    **Sparse groups.** Of some groups (with windows, with states) the tree can lose any block that
    no request holds, and the node lives on for the other groups. sparse: those blocks, by group;
    None for a group whose blocks come and go with their nodes.
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
        self._ahead: list[Node] = []
        self._dropped_tails: list[list[int]] = []
        self.num_nodes = 0
        self.num_idle = 0
        """Evictable blocks, in each group that keeps every position."""

    # -- finding -------------------------------------------------------------------------------

    def match(
        self, namespace: Namespace, tokens: Int32, limit: int, *, whole_only: bool = False
    ) -> Match:
        """Returns the longest prefix of `tokens`, int32 [n], of at most `limit` tokens, at which
        every group can resume. Changes nothing; `enter` it before anything else happens."""
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
        """Lengthens a match by tokens of a block to copy. more: tokens shared with the node's next
        block."""
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
        """Shortens a match to the longest at which every group can resume."""
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
        """Starts a request's use of the path to the end of the first `whole` blocks, which is in
        `node`. Returns its last node."""
        if node.parent is None and node not in self._namespaces:
            self._roots[namespace] = node
            self._namespaces[node] = namespace
            node.block_hashes += root_hash(namespace)
        return self._use(node, whole, None)

    def advance(self, node: Node, data: memoryview) -> Node:
        """Extends a request's use from its last node `node` through the known part of `data`,
        packed tokens. Returns its new last node."""
        last, whole, _ = node.follow(data, self._stride)
        return self._use(last, whole, node)

    def _use(self, last: Node, whole: int, after: Node | None) -> Node:
        """Counts one more user on the path from node `after` to the end of `whole` blocks."""
        if whole < last.end:
            last = self._split(last, whole - last.start)
        at: Node | None = last
        while at is not after and at is not None:
            if not at.users and at.parent is not None:
                del self._idle[at]
                self.num_idle -= at.count
            at.users += 1
            above = at.parent
            if above is not None and above is not after and len(above.children) == 1:
                self._join(at, above)
            at = at.parent
        return last

    def _join(self, node: Node, above: Node) -> None:
        """Merges a node and its parent `above`, which has no other child, if both will have the
        same users and the parent's blocks are written. `node` has its new user already."""
        parent = above.parent
        if parent is None or above.users + 1 != node.users or above.written < above.count:
            return
        if not above.users:
            del self._idle[above]
            self.num_idle -= above.count
        node.join()
        parent.children[node.first_tokens] = node
        self.num_nodes -= 1

    def _split(self, node: Node, count: int) -> Node:
        """Splits the first `count` blocks of a node off into a new parent, which is returned."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("split a root")
        upper = node.cut(count, self._stride)
        parent.children[upper.first_tokens] = upper
        upper.children[node.first_tokens] = node
        if node.written:
            upper.index(node.first_tokens)
        if upper.written < count:
            self._ahead.append(upper)
        if not upper.users:
            self._idle[upper] = None
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
                    self._idle[at] = None
                    self.num_idle += at.count
            at = at.parent

    def touch(self, tail: Node) -> None:
        """Notes the use of a tail that is copied. Its parent is in use, so it stays behind it in
        eviction order."""
        self._idle.move_to_end(tail)

    def _prune(self, root: Node) -> None:
        """Forgets a root without users and children, so that salts used once leave no trace."""
        if not root.users and not root.children:
            del self._roots[self._namespaces.pop(root)]

    # -- growing -------------------------------------------------------------------------------

    def extend(
        self, node: Node, data: bytes | memoryview, blocks: Sequence[bytes], ahead: bool
    ) -> Node:
        """Appends whole blocks to the path of a request whose last node is `node`; no child begins
        with the first of them. Returns the request's new last node.

        data: their tokens. blocks: their ids per group. Both are packed int32. ahead: the plan that
        is being made will fill them.
        """
        key = bytes(data[: self._stride])
        if node.children:
            self._drop_shadowed_tail(node, key)
        if node.users > 1 or node.children or node.parent is None:
            parent, node = node, Node(node, key, node.end, 1, self.num_groups)
            parent.children[key] = node
            self.num_nodes += 1
        count = node.count
        pending = node.written < count
        node.grow(data, blocks)
        if pending:
            pass  # until `mark_written`
        elif ahead:
            self._ahead.append(node)
        elif count:
            node.written = node.count
        else:
            self._mark_written(node)
        return node

    def mark_written(self) -> None:
        """Makes the blocks that the completed plan will fill available for later plans' copies."""
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
        """Keeps a partly filled block of tokens `data` after a node's end, for requests to copy.
        Returns its node, or None if the tree has such tokens already. All are packed int32."""
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
        """Evicts `count` blocks of each group that keeps every position: the last blocks of the
        least recently used nodes. There must be as many. With `hashed`, they come in the order in
        which lower tiers should evict them: longer prefixes before shorter ones."""
        parts: list[list[array[int]]] = []
        hashes: list[bytes] = []
        while count:
            node = next(iter(self._idle))
            if node.children:
                raise RuntimeError("evicted a node that others hang on")
            size = node.count
            take = min(count, size)
            count -= take
            self.num_idle -= take
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
        """Returns the hashes of a node's last `count` blocks, b"" for a tail behind which there is
        no state."""
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
        del self._idle[node]
        del parent.children[node.first_tokens]
        if not parent.children:
            parent.order = None
        elif node.written and parent.order is not None:
            parent.order.remove(node.first_tokens)
        self.num_nodes -= 1
        if parent.parent is None:
            self._prune(parent)

    def _drop_shadowed_tail(self, parent: Node, key: bytes) -> None:
        """Removes the tail under `parent` whose tokens are a prefix of `key`, if there is one."""
        before = None if parent.order is None else parent.order.around(key)[0]
        if before is not None and key.startswith(before):
            tail = parent.children[before]
            self._remove(tail)
            self.num_idle -= 1
            self._dropped_tails.append(tail.at(0))
            self._forget_sparse(tail.trim(1, self._stride))

    def take_dropped_tails(self) -> list[list[int]]:
        """Returns the tails dropped since the last call: a block (or `NO_BLOCK`) per group each."""
        dropped, self._dropped_tails = self._dropped_tails, []
        return dropped

    def _forget_sparse(self, blocks: Sequence[array[int]]) -> None:
        for g, sparse in self._sparse:
            sparse.discard(blocks[g])

    # -- inspection ----------------------------------------------------------------------------

    def roots(self, most: int) -> list[Node]:
        """Returns the roots of the newest namespaces."""
        return list(islice(reversed(self._roots.values()), most))
