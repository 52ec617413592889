"""An index from token prefixes to KV blocks: a radix tree whose nodes are runs of tokens.

Prefix sharing by a tree over tokens follows SGLang's RadixAttention (Zheng et al., 2024). Here
nodes begin at block boundaries, so that a block belongs to one node, and what two prompts share of
a block that they do not share as a whole is copied.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.arrays import Int32
from quire.cache.chain import KEY_BYTES, Namespace, root_key
from quire.cache.loose import LooseBlocks
from quire.cache.node import NO_BLOCK, Node, common_run


def pack(tokens: Int32) -> memoryview:
    """The bytes of contiguous tokens, as they lie there."""
    return tokens.view(np.uint8).data


@dataclass(slots=True)
class Match:
    """The longest reusable prefix. Good until the tree changes.

    length: in tokens. whole: in whole blocks, which are shared; `node` is where they end, maybe
    before its end. source: the block that holds the other tokens, per group, to be copied; None
    where there are none. tail: the node of that block, if it is a tail.
    """

    length: int
    whole: int
    node: Node
    source: list[int] | None = None
    tail: Node | None = None


@dataclass(slots=True)
class Given:
    """Blocks that the tree gave up: their ids per group (or `NO_BLOCK`), and the names of their
    contents, b"" for a tail's. `names` is empty if they were not asked for."""

    blocks: list[Int32]
    names: list[bytes]


