"""The causes to which the seconds of requests go."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.plan import KVGroup
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, Scheduler, delays
from quire.scheduler.delays import DECODE, INPUTS, PREEMPTED, PREFILL, PROMPTS, QUEUE, SIBLING
from quire.scheduler.step import StepInFlight
from tests.brain import Loop
from tests.fakes import FakeExecutor


class Clock:
    """A clock that stands still between calls of `pass_`."""

    def __init__(self) -> None:
        self.now = 100.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(delays, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def make(clock: Clock, *features: Feature, blocks: int = 100, **settings: int) -> Loop:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | settings
    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [blocks])
    return Loop(Scheduler(SchedulerConfig(**config), executor.start(), features), executor)


def request(clock: Clock, name: str, prompt: int = 8, output: int = 8) -> Request:
    tokens = int32([1000 * len(name) + ord(name[0]) + i for i in range(prompt)])
    return Request(name, tokens, SamplingParams(), max_total=prompt + output, arrival=clock.now)


def step(loop: Loop, clock: Clock, seconds: float) -> None:
    """Runs one step that takes `seconds`."""
    assert loop.launch()
    clock.pass_(seconds)
    loop.collect()


def test_a_lone_request_waits_computes_its_prompt_and_generates(clock: Clock) -> None:
    loop, one = make(clock), request(clock, "one", output=4)
    loop.scheduler.add(one)
    clock.pass_(2.0)
    step(loop, clock, 0.5)
    for _ in range(3):
        step(loop, clock, 0.125)
    assert one.finished
    assert one.times.delays == {QUEUE: 2.0, PREFILL: 0.5, DECODE: 0.375}
    assert loop.scheduler.stats().delay_seconds == one.times.delays


def test_a_prompt_beside_it_delays_a_generating_request(clock: Clock) -> None:
    loop = make(clock)
    first, second = request(clock, "first", 8, 20), request(clock, "second", 12, 20)
    loop.scheduler.add(first)
    step(loop, clock, 1.0)
    step(loop, clock, 0.25)  # a typical step
    loop.scheduler.add(second)
    step(loop, clock, 1.25)
    step(loop, clock, 0.25)
    for one in (first, second):
        loop.scheduler.abort(one.request_id)
    assert first.times.delays == {QUEUE: 0.0, PREFILL: 1.0, DECODE: 0.75, PROMPTS: 1.0}
    assert second.times.delays == {QUEUE: 0.0, PREFILL: 1.25, DECODE: 0.25}


def test_prompts_of_one_step_share_its_time_by_their_tokens(clock: Clock) -> None:
    loop = make(clock)
    large, small = request(clock, "large", 12), request(clock, "small", 4)
    loop.scheduler.add(large)
    loop.scheduler.add(small)
    step(loop, clock, 1.0)
    assert large.times.delays == {QUEUE: 0.0, PREFILL: 0.75, PROMPTS: 0.25}
    assert small.times.delays == {QUEUE: 0.0, PREFILL: 0.25, PROMPTS: 0.75}


def test_a_preempted_request_counts_until_it_generates_again(clock: Clock) -> None:
    loop = make(clock, blocks=8, max_num_batched_tokens=64)
    requests = [request(clock, name, 7, 16) for name in ("a", "bb", "ccc")]
    for one in requests:
        loop.scheduler.add(one)
    while loop.scheduler.has_work():
        if loop.launch():
            clock.pass_(0.25)
        else:
            loop.collect()
    assert requests[2].num_preemptions
    assert requests[2].times.delays[PREEMPTED] > 0
    assert PREEMPTED not in requests[0].times.delays
    ended = 100.0 + sum(requests[2].times.delays.values())
    assert ended == pytest.approx(clock.now)


def test_the_feature_that_parks_a_request_names_the_cause(clock: Clock) -> None:
    class Slow(Feature):
        waits_for = "grammar"
        done = False

        def ready(self, request: Request) -> bool:
            return self.done

    feature = Slow()
    loop, one = make(clock, feature), request(clock, "one")
    loop.scheduler.add(one)
    clock.pass_(3.0)
    feature.done = True
    loop.scheduler.wake("one")
    clock.pass_(1.0)
    step(loop, clock, 0.5)
    assert one.times.delays == {"grammar": 3.0, QUEUE: 1.0, PREFILL: 0.5}


def test_siblings_wait_for_the_prompt_that_they_share(clock: Clock) -> None:
    loop, leader = make(clock), request(clock, "leader")
    follower = request(clock, "leader")
    follower.request_id, follower.leader = "follower", leader
    loop.scheduler.add(leader)
    loop.scheduler.add(follower)
    step(loop, clock, 1.0)
    step(loop, clock, 0.5)
    assert follower.times.delays == {SIBLING: 1.0, QUEUE: 0.0, PREFILL: 0.5}


def test_late_inputs_count_from_the_late_result_to_the_next(clock: Clock) -> None:
    one = request(clock, "one")
    one.lane = 2
    found = delays.DelayClock(4)
    found.enter(one, DECODE)

    def result(seconds: float, *, late: bool) -> None:
        lanes = int32([2])
        rows = StepInFlight(0, [one], lanes, lanes, int32([1]), int32([1]), lanes, 1, False, [])
        found.launched(rows)
        clock.pass_(seconds)
        found.result(rows, np.array([late]))

    result(0.25, late=False)
    result(0.25, late=True)
    result(0.5, late=True)
    result(0.25, late=False)
    found.settle(one)
    assert one.times.delays == {DECODE: 0.5, INPUTS: 0.75}


def test_a_snapshot_counts_the_running_phase(clock: Clock) -> None:
    loop, one = make(clock), request(clock, "one", output=20)
    loop.scheduler.add(one)
    step(loop, clock, 1.0)
    clock.pass_(0.5)
    for _ in range(2):
        loop.scheduler.delays.settle(one)
        assert one.times.delays == {QUEUE: 0.0, PREFILL: 1.0, DECODE: 0.5}
