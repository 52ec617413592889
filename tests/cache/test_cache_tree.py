"""The prefix tree: matches, splits of nodes, and the order of eviction."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.arrays import int32
from quire.cache.block_hash import Namespace, next_hash, root_hash
from quire.cache.node import NO_BLOCK, Node, common_start
from quire.cache.prefix_tree import Match, PrefixTree
from quire.cache.window_blocks import WindowBlocks
from tests.brain import check_node, nodes_of
from tests.slow import examples

_SIZE = 2
_BASE: Namespace = (0, "")


def grow(
    tree: PrefixTree,
    tokens: list[int],
    first_block: int,
    namespace: Namespace = _BASE,
    ahead: bool = False,
) -> Node:
    """Enters the whole blocks of `tokens` as a request does; returns the last node, still in use.
    Block i of the sequence gets the id `first_block + i`, unless it is cached already."""
    match = tree.match(namespace, int32(tokens), len(tokens), whole_only=True)
    last = tree.enter(namespace, match.node, match.whole)
    whole = len(tokens) // _SIZE
    if whole > match.whole:
        blocks = int32(range(first_block + match.whole, first_block + whole))
        data = int32(tokens[match.whole * _SIZE : whole * _SIZE]).tobytes()
        last = tree.extend(last, data, [blocks.tobytes()] * tree.num_groups, ahead)
    return last


def ids(blocks: list[int]) -> list[bytes]:
    """Returns the ids of one group's blocks."""
    return [int32(blocks).tobytes()]


def tail(tree: PrefixTree, last: Node, tokens: list[int], block: int) -> Node | None:
    return tree.add_tail(
        last, int32(tokens).tobytes(), [int32([block]).tobytes()] * tree.num_groups
    )


def find(tree: PrefixTree, tokens: list[int], limit: int | None = None) -> Match:
    return tree.match(_BASE, int32(tokens), len(tokens) if limit is None else limit)


def shared(tree: PrefixTree, match: Match) -> list[int]:
    return match.node.path(0, 0, match.whole).tolist()


def evict(tree: PrefixTree, count: int) -> list[int]:
    return tree.evict(count, hashed=True).blocks[0].tolist()


def test_a_match_is_whole_blocks_and_a_block_to_copy() -> None:
    tree = PrefixTree(4, [None])
    last = tree.enter(_BASE, find(tree, []).node, 0)
    tree.extend(last, int32(range(12)).tobytes(), ids([10, 11, 12]), False)
    match = find(tree, [0, 1, 2, 3, 4, 5, 6, 99, 7])
    assert (match.length, shared(tree, match), match.source) == (7, [10], [11])
    match = find(tree, list(range(20)), 10)
    assert (match.length, shared(tree, match), match.source) == (10, [10, 11], [12])
    match = find(tree, list(range(20)))
    assert (match.length, shared(tree, match), match.source) == (12, [10, 11, 12], None)
    match = find(tree, [0, 1, 99])
    assert (match.length, shared(tree, match), match.source) == (2, [], [10])
    assert find(tree, [1, 0]).length == 0
    whole = tree.match(_BASE, int32([0, 1, 2, 3, 4, 5]), 6, whole_only=True)
    assert (whole.length, whole.source) == (4, None)


def test_the_child_with_the_longest_common_prefix_is_copied() -> None:
    tree = PrefixTree(8, [None])
    root = tree.enter(_BASE, find(tree, []).node, 0)
    for block, first in enumerate([[1, 2, 3, 9], [1, 2, 7, 7], [1, 2, 3, 4], [5, 5, 5, 5]]):
        tree.extend(root, int32([*first, 0, 0, 0, 0]).tobytes(), ids([block]), False)
    for tokens, length, source in (
        ([1, 2, 3, 4, 5], 4, [2]),
        ([1, 2, 3, 9, 1], 4, [0]),
        ([1, 2, 7, 1, 1], 3, [1]),
        ([5, 6], 1, [3]),
        ([6], 0, None),
    ):
        match = find(tree, tokens)
        assert (match.length, match.source) == (length, source)