class PrefixTree:
    """The tree of one engine. It keeps block ids but never touches the pools.

    **Shape.** A node's children differ in their first block. A request holds its last node, and
    uses that and its ancestors to their ends: where a match ends inside a node, the part before is
    split off as a new node above, and the old one stays the last of those that it was the last of.
    A node that one request uses, and nothing hangs on, grows in place with that request. Where all
    but one child of a node are gone, it becomes one with that again when somebody uses both.

    **Eviction.** `_idle` lists the nodes without users in the order in which their last user left.
    Leaving happens from the last node up to the root, and whoever uses a node uses its ancestors,
    so a node always comes after all of its descendants: the first of the list is a leaf, and the
    least recently used one, which loses as many blocks from its end as are wanted. `OrderedDict` is
    a hash table with a doubly linked list through it, so adding, removing and taking the first are
    O(1). A split node above is made for somebody who uses it, so it joins the list after the rest.

    **Tails.** What a request leaves in a partly filled block becomes a child of its last node with
    fewer tokens than a block, unless another child begins with them. Such a child goes when one
    comes that begins with all of its tokens. So the tokens of no tail begin a sibling's.

    **Windows.** A group with a sliding window can lose any block that no request holds, and the
    node lives on for the other groups: `loose` lists those blocks, by group.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self._stride = 4 * block_size
        self._windowed = [(g, w) for g, w in enumerate(windows) if w is not None]
        self._roots: dict[Namespace, Node] = {}
        self._namespaces: dict[Node, Namespace] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self.loose = {g: LooseBlocks(g) for g, _ in self._windowed}
        self._ahead: list[Node] = []
        self._shed: list[list[int]] = []
        self.num_nodes = 0
        self.num_idle = 0
        """Blocks that eviction could give up, in each group that keeps every position."""

    # -- finding -------------------------------------------------------------------------------

    def match(
        self, namespace: Namespace, tokens: Int32, limit: int, *, whole_only: bool = False
    ) -> Match:
        """The longest prefix of `tokens`, int32 [n], of at most `limit` tokens, at which every
        group can resume. Changes nothing; `enter` it before anything else happens."""
        root = self._roots.get(namespace)
        if root is None:
            return Match(0, 0, Node(None, b"", 0, 0, len(self.windows)))
        data = pack(tokens[:limit])
        node, whole, more = self._follow(root, data)
        match = Match(whole * self.block_size, whole, node)
        if not whole_only:
            self._find_source(match, data, more)
        if self._windowed:
            self._fall_back(match)
        return match

    def _follow(self, node: Node, data: memoryview) -> tuple[Node, int, int]:
        """How much is known of `data`, packed tokens that follow a node's end: the node in which
        that ends, whole blocks from the root, and tokens of that node's next block."""
        at, stride = 0, self._stride
        while at + stride <= len(data):
            child = node.children.get(bytes(data[at : at + stride]))
            if child is None:
                break
            node = child
            end = at + len(node.run)
            if end > len(data) or not node.run.startswith(data[at:end]):
                blocks, more = divmod(common_run(node.run, data, at), self.block_size)
                return node, node.start + blocks, more
            at = end
        return node, node.end, 0

    def _find_source(self, match: Match, data: memoryview, more: int) -> None:
        """Lengthen a match by tokens of a block to copy. more: tokens of the node's next block."""
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
        if NO_BLOCK in source:
            match.tail = None
            return
        match.length += more
        match.source = source

    def _fall_back(self, match: Match) -> None:
        """Shorten a match to where each window group holds its last window."""
        whole = match.whole
        held = np.arange(whole + 1) * self.block_size
        held[whole] = match.length
        good = np.ones(whole + 1, dtype=bool)
        for g, window in self._windowed:
            lost = match.node.path(g, 0, whole) == NO_BLOCK
            if lost.any():
                # Where the unbroken run before each block begins, in tokens.
                begins = np.maximum.accumulate(np.where(lost, np.arange(1, whole + 1), 0))
                begins = np.concatenate([[0], begins]) * self.block_size
                good &= (begins == 0) | (held - begins >= window - 1)
        if not good[whole]:
            match.whole = int(np.flatnonzero(good)[-1])
            match.length = match.whole * self.block_size
            match.node = match.node.upto(match.whole)
            match.source = match.tail = None

    def idle_blocks(self, match: Match) -> int:
        """How many of the whole blocks of a match nobody uses."""
        end, count = match.whole, 0
        at: Node | None = match.node
        while at is not None and not at.users:
            count += end - at.start
            end, at = at.start, at.parent
        return count

    # -- using ---------------------------------------------------------------------------------

    def enter(self, namespace: Namespace, node: Node, whole: int) -> Node:
        """A request starts to run on what leads to the end of the first `whole` blocks, which is in
        `node`. Returns its last node."""
        if node.parent is None and node not in self._namespaces:
            self._roots[namespace] = node
            self._namespaces[node] = namespace
            node.names += root_key(namespace)
        return self._use(node, whole, None)

    def advance(self, node: Node, data: memoryview) -> Node:
        """A request whose last node this is goes on through what is known of `data`, packed
        tokens. Returns its last node."""
        last, whole, _ = self._follow(node, data)
        return self._use(last, whole, node)

    def _use(self, last: Node, whole: int, after: Node | None) -> Node:
        """One more user for what leads from a node to the end of `whole` blocks."""
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
        """Make one of a node that has one more user now, and of that above, which is to have it and
        has no other child: if they have the same users, and nothing of that above is pending."""
        parent = above.parent
        if parent is None or above.users + 1 != node.users or above.written < above.count:
            return
        if not above.users:
            del self._idle[above]
            self.num_idle -= above.count
        node.join()
        parent.children[node.key] = node
        self.num_nodes -= 1

    def _split(self, node: Node, count: int) -> Node:
        """Make the first `count` blocks of a node one of their own, and return that."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("split a root")
        upper = node.cut(count, self._stride)
        parent.children[upper.key] = upper
        upper.children[node.key] = node
        if node.written:
            upper.index(node.key)
        if upper.written < count:
            self._ahead.append(upper)
        if not upper.users:
            self._idle[upper] = None
        self.num_nodes += 1
        return upper

    def leave(self, last: Node) -> None:
        """A request stops running on what leads to the end of a node."""
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
        """A tail was copied. Its parent is in use, so that it will still come after it."""
        self._idle.move_to_end(tail)

    def _prune(self, root: Node) -> None:
        """Forget a root that nothing needs, so that salts used once leave no trace."""
        if not root.users and not root.children:
            del self._roots[self._namespaces.pop(root)]

    # -- growing -------------------------------------------------------------------------------

    def extend(
        self, node: Node, data: bytes | memoryview, blocks: Sequence[bytes], ahead: bool
    ) -> Node:
        """A request whose last node this is goes on by whole blocks, of whose first there is no
        child. data: their tokens, and blocks: their ids per group; packed int32. ahead: the plan
        that is being made will fill them. Returns its last node."""
        key = bytes(data[: self._stride])
        if node.children:
            self._uncover(node, key)
        if node.users > 1 or node.children or node.parent is None:
            parent, node = node, Node(node, key, node.end, 1, len(self.windows))
            parent.children[key] = node
            self.num_nodes += 1
        count = node.count
        pending = node.written < count
        node.grow(data, blocks)
        if pending:
            pass  # until `settle`
        elif ahead:
            self._ahead.append(node)
        elif count:
            node.written = node.count
        else:
            self._settle(node)
        return node

    def settle(self) -> None:
        """The plan that was being made is complete: what it will fill can be copied by later
        ones."""
        for node in self._ahead:
            if node.count:
                self._settle(node)
        self._ahead.clear()

    def _settle(self, node: Node) -> None:
        new, node.written = not node.written, node.count
        if new and node.parent is not None:
            self._uncover(node.parent, node.key)
            node.parent.index(node.key)

    def add_tail(self, node: Node, data: bytes, blocks: Sequence[bytes]) -> Node | None:
        """Keep a partly filled block of tokens `data` after a node's end, for requests to copy; all
        packed int32. None if there are such tokens already."""
        if node.order is not None:
            _, after = node.order.around(data)
            if after is not None and after.startswith(data):
                return None
            self._uncover(node, data)
        tail = Node(node, data, node.end, 0, len(self.windows))
        tail.grow(data, blocks)
        tail.written = 1
        node.children[data] = tail
        node.index(data)
        self._idle[tail] = None
        self.num_idle += 1
        self.num_nodes += 1
        return tail

    # -- giving up -----------------------------------------------------------------------------

    def name(self, match: Match, namespace: Namespace) -> bytes:
        """Of the contents of the last whole block of a match."""
        if not match.whole:
            return root_key(namespace)
        return match.node.name(match.whole - match.node.start - 1, self._stride)

    def evict(self, count: int, named: bool) -> Given:
        """Give up `count` blocks of each group that keeps every position, of nodes least recently
        used, each node's last blocks. There must be as many. Where they are named, they come in the
        order in which they should be given up further: longer prefixes before shorter ones."""
        parts: list[list[array[int]]] = []
        names: list[bytes] = []
        while count:
            node = next(iter(self._idle))
            if node.children:
                raise RuntimeError("evicted a node that others hang on")
            size = node.count
            take = min(count, size)
            count -= take
            self.num_idle -= take
            last_names = self._last_names(node, take) if named else []
            if take == size:
                self._remove(node)
            taken = node.trim(take, self._stride)
            if self.loose:
                self._forget_loose(taken)
            parts.append([ids[::-1] for ids in taken] if named else taken)
            names += last_names[::-1]
        blocks = [
            np.frombuffer(b"".join([part[g] for part in parts]), dtype=np.int32)
            for g in range(len(self.windows))
        ]
        return Given(blocks, names)

    def _last_names(self, node: Node, count: int) -> list[bytes]:
        """Of its last `count` blocks."""
        if len(node.run) < self._stride:
            return [b""]
        node.name(node.count - 1, self._stride)
        names = node.names[-count * KEY_BYTES :]
        return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]

    def _remove(self, node: Node) -> None:
        """Take an idle leaf out of the tree."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("removed a root")
        del self._idle[node]
        del parent.children[node.key]
        if not parent.children:
            parent.order = None
        elif node.written and parent.order is not None:
            parent.order.remove(node.key)
        self.num_nodes -= 1
        if parent.parent is None:
            self._prune(parent)

    def _uncover(self, parent: Node, key: bytes) -> None:
        """Give up the tail of which `key` has all tokens, and more, if there is one."""
        before = None if parent.order is None else parent.order.around(key)[0]
        if before is not None and key.startswith(before):
            tail = parent.children[before]
            self._remove(tail)
            self.num_idle -= 1
            self._shed.append(tail.at(0))
            self._forget_loose(tail.trim(1, self._stride))

    def take_shed(self) -> list[list[int]]:
        """What the tree gave up of itself since the last call: a block, or none, of each group."""
        shed, self._shed = self._shed, []
        return shed

    def _forget_loose(self, blocks: Sequence[array[int]]) -> None:
        for g, loose in self.loose.items():
            loose.discard(blocks[g])

    # -- looking -------------------------------------------------------------------------------

    def roots(self, most: int) -> list[Node]:
        """The roots of the namespaces that came last."""
        return list(islice(reversed(self._roots.values()), most))
