"""The prefix tree: what matches, and in which order it is given up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.cache.prefix_tree import NO_BLOCK, Namespace, Node, PrefixTree
from quire.plan import Int32, int32

_SIZE = 2
_BASE: Namespace = (0, "")


def grow(
    tree: PrefixTree, tokens: list[int], first_block: int, namespace: Namespace = _BASE
) -> list[Node]:
    """A request runs through `tokens`; returns its path, still in use."""
    match = tree.match(namespace, int32(tokens), len(tokens))
    tree.enter(namespace, match.path)
    path = match.path
    groups = len(tree.windows)
    for i in range(len(path) - 1, len(tokens) // _SIZE):
        key = int32(tokens[i * _SIZE : (i + 1) * _SIZE]).tobytes()
        tree.extend(path, key, [first_block + i] * groups)
    return path


def test_match_is_the_longest_prefix_of_whole_blocks_within_the_limit() -> None:
    tree = PrefixTree(_SIZE, [None])
    grow(tree, [1, 2, 3, 4, 5, 6], 10)
    tokens = int32([1, 2, 3, 4, 9, 9])
    match = tree.match(_BASE, tokens, 6)
    assert match.length == 4
    assert [node.blocks for node in match.path[1:]] == [[10], [11]]
    assert tree.match(_BASE, tokens, 3).length == 2
    assert tree.match(_BASE, int32([2, 1]), 2).length == 0


def test_a_namespace_is_a_tree_of_its_own_and_leaves_no_trace() -> None:
    tree = PrefixTree(_SIZE, [None])
    path = grow(tree, [1, 2], 0, (0, "salt"))
    assert tree.match(_BASE, int32([1, 2]), 2).length == 0
    assert tree.match((1, "salt"), int32([1, 2]), 2).length == 0
    assert tree.match((0, "salt"), int32([1, 2]), 2).length == 2
    tree.leave(path)
    assert tree.evict() == [0]
    assert not tree._roots
    assert not tree._names
    empty = tree.match((0, "once"), int32([7, 8]), 2)
    tree.enter((0, "once"), empty.path)
    tree.leave(empty.path)
    assert not tree._roots


def test_least_recently_used_leaves_go_first() -> None:
    tree = PrefixTree(_SIZE, [None])
    first = grow(tree, [1, 2, 3, 4], 0)
    second = grow(tree, [1, 2, 5, 6], 10)
    tree.leave(first)
    assert tree.num_idle == 1
    tree.leave(second)
    again = grow(tree, [1, 2, 3, 4], 0)
    tree.leave(again)
    # [5, 6] was left before [3, 4], and [1, 2] hangs above both.
    assert [tree.evict() for _ in range(3)] == [[11], [1], [0]]
    assert tree.num_nodes == tree.num_idle == 0


def test_nodes_in_use_are_not_given_up() -> None:
    tree = PrefixTree(_SIZE, [None])
    grow(tree, [1, 2], 0)
    with pytest.raises(KeyError):
        tree.evict()


def test_a_window_needs_only_its_last_tokens() -> None:
    tree = PrefixTree(_SIZE, [None, 3])
    path = grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    tokens = int32([1, 2, 3, 4, 5, 6, 7, 8])
    for node in path[1:4]:
        tree.loosen(1, node)
    assert tree.num_loose(1) == 3
    assert tree.evict_block(1) == 0
    assert path[1].blocks == [0, NO_BLOCK]
    # The last 2 tokens before 8 are there, and so are those before 6 and 4; not before 2.
    assert [tree.match(_BASE, tokens, n).length for n in (8, 6, 4, 2)] == [8, 6, 4, 0]
    assert tree.evict_block(1) == 1
    assert [tree.match(_BASE, tokens, n).length for n in (8, 6, 4)] == [8, 6, 0]
    tree.tighten(1, path[3])
    with pytest.raises(KeyError):
        tree.evict_block(1)


class TreeMachine(RuleBasedStateMachine):
    """Against a list of the prefixes that must be there, in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(_SIZE, [None])
        self.next_block = 0
        self.paths: list[tuple[list[Node], tuple[int, ...]]] = []
        self.present: set[tuple[int, ...]] = set()
        self.order: list[tuple[int, ...]] = []

    def prefixes(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[: i + _SIZE] for i in range(0, len(tokens) - _SIZE + 1, _SIZE)]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def run(self, tokens: list[int]) -> None:
        whole = tuple(tokens[: len(tokens) // _SIZE * _SIZE])
        array: Int32 = int32(tokens)
        expected = [p for p in self.prefixes(whole) if p in self.present]
        assert self.tree.match(_BASE, array, len(tokens)).length == _SIZE * len(expected)
        self.paths.append((grow(self.tree, tokens, self.next_block), whole))
        self.next_block += 10
        for prefix in self.prefixes(whole):
            self.present.add(prefix)
            if prefix in self.order:
                self.order.remove(prefix)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        path, tokens = self.paths.pop(data.draw(st.integers(0, len(self.paths) - 1)))
        self.tree.leave(path)
        used = {p for _, other in self.paths for p in self.prefixes(other)}
        self.order += [p for p in reversed(self.prefixes(tokens)) if p not in used]

    @precondition(lambda self: self.order)
    @rule()
    def evict(self) -> None:
        self.tree.evict()
        self.present.remove(self.order.pop(0))

    @invariant()
    def agrees(self) -> None:
        assert self.tree.num_nodes == len(self.present)
        assert self.tree.num_idle == len(self.order)
        found = {spell(node) for node in self.tree.nodes()}
        assert found == self.present


def spell(node: Node) -> tuple[int, ...]:
    keys = []
    at: Node | None = node
    while at is not None:
        keys.append(at.key)
        at = at.parent
    return tuple(int(b) for b in b"".join(reversed(keys))[::4])


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