def test_a_block_this_plan_computes_is_shared_but_not_copied() -> None:
    tree = PrefixTree(_SIZE, [None])
    grow(tree, [1, 2, 3, 4], 0, ahead=True)
    assert find(tree, [1, 2, 3, 9]).length == 2
    assert find(tree, [1, 9]).length == 0
    tree.mark_written()
    assert find(tree, [1, 2, 3, 9]).length == 3
    assert find(tree, [1, 9]).length == 1
    # The first part of a node is written and the rest is not; a split preserves this.
    grow(tree, [1, 2, 3, 4, 5, 6, 7, 8], 0, ahead=True)
    assert find(tree, [1, 2, 3, 9]).length == 3
    assert find(tree, [1, 2, 3, 4, 5, 9]).length == 4
    grow(tree, [1, 2, 3, 4, 5, 6], 0)
    assert find(tree, [1, 2, 3, 9]).length == 3
    assert find(tree, [1, 2, 3, 4, 5, 6, 7, 9]).length == 6
    tree.mark_written()
    assert find(tree, [1, 2, 3, 4, 5, 9]).length == 5
    assert find(tree, [1, 2, 3, 4, 5, 6, 7, 9]).length == 7


def test_a_node_grows_in_place_until_it_has_a_child() -> None:
    tree = PrefixTree(_SIZE, [None])
    last = grow(tree, [1, 2], 0)
    again = tree.extend(last, int32([3, 4, 5, 6]).tobytes(), ids([1, 2]), False)
    assert again is last
    assert tree.num_nodes == 1
    second = grow(tree, [1, 2, 3, 4, 5, 6], 50)
    assert second is last
    assert tree.extend(last, int32([7, 7]).tobytes(), ids([3]), False) is not last
    third = grow(tree, [1, 2, 9, 9], 60)
    assert [node.tokens for node in (last.parent, last, third) if node] == [2, 4, 2]
    assert tree.num_nodes == 4
    assert [node.users for node in (last.parent, last, third) if node] == [3, 2, 1]


def test_a_split_keeps_the_prefixes_that_end_below_it() -> None:
    tree = PrefixTree(_SIZE, [None])
    first = grow(tree, [1, 2, 3, 4, 5, 6], 0)
    tree.leave(first)
    assert tree.num_idle == 3
    second = grow(tree, [1, 2, 7, 7], 10)
    assert (tree.num_idle, tree.num_nodes) == (2, 3)
    assert shared(tree, find(tree, [1, 2, 3, 4, 5, 6])) == [0, 1, 2]
    tree.leave(second)
    # The rest of the first is oldest and is evicted from its end; then comes the second.
    assert evict(tree, 4) == [2, 1, 11, 0]


def test_a_split_node_is_merged_with_its_only_child() -> None:
    windows = WindowBlocks(1, 3, _SIZE)
    tree = PrefixTree(_SIZE, [None, windows])
    tokens = list(range(8))
    first = grow(tree, tokens, 0)
    tree.block_hash(find(tree, tokens), _BASE)
    windows.add(first, 0, 0)
    second = grow(tree, [0, 1, 2, 3, 50, 51], 10)
    windows.add(first, 1, 1)
    windows.add(first, 2, 2)
    tree.leave(second)
    assert evict(tree, 1) == [12]
    assert tree.num_nodes == 2
    again = tree.enter(_BASE, first, first.end)
    assert again is first
    assert (tree.num_nodes, first.tokens, first.users) == (1, 8, 2)
    check_node(first, _SIZE)
    hashes = [root_hash(_BASE)]
    for at in range(0, 8, _SIZE):
        hashes.append(next_hash(hashes[-1], int32(tokens[at : at + _SIZE]).tobytes()))
    assert tree.block_hash(find(tree, tokens), _BASE) == hashes[4]
    assert [windows.take() for _ in range(3)] == [0, 1, 2]
    assert first.path(1, 0, 4).tolist() == [NO_BLOCK, NO_BLOCK, NO_BLOCK, 3]
    tree.leave(first)
    tree.leave(first)
    assert evict(tree, 4) == [3, 2, 1, 0]


def test_an_idle_node_is_joined_too() -> None:
    tree = PrefixTree(_SIZE, [None])
    first, second = grow(tree, list(range(8)), 0), grow(tree, [0, 1, 50, 51], 10)
    tree.leave(second)
    assert evict(tree, 1) == [11]
    tree.leave(first)
    assert (tree.num_nodes, tree.num_idle) == (2, 4)
    last = grow(tree, [*range(8), 9, 9], 0)
    assert (tree.num_nodes, tree.num_idle, last.tokens) == (1, 0, 10)
    check_node(last, _SIZE)


def test_a_namespace_has_its_own_tree_that_is_removed_when_empty() -> None:
    tree = PrefixTree(_SIZE, [None])
    last = grow(tree, [1, 2], 0, (0, "salt"))
    assert tree.match(_BASE, int32([1, 2]), 2).length == 0
    assert tree.match((1, "salt"), int32([1, 2]), 2).length == 0
    assert tree.match((0, "salt"), int32([1, 2]), 2).length == 2
    tree.leave(last)
    assert evict(tree, 1) == [0]
    assert not tree._roots
    assert not tree._namespaces
    tree.leave(grow(tree, [7], 0, (0, "once")))
    assert not tree._roots


