"""A summary of block pools and the prefix tree, small enough to be displayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.arrays import Int32, int32
from quire.cache.block_manager import BlockManager
from quire.cache.block_tables import BlockTables
from quire.cache.node import Node
from quire.cache.prefix_tree import PrefixTree

FREE = -2
CACHED = -1

_NEWEST = 48
"""Limit of the children that are visited per node."""
_STEPS = 4096
"""Limit of the nodes that are visited in all."""
_FEWEST_BLOCKS = 256
"""Blocks that a summary covers at least."""


@dataclass(slots=True)
class PoolSummary:
    """The used part of one KV group's pool as cells of `per_cell` blocks.

    The blocks behind the cells are free. The last cell may have fewer blocks.

    Attributes:
        window: tokens of the group's sliding window, or None.
        num_blocks: size of the pool.
        per_cell: blocks of a cell.
        owner: int32 [cells], a lane that holds blocks of the cell. `CACHED` if only the tree holds
            some, `FREE` if nothing does.
        holders: int32 [cells], the largest number of holders of any block of the cell.
        filled: int32 [cells], number of blocks that are not free.
    """

    window: int | None
    num_blocks: int
    per_cell: int
    owner: Int32
    holders: Int32
    filled: Int32


@dataclass(slots=True)
class TreeRun:
    """A path of nodes without a fork. Its tokens are shared as a whole.

    Attributes:
        parent: index of the run before it, or -1 for a namespace's root, which has no tokens.
        length: number of tokens.
        tokens: int32, the first tokens.
        users: number of requests that use the run.
        hidden: number of children that the summary leaves out.
    """

    parent: int
    length: int
    tokens: Int32
    users: int
    hidden: int = 0


@dataclass(slots=True)
class CacheSummary:
    """The state of a block manager.

    Attributes:
        pools: one per KV group.
        runs: the top of the prefix tree, parents before children, newest children first.
        num_nodes: number of nodes in the whole tree.
    """

    pools: list[PoolSummary]
    runs: list[TreeRun]
    num_nodes: int


def summarize(manager: BlockManager, cells: int, runs: int, shown: int) -> CacheSummary:
    """Returns a summary of bounded size.

    Args:
        cells: most cells of a pool.
        runs: most runs of the tree.
        shown: most tokens of a run.
    """
    return CacheSummary(
        [summarize_pool(tables, cells) for tables in manager.groups],
        summarize_tree(manager.tree, runs, shown),
        manager.tree.num_nodes,
    )


def summarize_pool(tables: BlockTables, most: int) -> PoolSummary:
    """Summarizes a pool in at most `most` cells. Costs O(blocks), in a few numpy operations.

    The cells end at a power of two behind the last used block, so that few changes move the end.
    """
    holders = tables.pool.holders
    used = int(np.flatnonzero(holders)[-1]) + 1 if holders.any() else 0
    covered = min(len(holders), max(_FEWEST_BLOCKS, 1 << (used - 1).bit_length() if used else 0))
    holders = holders[:covered]
    owner = np.where(holders > 0, CACHED, FREE).astype(np.int32)
    for lane in np.flatnonzero(tables.end > tables.start).tolist():
        owner[tables.held(lane)] = lane
    per_cell = max(1, -(-covered // most))
    num_blocks = tables.pool.num_blocks
    if per_cell == 1:
        filled = int32(holders > 0)
        return PoolSummary(tables.window, num_blocks, 1, owner, holders.copy(), filled)
    cells = -(-covered // per_cell)
    spare = cells * per_cell - covered
    owner = np.pad(owner, (0, spare), constant_values=FREE).reshape(cells, per_cell)
    holders = np.pad(holders, (0, spare)).reshape(cells, per_cell)
    return PoolSummary(
        tables.window,
        num_blocks,
        per_cell,
        owner.max(1),
        holders.max(1),
        int32((holders > 0).sum(1)),
    )


def summarize_tree(tree: PrefixTree, most: int, shown: int) -> list[TreeRun]:
    """Summarizes the top of the tree in at most `most` runs, with their first `shown` tokens."""
    runs: list[TreeRun] = []
    level: list[tuple[int, Node]] = [(-1, root) for root in tree.roots(_NEWEST)]
    steps = 0
    while level:
        below: list[tuple[int, Node]] = []
        for parent, node in level:
            if len(runs) == most or steps > _STEPS:
                if parent >= 0:
                    runs[parent].hidden += 1
                continue
            nodes = [node, *_unforked(node)]
            steps += len(nodes)
            data = b"".join(bytes(each.run[: 4 * shown]) for each in nodes[: shown + 1])
            tokens = np.frombuffer(data, dtype=np.int32)[:shown]
            length = sum(each.tokens for each in nodes)
            runs.append(TreeRun(parent, length, tokens, nodes[0].users))
            children = list(islice(reversed(nodes[-1].children.values()), _NEWEST))
            runs[-1].hidden = len(nodes[-1].children) - len(children)
            below += [(len(runs) - 1, child) for child in children]
        level = below
    return runs


def _unforked(node: Node) -> Iterator[Node]:
    """Yields the nodes that follow a node without a fork and with the same users."""
    while node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        if child.users != node.users:
            return
        yield child
        node = child
