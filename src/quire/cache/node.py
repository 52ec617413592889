"""A node of the prefix tree: a run of tokens, and the blocks that hold their KV."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from quire.arrays import Int32
from quire.cache.block_hash import HASH_BYTES, next_hash
from quire.cache.sorted_keys import SortedKeys

NO_BLOCK = -1


class Node:
    """A run of tokens that follows the runs of its ancestors, with one block per `block_size`.

    A run fills whole blocks. The exception is a *tail*, whose tokens fill a part of one block. A
    tail has no children and no users, because requests copy its block.

    Attributes:
        run: the tokens, packed int32.
        first_tokens: the tokens of the first block, packed int32.
        blocks: block ids per KV group; `NO_BLOCK` where a sparse group has lost its block.
        start: number of blocks of the ancestors.
        written: number of blocks that hold their KV before the body of the next plan runs. Requests
            of that plan may read the other blocks, but not copy them.
        users: number of requests that use the node. A request uses all nodes on its path.
        leases: number of leases that mark the node. A lease marks all nodes on its path.
        children: child nodes, by the tokens of their first block.
        order: `first_tokens` of the children whose first block is written; None without children.
        block_hashes: concatenated hashes of the first blocks (`cache/block_hash.py`). They are
            computed on first use. A root has one hash, that of the empty prefix.
    """

    __slots__ = (
        "block_hashes",
        "blocks",
        "children",
        "first_tokens",
        "leases",
        "order",
        "parent",
        "run",
        "start",
        "users",
        "written",
    )

    def __init__(
        self, parent: Node | None, first_tokens: bytes, start: int, users: int, groups: int
    ) -> None:
        self.parent = parent
        self.first_tokens = first_tokens
        self.start = start
        self.users = users
        self.leases = 0
        self.written = 0
        self.run = bytearray()
        self.blocks: list[array[int]] = [array("i") for _ in range(groups)]
        self.children: dict[bytes, Node] = {}
        self.order: SortedKeys | None = None
        self.block_hashes = b""

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.blocks[0])

    @property
    def end(self) -> int:
        """Number of blocks from the root to the node's end."""
        return self.start + len(self.blocks[0])

    @property
    def tokens(self) -> int:
        return len(self.run) // 4

    def at(self, index: int) -> list[int]:
        """Returns the block at an index, in every group."""
        return [ids[index] for ids in self.blocks]

    # -- the path from the root ----------------------------------------------------------------

    def upto(self, whole: int) -> Node:
        """Returns the node on this node's path that holds block `whole - 1`, counted from the
        root."""
        node = self
        while node.start >= whole and node.parent is not None:
            node = node.parent
        return node

    def path(self, group: int, first: int, last: int) -> Int32:
        """Returns a group's blocks `first` to `last - 1` on this node's path, int32.

        The node itself has block `last - 1`.
        """
        parts: list[bytes] = []
        at: Node | None = self
        while at is not None and last > first:
            begin = max(first, at.start)
            parts.append(at.blocks[group][begin - at.start : last - at.start].tobytes())
            last, at = begin, at.parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=np.int32)

    def follow(self, data: memoryview, stride: int) -> tuple[Node, int, int]:
        """Follows tokens down from this node's end, as far as they match the tree.

        Returns the last matching node, the number of matching whole blocks from the root, and the
        number of tokens that match in the node's next block.

        Args:
            data: packed int32 tokens.
            stride: bytes of a block's tokens.
        """
        node, at = self, 0
        while at + stride <= len(data):
            child = node.children.get(bytes(data[at : at + stride]))
            if child is None:
                break
            node = child
            end = at + len(node.run)
            if end > len(data) or not node.run.startswith(data[at:end]):
                blocks, more = divmod(common_run(node.run, data, at), stride // 4)
                return node, node.start + blocks, more
            at = end
        return node, node.end, 0

    # -- growing and shrinking -----------------------------------------------------------------

    def grow(self, data: bytes | memoryview, blocks: Sequence[bytes]) -> None:
        """Appends tokens, and their blocks per group. All are packed int32."""
        self.run += data
        for ids, more in zip(self.blocks, blocks, strict=True):
            ids.frombytes(more)

    def split(self, count: int, stride: int) -> Node:
        """Moves the first `count` blocks to a new node between this one and its parent.

        Returns the new node, which has the same users and leases.

        Args:
            stride: bytes of a block's tokens.
        """
        upper = Node(self.parent, self.first_tokens, self.start, self.users, 0)
        size = count * stride
        upper.run, upper.block_hashes = self.run[:size], self.block_hashes[: count * HASH_BYTES]
        upper.blocks = [ids[:count] for ids in self.blocks]
        upper.written = min(count, self.written)
        upper.leases = self.leases
        del self.run[:size]
        self.block_hashes = self.block_hashes[count * HASH_BYTES :]
        for ids in self.blocks:
            del ids[:count]
        self.first_tokens = bytes(self.run[:stride])
        self.written -= upper.written
        self.start += count
        self.parent = upper
        return upper

    def absorb_parent(self) -> None:
        """Takes over the run and the blocks of the parent, which has no other child.

        The parent leaves the tree, but others may still hold it: `SparseBlocks` keeps a block with
        the node that owned it. So the parent stays as an empty node whose own parent is the node
        that took over its blocks. `upto` from it then finds them::

                  root                        root
                    │                           │
                 parent  blocks 0-3            node  blocks 0-5  <── parent  (empty, start 6)
                    │
                  node   blocks 4-5
        """
        above = self.parent
        if above is None:
            raise RuntimeError("a root cannot be merged into its child")
        if len(above.block_hashes) == above.count * HASH_BYTES:
            self.block_hashes = above.block_hashes + self.block_hashes
        else:
            self.block_hashes = above.block_hashes
        self.written += above.count
        self.run = above.run + self.run
        for ids, more in zip(above.blocks, self.blocks, strict=True):
            ids += more
        self.blocks, above.blocks = above.blocks, [array("i") for _ in self.blocks]
        # The old parent starts after all blocks, so that `upto` always continues at this node.
        self.start, above.start = above.start, self.end
        self.first_tokens = above.first_tokens
        self.parent, above.parent = above.parent, self

    def trim(self, count: int, stride: int) -> list[array[int]]:
        """Removes the last `count` blocks. Returns their ids per group."""
        rest = self.count - count
        if not rest:
            taken, self.blocks = self.blocks, [array("i") for _ in self.blocks]
        else:
            taken = [ids[rest:] for ids in self.blocks]
            for ids in self.blocks:
                del ids[rest:]
            del self.run[rest * stride :]
            self.block_hashes = self.block_hashes[: rest * HASH_BYTES]
        self.written = min(self.written, rest)
        return taken

    # -- children ------------------------------------------------------------------------------

    def index(self, key: bytes) -> None:
        """Makes the first block of a child available for copies."""
        if self.order is None:
            self.order = SortedKeys()
        self.order.add(key)

    def closest(self, tokens: bytes) -> tuple[Node | None, int]:
        """Finds the child whose first block shares the longest prefix with `tokens`.

        Returns it (or None) and the number of shared tokens. Ignores children whose first block is
        not written yet. In sorted order, a neighbour of `tokens` shares the longest prefix.

        Args:
            tokens: packed int32.
        """
        if self.order is None or not tokens:
            return None, 0
        best, most = None, 0
        for key in self.order.around(tokens):
            count = 0 if key is None else common_start(key, tokens)
            if count > most:
                best, most = key, count
        return (None, 0) if best is None else (self.children[best], most)

    # -- block hashes --------------------------------------------------------------------------

    def block_hash(self, index: int, stride: int) -> bytes:
        """Returns the hash of block `index`; -1 is the last block of the parent.

        All missing hashes of a node are computed at once.
        """
        if index < 0:
            above = self.parent
            return self.block_hashes if above is None else above.block_hash(above.count - 1, stride)
        path: list[Node] = [self]
        while (above := path[-1].parent) is not None and len(above.block_hashes) < max(
            HASH_BYTES, above.count * HASH_BYTES
        ):
            path.append(above)
        for node in reversed(path):
            node._compute_hashes(stride)
        return self.block_hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def _compute_hashes(self, stride: int) -> None:
        """Computes all block hashes, from the parent's. The hash of a tail covers its tokens."""
        known = len(self.block_hashes) // HASH_BYTES
        above = self.block_hashes if known or self.parent is None else self.parent.block_hashes
        last, hashes = above[-HASH_BYTES:], [self.block_hashes]
        for at in range(known * stride, len(self.run), stride):
            last = next_hash(last, bytes(self.run[at : at + stride]))
            hashes.append(last)
        self.block_hashes = b"".join(hashes)


def common_start(a: bytes, b: bytes) -> int:
    """Counts the first tokens, packed int32, that two short strings have in common."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else size // 4


def common_run(run: bytearray, data: memoryview, at: int) -> int:
    """Counts the first tokens, packed int32, that a run and `data[at:]` have in common."""
    count = min(len(run), len(data) - at) // 4
    differ = np.frombuffer(run, np.int32, count) != np.frombuffer(data, np.int32, count, at)
    first = int(differ.argmax())
    return first if differ[first] else count
