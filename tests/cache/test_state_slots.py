"""Recurrent states of lanes, and checkpoints in the prefix tree."""

from __future__ import annotations

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.plan import STATE_SAVES, KVGroup
from tests.brain import check_blocks

_SIZE = 4
_BASE = (0, "")
_FULL = KVGroup(layers=(0,), tokens_per_block=_SIZE)
_STATE = KVGroup(layers=(1,), kind="state", tokens_per_block=_SIZE)
_ROOM = 512


class Cache:
    """A manager whose lanes compute whole prompts in one plan each."""

    def __init__(self, slots: int, lanes: int = 4) -> None:
        self.manager = BlockManager([_FULL, _STATE], [400, slots], lanes, _ROOM)
        self.tokens: Int32 = int32([[0] * _ROOM] * lanes)

    def start(self, lane: int, prompt: list[int]) -> int:
        """Returns the position from which a prompt is computed."""
        known = int32(prompt)
        self.tokens[lane, : len(prompt)] = known
        match = self.manager.match(_BASE, known, len(prompt) - 1)
        assert self.manager.admit(
            lane, _BASE, match, computed=match.length, chunk_end=len(prompt), known=len(prompt),
            spare=0,
        )  # fmt: skip
        self.manager.insert(int32([lane]), self.tokens, int32([len(prompt)]), ahead=True)
        self.manager.compute(lane, self.tokens[lane], match.length, len(prompt), len(prompt))
        return match.length

    def plan(self) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Returns a plan's copies of states, and the slots of its new checkpoints by position."""
        appends = self.manager.take_appends()[1]
        copies = self.manager.take_copies()[1]
        left: dict[int, int] = {}
        at = 0
        for start, count in zip(appends.starts.tolist(), appends.counts.tolist(), strict=True):
            if start:
                pairs = appends.ids[at : at + count].tolist()
                left.update(zip(pairs[::2], pairs[1::2], strict=True))
            else:
                assert count == 1 + 2 * STATE_SAVES
            at += count
        return list(zip(copies.src.tolist(), copies.dst.tolist(), strict=True)), left

    def end(self, lane: int, length: int, *, exact: bool = True) -> None:
        detached = self.manager.detach(lane, self.tokens[lane], length, exact=exact)
        self.manager.free(detached)
        check_blocks(self.manager, [])


def test_a_prompt_leaves_states_near_its_end_and_at_growing_distances() -> None:
    cache = Cache(20)
    prompt = list(range(401))
    assert cache.start(0, prompt) == 0
    copies, left = cache.plan()
    assert not copies
    assert sorted(left) == [144, 336, 400]
    cache.end(0, 401)
    # A prompt without its last tokens continues from the checkpoint before.
    assert cache.start(1, [*prompt[:390], 7, 7]) == 336
    copies, left = cache.plan()
    assert [dst for _, dst in copies] == [int(cache.manager.groups[1].table[1, 0])]
    # The tree had 388 of its tokens: a state is kept there for the next request.
    assert 388 in left
    cache.end(1, 392)
    assert cache.start(2, [*prompt[:390], 8, 8]) == 388


def test_states_of_this_plan_serve_the_next_one() -> None:
    cache = Cache(20)
    assert cache.start(0, [1] * 40) == 0
    assert cache.start(1, [1] * 40) == 0
    cache.plan()
    assert cache.start(2, [1] * 40) == 36
    cache.plan()


def test_a_turn_leaves_its_own_slot() -> None:
    cache = Cache(20)
    cache.start(0, list(range(10)))
    cache.plan()
    slot = int(cache.manager.groups[1].table[0, 0])
    cache.end(0, 10)
    assert cache.start(1, [*range(10), 50]) == 10
    copies, _ = cache.plan()
    assert [src for src, _ in copies] == [slot]
    cache.end(1, 11)
    # Within the block there is no other state.
    assert cache.start(2, [*range(9), 51, 52]) == 8


def test_a_state_that_steps_in_flight_change_is_lost() -> None:
    cache = Cache(20)
    cache.start(0, list(range(10)))
    cache.plan()
    cache.end(0, 10, exact=False)
    assert cache.start(1, [*range(10), 50]) == 8


def test_the_state_that_saves_least_is_evicted_first() -> None:
    cache = Cache(3)
    cache.start(0, list(range(60)))  # one state, behind 56 tokens
    cache.plan()
    cache.end(0, 60)  # and one behind 60
    cache.start(1, [9] * 30)
    cache.plan()
    cache.end(1, 30)
    # The state behind 60 saves four tokens more than that behind 56.
    cache.start(2, [8] * 30)
    cache.plan()
    cache.end(2, 30)
    match = cache.manager.match(_BASE, int32([*range(60), 5]), 60)
    assert match.length == 56


def test_lanes_need_one_slot_each() -> None:
    cache = Cache(2)
    cache.start(0, [1] * 8)
    cache.plan()  # a checkpoint that the next one takes
    cache.start(1, [2] * 8)
    cache.plan()
    match = cache.manager.match(_BASE, int32([3] * 8), 7)
    assert not cache.manager.admit(2, _BASE, match, computed=0, chunk_end=8, known=8, spare=0)
