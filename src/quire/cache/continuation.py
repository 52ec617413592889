"""Continuations of a text, taken from the prefix tree."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.node import Node
from quire.cache.prefix_tree import pack


def continuation(last: Node, tokens: Int32, block_size: int, count: int) -> Int32:
    """Returns the tokens that follow a text in the tree, int32 [at most `count`].

    If several texts continue it, the result follows the latest or one of the closest.

    Args:
        last: the last node of the text's own blocks. Only tokens after its end are compared.
        tokens: the text, int32 [n].
        block_size: tokens of a block.
        count: most tokens to return.
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
    following = bytes(node.run[place + len(rest) : place + len(rest) + 4 * count])
    while len(following) < 4 * count and node.children:
        node = next(reversed(node.children.values()))
        following += bytes(node.run[: 4 * count - len(following)])
    return np.frombuffer(following, dtype=np.int32)


def _child(node: Node, rest: bytes) -> Node | None:
    """Returns a child that begins with these tokens, packed int32."""
    if not rest:
        return next(reversed(node.children.values()), None)
    child, shared = node.closest(rest)
    return child if 4 * shared == len(rest) else None
