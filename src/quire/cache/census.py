"""What lies where in a pool and in the prefix tree, small enough to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_tables import BlockTables
from quire.cache.node import Node
from quire.cache.prefix_tree import PrefixTree

FREE = -2
CACHED = -1

_NEWEST = 48
"""Children of one node that are looked at."""
_STEPS = 4096
"""Nodes that are looked at in all."""


@dataclass(slots=True)
class Census:
    """A pool as cells of `per_cell` blocks each, the last of which may be fewer. All int32 [cells].

    owner: a lane that holds blocks of the cell, `CACHED` where only the tree holds some, or `FREE`.
    holders: the most that any of its blocks has. filled: how many of its blocks are not free.
    """

    per_cell: int
    owner: Int32
    holders: Int32
    filled: Int32


def census(tables: BlockTables, most: int) -> Census:
    """At most `most` cells. Costs O(blocks), in a few numpy operations."""
    holders = tables.pool.holders
    owner = np.where(holders > 0, CACHED, FREE).astype(np.int32)
    for lane in np.flatnonzero(tables.end > tables.start).tolist():
        owner[tables.held(lane)] = lane
    per_cell = max(1, -(-len(holders) // most))
    if per_cell == 1:
        return Census(1, owner, holders.copy(), int32(holders > 0))
    cells = -(-len(holders) // per_cell)
    spare = cells * per_cell - len(holders)
    owner = np.pad(owner, (0, spare), constant_values=FREE).reshape(cells, per_cell)
    holders = np.pad(holders, (0, spare)).reshape(cells, per_cell)
    return Census(per_cell, owner.max(1), holders.max(1), int32((holders > 0).sum(1)))


@dataclass(slots=True)
class Twig:
    """A run of tokens that is shared as a whole: nodes of the tree without a fork between them.

    parent: its place in the outline, -1 for a root (of a namespace; it has no tokens). length: in
    tokens. tokens: the first ones. users: requests that run on it. hidden: children that the
    outline leaves out.
    """

    parent: int
    length: int
    tokens: Int32
    users: int
    hidden: int = 0


def outline(tree: PrefixTree, most: int, shown: int) -> list[Twig]:
    """The top of the tree, parents before children, newest children first: at most `most` twigs,
    with their first `shown` tokens."""
    twigs: list[Twig] = []
    level: list[tuple[int, Node]] = [(-1, root) for root in tree.roots(_NEWEST)]
    steps = 0
    while level:
        below: list[tuple[int, Node]] = []
        for parent, node in level:
            if len(twigs) == most or steps > _STEPS:
                if parent >= 0:
                    twigs[parent].hidden += 1
                continue
            run = [node, *_straight(node)]
            steps += len(run)
            data = b"".join(bytes(each.run[: 4 * shown]) for each in run[: shown + 1])
            tokens = np.frombuffer(data, dtype=np.int32)[:shown]
            length = sum(each.tokens for each in run)
            twigs.append(Twig(parent, length, tokens, run[0].users))
            children = list(islice(reversed(run[-1].children.values()), _NEWEST))
            twigs[-1].hidden = len(run[-1].children) - len(children)
            below += [(len(twigs) - 1, child) for child in children]
        level = below
    return twigs


def _straight(node: Node) -> Iterator[Node]:
    """What follows a node without a fork, under the same requests."""
    while node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        if child.users != node.users:
            return
        yield child
        node = child
