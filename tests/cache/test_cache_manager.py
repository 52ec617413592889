"""The block manager: booking, sharing, forking, windows, and that nothing is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.block_hash import next_hash, root_hash
from quire.cache.block_manager import DetachedBlocks, Evicted
from quire.errors import ConfigError, RequestTooLargeError
from quire.plan import KVGroup
from tests.brain import check_blocks, nodes_of
from tests.slow import examples

_SIZE = 4
_FULL = KVGroup(layers=(0,), tokens_per_block=_SIZE)
_WINDOW = KVGroup(layers=(1,), kind="window", tokens_per_block=_SIZE, window=6)
_BASE = (0, "")


def make(
    *blocks: int, groups: tuple[KVGroup, ...] = (_FULL,), caching: bool = True
) -> BlockManager:
    return BlockManager(groups, blocks, num_lanes=4, max_len=64, caching=caching)


def begin(
    manager: BlockManager, lane: int, tokens: list[int], *, spare: int = 0, end: int | None = None
) -> int | None:
    """Admits a request as the scheduler does, with up to `end` tokens in its first row. Returns the
    number of matched tokens, or None."""
    array = int32(tokens)
    match = manager.match(_BASE, array, len(tokens) - 1)
    end = len(tokens) if end is None else end
    admitted = manager.admit(
        lane,
        _BASE,
        match,
        computed=match.length,
        chunk_end=end,
        known=len(tokens),
        spare=spare,
    )
    if not admitted:
        return None
    manager.insert(int32([lane]), rows(lane, tokens), int32([end]))
    return match.length


def rows(lane: int, tokens: list[int]) -> Int32:
    table = int32([[0] * len(tokens)] * (lane + 1))
    table[lane] = tokens
    return table


def test_equal_prefixes_share_whole_blocks() -> None:
    manager = make(8)
    assert begin(manager, 0, [1] * 10) == 0
    assert begin(manager, 1, [1] * 9 + [2]) == 8
    tables = manager.groups[0].table
    assert tables[0, :2].tolist() == tables[1, :2].tolist()
    assert tables[0, 2] != tables[1, 2]
    assert manager.usage()[0].used == 4
    appends = manager.take_appends()[0]
    assert appends.lanes.tolist() == [0, 1, 1]
    assert appends.starts.tolist() == [0, 0, 2]
    assert appends.counts.tolist() == [3, 2, 1]
    check_blocks(manager, [0, 1])


def test_at_most_all_but_one_token_comes_from_the_cache() -> None:
    manager = make(8)
    begin(manager, 0, [1] * 8)
    manager.release(0)
    assert begin(manager, 1, [1] * 8) == 7


def test_without_caching_nothing_is_shared_or_kept() -> None:
    manager = make(4, caching=False)
    assert begin(manager, 0, [1] * 8) == 0
    assert begin(manager, 1, [1] * 8) == 0
    manager.release(0)
    manager.release(1)
    assert manager.usage()[0].free == 4


def test_released_blocks_stay_cached_until_they_are_needed() -> None:
    manager = make(4)
    begin(manager, 0, [1] * 8)
    manager.release(0)
    assert (manager.usage()[0].cached, manager.usage()[0].free) == (2, 2)
    assert begin(manager, 0, [2] * 12) == 0
    assert manager.usage()[0].cached == 1
    assert begin(manager, 1, [1] * 8) is None
    check_blocks(manager, [0])
    manager.release(0)
    assert begin(manager, 1, [1] * 8) == 4


def test_a_refusal_changes_nothing() -> None:
    manager = make(4)
    begin(manager, 0, [1] * 8)
    before = manager.usage()
    assert begin(manager, 1, [2] * 12) is None
    assert begin(manager, 1, [2] * 8, spare=1) is None
    assert not manager.book(int32([0]), int32([20]))
    assert manager.usage() == before
    check_blocks(manager, [0])


def test_matched_blocks_do_not_count_as_room() -> None:
    # The two cached blocks are the prefix itself: taking them leaves two, and four are needed.
    manager = make(4)
    begin(manager, 0, [1] * 8)
    manager.release(0)
    assert begin(manager, 0, [1] * 17) is None
    assert begin(manager, 0, [1] * 16) == 8


def test_release_is_idempotent() -> None:
    manager = make(4)
    begin(manager, 0, [1] * 6)
    manager.release(0)
    manager.release(0)
    manager.release(3)
    check_blocks(manager, [])


def plan(manager: BlockManager) -> list[tuple[int, int]]:
    """Completes the plan; returns its copies in the first group."""
    manager.take_appends()
    copies = manager.take_copies()[0]
    return list(zip(copies.src.tolist(), copies.dst.tolist(), strict=True))


@pytest.mark.parametrize("shared", range(1, 13))
def test_a_shared_prefix_that_ends_anywhere_is_found_to_the_token(shared: int) -> None:
    manager = make(16)
    common = list(range(100, 100 + shared))
    table = manager.groups[0].table
    for lane in range(3):
        assert begin(manager, lane, common + [lane] * 5) == (shared if lane else 0)
        copies = plan(manager)
        assert len(copies) == (lane > 0 and shared % _SIZE > 0)
        assert all(target == table[lane, shared // _SIZE] for _, target in copies)
        check_blocks(manager, range(lane + 1))
    assert manager.copied == (2 if shared % _SIZE else 0)


def test_a_block_this_plan_computes_is_shared_by_reference_only() -> None:
    manager = make(16)
    tokens = [1] * 11
    for lane in range(2):
        match = manager.match(_BASE, int32(tokens), 10)
        assert match.length == (8 if lane else 0)
        manager.admit(lane, _BASE, match, computed=match.length, chunk_end=11, known=11, spare=0)
        manager.insert(int32([lane]), rows(lane, tokens), int32([11]), ahead=True)
    assert manager.match(_BASE, int32([1] * 7), 6).length == 4
    assert not plan(manager)
    assert manager.match(_BASE, int32([1] * 7), 6).length == 6


def test_a_finished_requests_prefix_matches_to_the_token() -> None:
    manager = make(8)
    begin(manager, 0, [1] * 6)
    plan(manager)
    manager.book(int32([0]), int32([10]))
    manager.insert(int32([0]), rows(0, [1] * 10), int32([10]))
    tail = int(manager.groups[0].table[0, 2])
    manager.release(0, int32([1] * 10), 10)
    check_blocks(manager, [])
    assert manager.usage()[0].cached == 3
    plan(manager)
    chat = [1] * 10 + [2] * 3
    assert begin(manager, 1, chat) == 10
    ((source, target),) = plan(manager)
    assert (source, target) == (tail, manager.groups[0].table[1, 2])
    # The full block that continues the tail replaces it.
    assert manager.usage()[0].cached == 0
    assert [node.tokens for node in nodes_of(manager.tree)] == [12]
    check_blocks(manager, [1])


def test_a_copys_source_may_be_given_up_in_the_same_plan() -> None:
    manager = make(4)
    begin(manager, 0, [1] * 10)
    manager.release(0, int32([1] * 10), 10)
    plan(manager)
    tail = manager.match(_BASE, int32([1] * 11), 10).source
    # Three blocks are cached and one is free: two are shared, and the two others take the new
    # tokens.
    assert begin(manager, 1, [1] * 10 + [2] * 6) == 10
    ((source, _),) = plan(manager)
    assert [source] == tail
    assert source in manager.groups[0].table[1, 2:4].tolist()
    assert manager.usage()[0].free == 0
    check_blocks(manager, [1])


def test_a_tail_that_is_already_cached_is_not_kept_again() -> None:
    manager = make(12)
    for lane in range(2):
        begin(manager, lane, [1] * 6)
    manager.release(0, int32([1] * 6), 6)
    manager.release(1, int32([1] * 5), 5)
    assert manager.usage()[0].cached == 2
    begin(manager, 0, [1] * 7)
    manager.release(0, int32([1] * 7), 7)
    assert sorted(node.tokens for node in nodes_of(manager.tree)) == [3, 4]
    assert manager.usage()[0].cached == 2
    check_blocks(manager, [])


def test_detached_blocks_keep_their_tail_until_they_are_freed() -> None:
    manager = make(2)
    begin(manager, 0, [1] * 6)
    detached = manager.detach(0, int32([1] * 6), 6)
    assert begin(manager, 1, [2] * 4) is None
    check_blocks(manager, [], [detached])
    manager.free(detached)
    check_blocks(manager, [])
    assert manager.match(_BASE, int32([1] * 8), 8).length == 6


def test_a_window_that_has_moved_on_leaves_no_tail() -> None:
    narrow = KVGroup(layers=(1,), kind="window", tokens_per_block=_SIZE, window=1)
    manager = make(8, 8, groups=(_FULL, narrow))
    begin(manager, 0, [1] * 7)
    manager.book(int32([0]), int32([9]))
    # A step in flight is two tokens ahead of the confirmed tokens.
    manager.slide(int32([0]), int32([8]))
    manager.release(0, int32([1] * 7), 7)
    assert [node.tokens for node in nodes_of(manager.tree)] == [4]
    check_blocks(manager, [])


def test_a_tails_window_block_can_be_taken_alone() -> None:
    manager = make(16, 4, groups=(_FULL, _WINDOW))
    begin(manager, 0, [1] * 6)
    manager.release(0, int32([1] * 6), 6)
    check_blocks(manager, [])
    assert manager.match(_BASE, int32([1] * 8), 8).length == 6
    assert begin(manager, 1, [2] * 16) == 0
    check_blocks(manager, [1])
    assert manager.match(_BASE, int32([1] * 8), 8).length == 0


def test_evictions_are_counted_and_reported_by_hash() -> None:
    manager = make(4)
    told: list[Evicted] = []
    manager.on_evict = [told.extend]
    begin(manager, 0, [1] * 10)
    manager.release(0, int32([1] * 10), 10)
    begin(manager, 0, [2] * 16)
    # The tail was evicted first, and is not reported: only whole blocks have hashes.
    hashes = [next_hash(root_hash(_BASE), int32([1] * 4).tobytes())]
    hashes.append(next_hash(hashes[0], int32([1] * 4).tobytes()))
    assert [one.block_hash for one in told] == hashes[::-1]
    assert manager.evicted == 3


def test_detached_blocks_outlive_their_lane() -> None:
    manager = make(2)
    begin(manager, 0, [1] * 8)
    detached = manager.detach(0)
    manager.release(0)
    assert begin(manager, 1, [2] * 4) is None
    check_blocks(manager, [], [detached])
    manager.free(detached)
    manager.free(detached)
    assert begin(manager, 1, [2] * 4) == 0
    check_blocks(manager, [1])


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_whole_blocks_and_copies_the_partial_one(caching: bool) -> None:
    manager = make(8, caching=caching)
    begin(manager, 0, [1] * 7)
    manager.take_appends()
    assert manager.fork(1, _BASE, 0, 6, 7, spare=0)
    table = manager.groups[0].table
    assert table[0, 0] == table[1, 0]
    copies = manager.take_copies()[0]
    assert (copies.src.tolist(), copies.dst.tolist()) == ([table[0, 1]], [table[1, 1]])
    assert copies.src != copies.dst
    assert not manager.take_copies()[0].src.size
    check_blocks(manager, [0, 1])
    manager.release(0)
    check_blocks(manager, [1])


def test_a_fork_on_a_block_boundary_copies_nothing() -> None:
    manager = make(8)
    begin(manager, 0, [1] * 5)
    assert manager.fork(1, _BASE, 0, 4, 5, spare=0)
    assert not manager.take_copies()[0].src.size


def test_a_fork_needs_room_for_its_own_blocks() -> None:
    manager = make(2)
    begin(manager, 0, [1] * 7)
    assert not manager.fork(1, _BASE, 0, 6, 7, spare=0)
    check_blocks(manager, [0])


def test_equal_work_done_twice_is_entered_once() -> None:
    manager = make(8)
    # Both start before either has inserted anything.
    assert begin(manager, 0, [1] * 9, end=2) == 0
    assert begin(manager, 1, [1] * 9, end=2) == 0
    manager.insert(int32([0]), rows(0, [1] * 9), int32([9]))
    manager.insert(int32([1]), rows(1, [1] * 9), int32([9]))
    assert [node.tokens for node in nodes_of(manager.tree)] == [8]
    check_blocks(manager, [0, 1])
    # The second lane's further blocks enter the tree when it ends.
    manager.book(int32([1]), int32([12]))
    manager.insert(int32([1]), rows(1, [1] * 12), int32([12]))
    manager.release(1, int32([1] * 12), 12)
    assert [node.tokens for node in nodes_of(manager.tree)] == [8, 4]
    check_blocks(manager, [0])


def test_a_window_group_frees_blocks_outside_the_window() -> None:
    manager = make(8, 8, groups=(_FULL, _WINDOW))
    begin(manager, 0, [1] * 16)
    manager.slide(int32([0]), int32([16]))
    # A query at 16 reads positions 11 to 16: blocks 0 and 1 are outside the window, and only the
    # tree holds them.
    assert manager.groups[1].start[0] == 2
    assert [u.used for u in manager.usage()] == [4, 2]
    assert manager.usage()[1].cached == 2
    check_blocks(manager, [0])
    manager.release(0)
    check_blocks(manager, [])


def test_a_match_is_where_every_group_can_resume() -> None:
    manager = make(16, 5, groups=(_FULL, _WINDOW))
    begin(manager, 0, [1] * 16)
    manager.slide(int32([0]), int32([16]))
    manager.release(0)
    # Use three more window blocks: the free one and the two that were released first.
    assert begin(manager, 1, [2] * 12) == 0
    assert manager.match(_BASE, int32([1] * 16), 16).length == 16
    # A window of 6 needs the 5 tokens before, and the third block is the first that is left.
    lengths = [manager.match(_BASE, int32([1] * 16), n).length for n in (15, 13, 12)]
    assert lengths == [15, 13, 0]
    check_blocks(manager, [1])


def test_a_request_that_can_never_fit_is_refused() -> None:
    manager = make(4, 3, groups=(_FULL, _WINDOW))
    manager.check_fits(16, 1)
    with pytest.raises(RequestTooLargeError, match="may need 5 KV cache blocks"):
        manager.check_fits(17, 1)
    with pytest.raises(RequestTooLargeError):
        make(16, 3, groups=(_FULL, _WINDOW)).check_fits(17, 8)


def test_unsupported_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="without KV groups"):
        make(4, groups=(KVGroup(layers=(0,), kind="state"),))
    with pytest.raises(ConfigError, match="window of at least 1"):
        make(4, groups=(KVGroup(layers=(0,), kind="window"),))
    with pytest.raises(ConfigError, match="same number of tokens"):
        make(4, 4, groups=(_FULL, KVGroup(layers=(1,), tokens_per_block=8)))
    with pytest.raises(ConfigError, match="without KV groups"):
        make(groups=())


def test_reset_drops_blocks_that_no_request_uses() -> None:
    manager = make(8)
    begin(manager, 0, [1] * 8)
    begin(manager, 1, [2] * 8)
    manager.release(0)
    assert not manager.reset_cache()
    assert [node.tokens for node in nodes_of(manager.tree)] == [8]
    manager.release(1)
    assert manager.reset_cache()
    assert manager.usage()[0].free == 8


class ManagerMachine(RuleBasedStateMachine):
    """Requests with few distinct prompts start, grow, fork and end in a cache too small for
    them."""

    groups: tuple[KVGroup, ...] = (_FULL,)
    blocks: tuple[int, ...] = (10,)

    def __init__(self) -> None:
        super().__init__()
        self.manager = make(*self.blocks, groups=self.groups)
        self.live: dict[int, list[int]] = {}
        self.detached: list[DetachedBlocks] = []

    def lane(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.live)))

    @precondition(lambda self: len(self.live) < 4)
    @rule(stem=st.integers(0, 1), cut=st.integers(0, 20), tail=st.integers(1, 5))
    def admit(self, stem: int, cut: int, tail: int) -> None:
        tokens = [stem] * cut + [2 + tail] * tail
        lane = next(n for n in range(4) if n not in self.live)
        if begin(self.manager, lane, tokens) is not None:
            self.live[lane] = tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 6), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, count: int, token: int) -> None:
        lane = self.lane(data)
        tokens = self.live[lane] + [token] * count
        self.manager.slide(int32([lane]), int32([len(self.live[lane])]))
        if len(tokens) <= 64 and self.manager.book(int32([lane]), int32([len(tokens)])):
            self.manager.insert(int32([lane]), rows(lane, tokens), int32([len(tokens)]))
            self.live[lane] = tokens

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.lane(data)
        tokens = self.live[parent]
        lane = next(n for n in range(4) if n not in self.live)
        if self.manager.fork(lane, _BASE, parent, len(tokens) - 1, len(tokens), spare=0):
            self.live[lane] = list(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        lane = self.lane(data)
        tokens = self.live.pop(lane)
        self.manager.release(lane, int32(tokens), len(tokens))
        if twice:
            self.manager.release(lane)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        lane = self.lane(data)
        tokens = self.live.pop(lane)
        self.detached.append(self.manager.detach(lane, int32(tokens), len(tokens)))

    @precondition(lambda self: self.detached)
    @rule()
    def free(self) -> None:
        self.manager.free(self.detached.pop(0))

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_cache() == (not self.manager.tree.num_nodes)

    @invariant()
    def nothing_is_lost(self) -> None:
        check_blocks(self.manager, list(self.live), self.detached)
        for appends in self.manager.take_appends():
            assert len(appends.ids) == appends.counts.sum()

    @invariant()
    def lanes_hold_what_they_need(self) -> None:
        for lane, tokens in self.live.items():
            for group in self.manager.groups:
                assert group.end[lane] * _SIZE >= len(tokens)
                assert group.start[lane] <= group.first_needed(len(tokens))

    def teardown(self) -> None:
        for lane in list(self.live):
            self.manager.release(lane)
        for detached in self.detached:
            self.manager.free(detached)
        self.manager.reset_cache()
        for usage in self.manager.usage():
            assert usage.free == usage.total


class TwoGroupMachine(ManagerMachine):
    groups = (_FULL, _WINDOW)
    blocks = (12, 8)


_SETTINGS = settings(max_examples=examples(60), stateful_step_count=30)
TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = _SETTINGS
TestTwoGroupMachine = TwoGroupMachine.TestCase
TestTwoGroupMachine.settings = _SETTINGS