def test_least_recently_used_leaves_go_first() -> None:
    tree = PrefixTree(_SIZE, [None])
    first = grow(tree, [1, 2, 3, 4], 0)
    second = grow(tree, [1, 2, 5, 6], 10)
    tree.leave(first)
    assert tree.num_idle == 1
    tree.leave(second)
    tree.leave(grow(tree, [1, 2, 3, 4], 0))
    # [5, 6] was released before [3, 4], and [1, 2] is the parent of both.
    assert evict(tree, 3) == [11, 1, 0]
    assert tree.num_nodes == tree.num_idle == 0


def test_as_many_blocks_go_as_are_wanted() -> None:
    tree = PrefixTree(_SIZE, [None])
    tree.leave(grow(tree, list(range(20)), 0))
    tree.leave(grow(tree, [50, 51], 20))
    assert evict(tree, 3) == [9, 8, 7]
    assert find(tree, list(range(20))).length == 14
    assert evict(tree, 8) == [6, 5, 4, 3, 2, 1, 0, 20]
    assert tree.num_idle == 0


def test_nodes_in_use_are_not_given_up() -> None:
    tree = PrefixTree(_SIZE, [None])
    grow(tree, [1, 2], 0)
    with pytest.raises(StopIteration):
        evict(tree, 1)


def test_a_tail_is_copied_and_dropped_once_a_full_block_covers_it() -> None:
    tree = PrefixTree(4, [None])
    root = tree.enter(_BASE, find(tree, []).node, 0)
    last = tree.extend(root, int32([1, 1, 1, 1]).tobytes(), ids([0]), False)
    one = tail(tree, last, [5, 6], 7)
    assert one is not None
    match = find(tree, [1, 1, 1, 1, 5, 6, 7, 8])
    assert (match.length, match.whole, match.source, match.tail) == (6, 1, [7], one)
    assert find(tree, [1, 1, 1, 1, 5]).length == 5
    # The start of a tail is not entered. A longer tail replaces a shorter one with the same
    # beginning.
    assert tail(tree, last, [5], 8) is None
    assert tail(tree, last, [5, 6], 8) is None
    other = tail(tree, last, [5, 6, 7], 9)
    assert other is not None
    assert tree.take_dropped_tails() == [[7]]
    assert tree.num_idle == 1
    assert tail(tree, last, [5, 9], 10) is not None
    assert find(tree, [1, 1, 1, 1, 5, 9, 9, 9]).source == [10]
    # A request that continues through a tail's tokens replaces the tail, and grows its own node if
    # it has no other child.
    evicted = evict(tree, 2)
    assert evicted == [9, 10]
    tail(tree, last, [5, 6], 11)
    assert tree.extend(last, int32([5, 6, 7, 8]).tobytes(), ids([1]), False) is last
    assert tree.take_dropped_tails() == [[11]]
    assert tail(tree, last.parent or last, [1, 1], 12) is None
    assert (tree.num_nodes, tree.num_idle) == (1, 0)


def test_a_copied_tail_is_used_last() -> None:
    tree = PrefixTree(4, [None])
    root = tree.enter(_BASE, find(tree, []).node, 0)
    first, _ = tail(tree, root, [1, 2], 0), tail(tree, root, [3, 4], 1)
    assert first is not None
    tree.touch(first)
    tree.leave(root)
    assert evict(tree, 2) == [1, 0]
    assert not tree._roots


def test_names_follow_the_tokens_wherever_nodes_are_cut() -> None:
    tree = PrefixTree(_SIZE, [None])
    tokens = list(range(12))
    hashes = [root_hash(_BASE)]
    for at in range(0, 12, _SIZE):
        hashes.append(next_hash(hashes[-1], int32(tokens[at : at + _SIZE]).tobytes()))
    assert tree.block_hash(find(tree, tokens), _BASE) == hashes[0]
    first = grow(tree, tokens[:8], 0)
    assert [tree.block_hash(find(tree, tokens, n), _BASE) for n in (8, 4, 2)] == [
        hashes[4],
        hashes[2],
        hashes[1],
    ]
    second = grow(tree, [*tokens[:4], 50, 51], 10)
    first = tree.extend(first, int32(tokens[8:]).tobytes(), ids([4, 5]), False)
    assert tree.block_hash(find(tree, tokens), _BASE) == hashes[6]
    tail(tree, first, [77], 20)
    tree.leave(first)
    tree.leave(second)
    run = tree.evict(8, hashed=True)
    assert run.blocks[0].tolist() == [20, 5, 4, 3, 2, 12, 1, 0]
    assert run.hashes[0] == b""
    assert run.hashes[1:5] == [hashes[6], hashes[5], hashes[4], hashes[3]]
    assert run.hashes[6:] == [hashes[2], hashes[1]]
    assert run.hashes[5] == next_hash(hashes[2], int32([50, 51]).tobytes())


