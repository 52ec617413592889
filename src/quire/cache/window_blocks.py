"""Blocks of a sliding-window group that only the prefix tree holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.cache.node import NO_BLOCK, Node


class WindowBlocks:
    """One group's reusable blocks, in the order in which requests released them.

    Any of them can be taken from its node, which lives on for the other groups. A block is kept
    with the node that owned it and its place, counted in blocks from the root. If that node was
    cut since, the owner is an ancestor.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._blocks: OrderedDict[int, tuple[Node, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, last: Node, place: int, block: int) -> None:
        """Adds a block that its last request released, if the tree holds it at that place on the
        path to node `last`."""
        if place < last.end:
            owner = last.upto(place + 1)
            if owner.blocks[self._group][place - owner.start] == block:
                self._blocks[block] = owner, place

    def discard(self, blocks: Iterable[int]) -> None:
        """Removes blocks that requests hold again, or that the tree has evicted."""
        for block in blocks:
            self._blocks.pop(block, None)

    def take(self) -> int:
        """Takes the least recently released block from its node."""
        block, (node, place) = self._blocks.popitem(last=False)
        owner = node.upto(place + 1)
        owner.blocks[self._group][place - owner.start] = NO_BLOCK
        return block
