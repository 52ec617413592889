"""A node of the prefix tree: a run of tokens, and the blocks that hold their KV."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from quire.arrays import Int32
from quire.cache.chain import KEY_BYTES, next_key
from quire.cache.sorted_keys import SortedKeys

NO_BLOCK = -1


class Node:
    """Tokens that follow those of its ancestors, one block for every `block_size` of them.

    A run is whole blocks, but for a *tail*: tokens of one block that is partly filled. A tail has
    no children and no users; requests copy its block.

    Attributes:
        run: the tokens, packed int32. key: those of its first block.
        blocks: their blocks' ids, per KV group; `NO_BLOCK` where a window group has lost one.
        start: blocks of its ancestors.
        written: how many of its blocks hold their KV before the body of the plan that is being made
            runs. The others are for others to read in that body, but not to copy.
        users: requests that run on it. A request counts on each node from its root to its last.
        children: the nodes hanging on it, by the bytes of their first block.
        order: keys of the children whose first block is written; None where there are no children.
        names: of its blocks' contents (`cache/chain.py`), one after the other, as far as they were
            asked for. A root has one, of no tokens.
    """

    __slots__ = (
        "blocks",
        "children",
        "key",
        "names",
        "order",
        "parent",
        "run",
        "start",
        "users",
        "written",
    )

    def __init__(
        self, parent: Node | None, key: bytes, start: int, users: int, groups: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.users = users
        self.written = 0
        self.run = bytearray()
        self.blocks: list[array[int]] = [array("i") for _ in range(groups)]
        self.children: dict[bytes, Node] = {}
        self.order: SortedKeys | None = None
        self.names = b""

    @property
    def count(self) -> int:
        """Its blocks."""
        return len(self.blocks[0])

    @property
    def end(self) -> int:
        """Blocks from the root to its end."""
        return self.start + len(self.blocks[0])

    @property
    def tokens(self) -> int:
        return len(self.run) // 4

    def at(self, index: int) -> list[int]:
        """One of its blocks, in every group."""
        return [ids[index] for ids in self.blocks]

    # -- the way from the root -----------------------------------------------------------------

    def upto(self, whole: int) -> Node:
        """The node on the way to this one's end in which the first `whole` blocks end."""
        node = self
        while node.start >= whole and node.parent is not None:
            node = node.parent
        return node

    def path(self, group: int, first: int, last: int) -> Int32:
        """A group's blocks `first` to `last - 1` on the way to this node, which has the last."""
        parts: list[bytes] = []
        at: Node | None = self
        while at is not None and last > first:
            begin = max(first, at.start)
            parts.append(at.blocks[group][begin - at.start : last - at.start].tobytes())
            last, at = begin, at.parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=np.int32)

    # -- growing and shrinking -----------------------------------------------------------------

    def grow(self, data: bytes | memoryview, blocks: Sequence[bytes]) -> None:
        """More tokens, and their blocks per group; all packed int32."""
        self.run += data
        for ids, more in zip(self.blocks, blocks, strict=True):
            ids.frombytes(more)

    def cut(self, count: int, stride: int) -> Node:
        """Put the first `count` blocks of this node, of `stride` bytes of tokens each, into a node
        between it and its parent, with the same users. This one becomes the rest."""
        upper = Node(self.parent, self.key, self.start, self.users, 0)
        size = count * stride
        upper.run, upper.names = self.run[:size], self.names[: count * KEY_BYTES]
        upper.blocks = [ids[:count] for ids in self.blocks]
        upper.written = min(count, self.written)
        del self.run[:size]
        self.names = self.names[count * KEY_BYTES :]
        for ids in self.blocks:
            del ids[:count]
        self.key = bytes(self.run[:stride])
        self.written -= upper.written
        self.start += count
        self.parent = upper
        return upper

    def join(self) -> None:
        """Become one with the parent, which has no other child. Who still points at that finds the
        way (`upto`) here."""
        above = self.parent
        if above is None:
            raise RuntimeError("a root has no place to be taken")
        if len(above.names) == above.count * KEY_BYTES:
            self.names = above.names + self.names
        else:
            self.names = above.names
        self.written += above.count
        self.run = above.run + self.run
        for ids, more in zip(above.blocks, self.blocks, strict=True):
            ids += more
        self.blocks, above.blocks = above.blocks, [array("i") for _ in self.blocks]
        # Beyond all of its places, so that `upto` goes on to its new parent.
        self.start, above.start = above.start, self.end
        self.key = above.key
        self.parent, above.parent = above.parent, self

    def trim(self, count: int, stride: int) -> list[array[int]]:
        """Give up its last `count` blocks; their ids per group."""
        rest = self.count - count
        if not rest:
            taken, self.blocks = self.blocks, [array("i") for _ in self.blocks]
        else:
            taken = [ids[rest:] for ids in self.blocks]
            for ids in self.blocks:
                del ids[rest:]
            del self.run[rest * stride :]
            self.names = self.names[: rest * KEY_BYTES]
        self.written = min(self.written, rest)
        return taken

    # -- children ------------------------------------------------------------------------------

    def index(self, key: bytes) -> None:
        """The first block of a child can be copied from now on."""
        if self.order is None:
            self.order = SortedKeys()
        self.order.add(key)

    def closest(self, tokens: bytes) -> tuple[Node | None, int]:
        """The child to copy from that begins with the most of `tokens`, packed; how many.

        In the order of their bytes, the keys that begin with the most of a string stand beside it.
        """
        if self.order is None or not tokens:
            return None, 0
        best, most = None, 0
        for key in self.order.around(tokens):
            count = 0 if key is None else common_start(key, tokens)
            if count > most:
                best, most = key, count
        return (None, 0) if best is None else (self.children[best], most)

    # -- names ---------------------------------------------------------------------------------

    def name(self, index: int, stride: int) -> bytes:
        """Of the contents of its block `index`, -1 for what lies before the first. All of a node's
        names are worked out at once, as far as they are not there yet."""
        if index < 0:
            above = self.parent
            return self.names if above is None else above.name(above.count - 1, stride)
        path: list[Node] = [self]
        while (above := path[-1].parent) is not None and len(above.names) < max(
            KEY_BYTES, above.count * KEY_BYTES
        ):
            path.append(above)
        for node in reversed(path):
            node._work_out_names(stride)
        return self.names[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def _work_out_names(self, stride: int) -> None:
        """All of its names; its parent's are there."""
        known = len(self.names) // KEY_BYTES
        above = self.names if known or self.parent is None else self.parent.names
        name, names = above[-KEY_BYTES:], [self.names]
        for at in range(known * stride, len(self.run) // stride * stride, stride):
            name = next_key(name, bytes(self.run[at : at + stride]))
            names.append(name)
        self.names = b"".join(names)


def common_start(a: bytes, b: bytes) -> int:
    """Tokens, packed int32, that two short strings begin with in common."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else size // 4


def common_run(run: bytearray, data: memoryview, at: int) -> int:
    """Tokens, packed int32, that a run and `data` from byte `at` on begin with in common."""
    count = min(len(run), len(data) - at) // 4
    differ = np.frombuffer(run, np.int32, count) != np.frombuffer(data, np.int32, count, at)
    first = int(differ.argmax())
    return first if differ[first] else count