def test_a_window_needs_only_its_last_tokens() -> None:
    windows = WindowBlocks(1, 3, _SIZE)
    tree = PrefixTree(_SIZE, [None, windows])
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    last = grow(tree, tokens, 0)
    for place in range(3):
        windows.add(last, place, place)
    assert len(windows) == 3
    assert windows.take() == 0
    # The last 2 tokens before 8, 6 and 4 are cached. Those before 2 are not: the second one would
    # have to be copied from its block.
    assert [find(tree, tokens, n).length for n in (8, 7, 6, 5, 4)] == [8, 7, 6, 5, 4]
    assert [find(tree, tokens, n).length for n in (3, 2, 1)] == [0, 0, 0]
    assert windows.take() == 1
    assert [find(tree, tokens, n).length for n in (8, 7, 6, 5, 4)] == [8, 7, 6, 0, 0]
    windows.discard([2])
    with pytest.raises(KeyError):
        windows.take()


def test_window_blocks_are_found_where_nodes_were_cut_since() -> None:
    windows = WindowBlocks(1, 3, _SIZE)
    tree = PrefixTree(_SIZE, [None, windows])
    first = grow(tree, list(range(8)), 0)
    for place in range(3):
        windows.add(first, place, place)
    second = grow(tree, [0, 1, 50, 51], 10)
    tree.leave(first)
    assert tree.evict(3, hashed=True).blocks[1].tolist() == [3, 2, 1]
    assert len(windows) == 1
    assert windows.take() == 0
    assert second.path(1, 0, 2).tolist() == [NO_BLOCK, 11]


