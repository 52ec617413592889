"""Texts of the prefix tree that begin as another one, and how they go on."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.node import Node
from quire.cache.prefix_tree import pack


def continuation(last: Node, tokens: Int32, block_size: int, count: int) -> Int32:
    """Returns what the tree has behind a text, int32 [at most `count`]: where several texts went on
    from it, the latest or one of the closest.

    last: the node up to which the tree has the text's own blocks. tokens: the text, int32 [n]. Only
    tokens behind that node's end are compared, whole runs at a time.
    """
    stride = 4 * block_size
    data = pack(tokens[last.end * block_size :])
    node, whole, shared = last.follow(data, stride)
    rest = bytes(data[(whole - last.end) * stride :])
    place = (whole - node.start) * stride
    if place == len(node.run):
        child = _child(node, rest) if len(rest) < stride else None
        if child is None:
            return int32([])
        node, place = child, 0
    elif 4 * shared < len(rest):
        return int32([])
    found = bytes(node.run[place + len(rest) : place + len(rest) + 4 * count])
    while len(found) < 4 * count and node.children:
        node = next(reversed(node.children.values()))
        found += bytes(node.run[: 4 * count - len(found)])
    return np.frombuffer(found, dtype=np.int32)


def _child(node: Node, rest: bytes) -> Node | None:
    """Returns a child that begins with these tokens, packed int32."""
    if not rest:
        return next(reversed(node.children.values()), None)
    child, shared = node.closest(rest)
    return child if 4 * shared == len(rest) else None
