"""KV events describe exactly the contents of the engine's prefix tree."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.arrays import int32
from quire.cache import PrefixTree
from quire.config import SchedulerConfig
from quire.features.disaggregation.prompt_fetches import HandoverTime
from quire.features.kv_events.feature import KVEventFeature, PrefillRate
from quire.features.kv_events.messages import EVENT_HASH_BYTES, EngineLoad, KVEvents, split
from quire.features.kv_events.prompt_report import decode_report, encode_report, spread
from quire.plan import KVGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler
from tests.brain import nodes_of
from tests.fakes import FakeExecutor

SIZE = 4
LOAD = EngineLoad()


class Reader:
    """A router's view of an engine, built from its events."""

    def __init__(self) -> None:
        self.epoch, self.last = "", 0
        self.held: set[bytes] = set()

    def read(self, feature: KVEventFeature) -> KVEvents:
        found = feature.events(self.epoch, self.last, LOAD)
        if found.reset:
            self.held.clear()
        stored, removed = split(found.stored), split(found.removed)
        assert not set(stored) & set(removed)
        self.held.difference_update(removed)
        self.held.update(stored)
        self.epoch, self.last = found.epoch, found.last
        return found


def names_of(tree: PrefixTree) -> set[bytes]:
    names = set()
    for node in nodes_of(tree):
        if len(node.run) % (4 * SIZE) == 0:
            for index in range(node.count):
                names.add(node.block_hash(index, 4 * SIZE)[:EVENT_HASH_BYTES])
    return names


PROMPT = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(0, 2))
OP = st.one_of(
    st.tuples(st.just("add"), PROMPT),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("read"), st.integers(0, 1)),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=40)
@given(st.lists(OP, max_size=60), st.integers(1, 3))
@example([("add", (0, 4, 0)), ("step", 1), ("reset", None), ("abort", 0)], 1)
def test_events_reproduce_the_prefix_tree(ops: list[tuple[str, object]], depth: int) -> None:
    group = KVGroup(layers=(0,), tokens_per_block=SIZE)
    executor = FakeExecutor([group], [24], vocab=7)
    config = SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64, steps_in_flight=depth
    )
    scheduler = Scheduler(config, executor.start())
    feature = KVEventFeature(most_events=16)
    scheduler.add_feature(feature)
    readers = [Reader(), Reader()]
    readers[0].read(feature)
    count = 0

    def step() -> None:
        plan = scheduler.plan() if scheduler.num_in_flight < depth else None
        if plan is not None:
            executor.submit(plan)
        elif scheduler.num_in_flight:
            scheduler.update(executor.collect())

    for op, value in ops:
        match op, value:
            case "add", (int(kind), int(length), int(more)):
                tokens = int32([(kind + place // 8) % 5 for place in range(length)])
                count += 1
                request = Request(
                    f"r{count}/0", tokens, SamplingParams(), max_total=length + more + 1
                )
                scheduler.add(request)
            case "step", int(times):
                for _ in range(times):
                    step()
            case "abort", int(place):
                scheduler.abort(f"r{count - place}/0")
            case "read", int(place):
                readers[place].read(feature)
            case _:
                feature_reset = scheduler.reset_prefix_cache()
                assert feature_reset is (scheduler.blocks.tree.num_nodes == 0)
    while scheduler.has_work():
        step()
    for reader in readers:
        reader.read(feature)
        assert reader.held == names_of(scheduler.blocks.tree)
    assert not feature._announced
    quiet = readers[0].read(feature)
    assert not quiet.changed


def test_no_events_are_recorded_before_a_reader_connects() -> None:
    """Later, events also cover the blocks that a prompt finds in the tree."""
    group = KVGroup(layers=(0,), tokens_per_block=SIZE)
    executor = FakeExecutor([group], [24], vocab=7)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=16), executor.start())
    feature, reader = KVEventFeature(), Reader()
    scheduler.add_feature(feature)

    def run(name: str) -> None:
        prompt = int32([place % 5 for place in range(12)])
        scheduler.add(Request(name, prompt, SamplingParams(), max_total=14))
        while scheduler.has_work():
            plan = scheduler.plan() if not scheduler.num_in_flight else None
            if plan is not None:
                executor.submit(plan)
            else:
                scheduler.update(executor.collect())

    run("before/0")
    assert names_of(scheduler.blocks.tree)
    assert not feature._announced
    reader.read(feature)
    assert not reader.held
    run("after/0")
    reader.read(feature)
    assert reader.held == names_of(scheduler.blocks.tree)


def test_a_reader_of_another_epoch_or_too_far_behind_gets_everything() -> None:
    feature = KVEventFeature(most_events=2)
    group = KVGroup(layers=(0,), tokens_per_block=SIZE)
    scheduler = Scheduler(SchedulerConfig(), FakeExecutor([group], [8]).start())
    scheduler.add_feature(feature)
    for name in (b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"):
        feature._change(name, stored=True)
    for place in (("", 0), ("other", 3), (feature.epoch, 0), (feature.epoch, 9)):
        found = feature.events(*place, LOAD)
        assert found.reset
        assert len(split(found.stored)) == 3
    found = feature.events(feature.epoch, 1, LOAD)
    assert (found.reset, found.stored) == (False, b"bbbbbbbbcccccccc")


@given(st.integers(0, 3000), st.sampled_from([1, 16, 32]))
def test_reports_name_blocks_by_their_prefix(tokens: int, size: int) -> None:
    prompt = [place % 97 for place in range(tokens)]
    read = decode_report(encode_report(prompt, "salt", size))
    assert read is not None
    count, blocks = read
    assert count == tokens
    assert [end for end, _ in blocks] == [n * size for n in spread(tokens // size, 64)]
    if blocks:
        end, name = blocks[len(blocks) // 2]
        again = decode_report(encode_report(prompt[:end], "salt", size))
        other = decode_report(encode_report(prompt[:end], "", size))
        assert again is not None
        assert other is not None
        assert again[1][-1] == (end, name) != other[1][-1]


@pytest.mark.parametrize("value", [b"", b"1;2", b"a;16;", b"1;0;", b"-1;16;", b"4;2;&&&&"])
def test_an_invalid_report_is_ignored(value: bytes) -> None:
    assert decode_report(value) is None


def test_the_rate_is_that_of_steps_with_prompts() -> None:
    rate = PrefillRate()
    rate.ended(0.0)
    assert rate.value == 0.0
    # The two reads overlap.
    rate.launched(1000, 1.0)
    rate.launched(1000, 1.1)
    rate.ended(2.0)
    rate.ended(3.0)
    for start in (3.0, 4.0):
        rate.launched(1, start)
        rate.ended(start + 0.9)
    assert rate.value == pytest.approx(1000.0)


@given(st.floats(0.001, 0.1), st.floats(1e-6, 1e-4))
def test_handovers_are_a_line_over_tokens(fixed: float, per_token: float) -> None:
    time = HandoverTime()
    assert time.line == (0.0, 0.0)
    for tokens in (500, 2000, 8000, 1000):
        time.add(tokens, fixed + per_token * tokens)
    assert time.line == pytest.approx((fixed, per_token), rel=1e-3, abs=1e-9)


def test_handovers_of_one_length_have_no_slope() -> None:
    time = HandoverTime()
    time.add(100, 0.5)
    time.add(100, 0.7)
    fixed, per_token = time.line
    assert 0.5 < fixed < 0.7
    assert per_token == 0.0
