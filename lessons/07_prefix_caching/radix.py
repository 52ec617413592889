"""A radix tree over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.arrays import Int32, int32


def common(a: Int32, b: Int32) -> int:
    """Counts the tokens with which both begin."""
    n = min(len(a), len(b))
    return int(np.append(a[:n] != b[:n], True).argmax())


@dataclass
class Node:
    """A run of tokens; children begin with different tokens."""

    run: Int32
    children: dict[int, Node] = field(default_factory=dict)


class RadixTree:
    """Prompts as paths: what two have in common is one path, to the token."""

    def __init__(self) -> None:
        self.root = Node(int32([]))

    def walk(self, tokens: Int32) -> tuple[Node, int, int]:
        """Returns the last node reached, how much of its run, and how many tokens in all."""
        node, shared, at = self.root, 0, 0
        while shared == len(node.run) and at < len(tokens) and int(tokens[at]) in node.children:
            node = node.children[int(tokens[at])]
            shared = common(node.run, tokens[at:])
            at += shared
        return node, shared, at

    def match(self, tokens: Int32) -> int:
        return self.walk(tokens)[2]

    def insert(self, tokens: Int32) -> None:
        node, shared, at = self.walk(tokens)
        if shared < len(node.run):  # the prompt leaves in the middle of a run: cut it there
            rest = Node(node.run[shared:], node.children)
            node.run, node.children = node.run[:shared], {int(rest.run[0]): rest}
        if at < len(tokens):
            node.children[int(tokens[at])] = Node(tokens[at:].copy())