def test_common_starts_are_counted_in_tokens() -> None:
    draw = random.Random(0)
    for _ in range(300):
        one = [draw.choice([0, 1, 256, -1]) for _ in range(draw.randrange(6))]
        other = [draw.choice([0, 1, 256, -1]) for _ in range(draw.randrange(6))]
        pairs = zip(one, other, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
        assert common_start(int32(one).tobytes(), int32(other).tobytes()) == same


def test_a_hub_of_many_children_is_searched_to_the_token() -> None:
    tree = PrefixTree(8, [None])
    draw = random.Random(3)
    stem = int32([7] * 8).tobytes()
    root = tree.enter(_BASE, find(tree, []).node, 0)
    hub = tree.extend(root, stem, ids([0]), False)
    tree.enter(_BASE, hub, hub.end)  # a second user: children are made, the hub does not grow
    firsts = list({tuple(draw.randrange(9) for _ in range(8)) for _ in range(10_000)})
    for block, first in enumerate(firsts, 1):
        child = tree.extend(hub, int32(first).tobytes(), ids([block]), False)
        child.users -= 1
        tree._idle[child] = None
        tree.num_idle += 1
    begun = {first[:n] for first in firsts for n in range(8)}
    for _ in range(200):
        asked = tuple(draw.randrange(9) for _ in range(7))
        most = max(n for n in range(8) if asked[:n] in begun)
        assert find(tree, [7] * 8 + list(asked)).length == 8 + most
    evict(tree, len(firsts) // 2)
    assert len(hub.children) == len(firsts) - len(firsts) // 2
    check_node(hub, 8)


class TreeMachine(RuleBasedStateMachine):
    """Compares the tree with a list of its prefixes in order of last use, and with the tokens of
    all tails."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(_SIZE, [None])
        self.next_block = 0
        self.lasts: list[tuple[Node, tuple[int, ...]]] = []
        self.present: set[tuple[int, ...]] = set()
        self.order: list[tuple[int, ...]] = []

    def prefixes(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the prefixes of whole blocks."""
        return [tokens[: i + _SIZE] for i in range(0, len(tokens) - _SIZE + 1, _SIZE)]

    @rule(tokens=st.lists(st.integers(0, 2), max_size=9), partly=st.booleans())
    def run(self, tokens: list[int], partly: bool) -> None:
        whole = tuple(tokens[: len(tokens) // _SIZE * _SIZE])
        match = find(self.tree, tokens)
        assert match.length == self.longest(tuple(tokens))
        assert match.whole == sum(prefix in self.present for prefix in self.prefixes(whole))
        self.lasts.append((grow(self.tree, tokens, self.next_block), whole))
        self.next_block += 10
        for prefix in self.prefixes(whole):
            self.present.add(prefix)
            self.drop_tail(prefix[:-1])
            if prefix in self.order:
                self.order.remove(prefix)
        if partly and len(tokens) % _SIZE:
            last, _ = self.lasts[-1]
            covered = self.longest(tuple(tokens)) == len(tokens)
            made = tail(self.tree, last, tokens[-1:], self.next_block - 1)
            assert (made is None) == covered
            if not covered:
                self.present.add(tuple(tokens))
                self.order.append(tuple(tokens))

    def drop_tail(self, tokens: tuple[int, ...]) -> None:
        """Drops a tail that a full block now covers."""
        if tokens in self.present and len(tokens) % _SIZE:
            self.present.remove(tokens)
            self.order.remove(tokens)

    def longest(self, tokens: tuple[int, ...]) -> int:
        """Returns the longest cached prefix of the tokens."""
        lengths = range(len(tokens), 0, -1)
        return next((n for n in lengths if any(p[:n] == tokens[:n] for p in self.present)), 0)

    @precondition(lambda self: self.lasts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        last, tokens = self.lasts.pop(data.draw(st.integers(0, len(self.lasts) - 1)))
        self.tree.leave(last)
        used = {p for _, other in self.lasts for p in self.prefixes(other)}
        # If other requests use the first part of a node, that part stays in use.
        self.order += [p for p in reversed(self.prefixes(tokens)) if p not in used]

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.order)))
        assert len(evict(self.tree, count)) == count
        for prefix in self.order[:count]:
            self.present.remove(prefix)
        del self.order[:count]

    @invariant()
    def agrees(self) -> None:
        nodes = nodes_of(self.tree)
        assert self.tree.num_nodes == len(nodes)
        assert self.tree.num_idle == len(self.order)
        found = set()
        for node in nodes:
            check_node(node, _SIZE)
            tokens = spell(node)
            found.add(tokens)
            found.update(p for p in self.prefixes(tokens) if len(p) > node.start * _SIZE)
        assert found == self.present


class LeaseMachine(TreeMachine):
    """Prefixes under leases stay while others can be evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Node] = []

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        match = find(self.tree, list(data.draw(st.sampled_from(sorted(self.present)))))
        node = match.tail or match.node
        self.tree.lease(node)
        self.leases.append(node)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.tree.end_lease(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        nodes = [node for node in nodes_of(self.tree) if not node.users]
        leased = {spell(node) for node in nodes if node.leases}
        others = sum(node.count for node in nodes if not node.leases)
        count = data.draw(st.integers(1, len(self.order)))
        assert len(evict(self.tree, count)) == count
        left = {p for node in nodes_of(self.tree) for p in [spell(node)]}
        self.present = left | {p for tokens in left for p in self.prefixes(tokens)}
        self.order = [prefix for prefix in self.order if prefix in self.present]
        if count <= others:
            assert leased <= self.present

    @invariant()
    def marks_are_counted(self) -> None:
        nodes = nodes_of(self.tree)
        assert self.tree.num_leased == sum(node.count for node in nodes if node.leases)
        for node in nodes:
            assert node.leases >= max((child.leases for child in node.children.values()), default=0)
        assert set(self.tree._idle) == {n for n in nodes if not n.users and not n.leases}
        assert set(self.tree._leased) == {n for n in nodes if not n.users and n.leases}

    def teardown(self) -> None:
        for node in self.leases:
            self.tree.end_lease(node)
        assert not any(node.leases for node in nodes_of(self.tree))
        assert not self.tree.num_leased


def spell(node: Node) -> tuple[int, ...]:
    runs = []
    at: Node | None = node
    while at is not None:
        runs.append(at.run)
        at = at.parent
    return tuple(int(b) for b in b"".join(map(bytes, reversed(runs)))[::4])


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=examples(60), stateful_step_count=30)
TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_leased_prefixes_are_evicted_last() -> None:
    tree = PrefixTree(_SIZE, [None])
    for tokens, block in (([1, 2, 3, 4], 0), ([5, 6], 10), ([1, 2, 7, 8], 20)):
        tree.leave(grow(tree, tokens, block))
    node = find(tree, [1, 2, 3, 4]).node
    tree.lease(node)
    assert tree.num_leased == 2
    assert evict(tree, 2) == [10, 21]
    assert evict(tree, 1) == [1]  # a lease does not hold up a request
    assert tree.num_leased == 1
    tree.end_lease(node)
    assert tree.num_leased == 0
    assert evict(tree, 1) == [0]
