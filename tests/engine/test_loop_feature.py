"""Features in the engine's loop: they park, wake and fail requests, hold steps back, and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.errors import RequestError
from quire.executor import Capacity, Executor
from quire.features.loop_feature import Failure, LoopFeature
from quire.plan import KVGroup
from quire.request import FinishReason, Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature
from tests.fakes import FakeExecutor


class Slow(Feature, LoopFeature):
    """Parks all requests until a byte can be read; then wakes those with even numbers."""

    def __init__(self) -> None:
        self.parked: list[Request] = []
        self.open = False
        self.calls: list[str] = []
        self._read, self.write = os.pipe()

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        assert capacity.groups
        return self

    def ready(self, request: Request) -> bool:
        if not self.open:
            self.parked.append(request)
        return self.open

    @property
    def waits(self) -> bool:
        return bool(self.parked)

    def fds(self) -> Sequence[int]:
        return (self._read,)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        if not self.open or not self.parked:
            return (), ()
        parked, self.parked = self.parked, []
        even = [r.request_id for r in parked if int(r.request_id[0]) % 2 == 0]
        odd = [(r, RequestError("odd")) for r in parked if int(r.request_id[0]) % 2]
        return even, odd

    def before_submit(self) -> None:
        self.calls.append("submit")

    def after_update(self, step_id: int) -> None:
        self.calls.append("update")

    def close(self, drain: Callable[[], None] | None) -> None:
        assert drain is not None
        drain()
        self.calls.append("close")


class Off(LoopFeature):
    def close(self, drain: Callable[[], None] | None) -> None:
        raise AssertionError("it never began")


def engine(*features: LoopFeature) -> EngineCore:
    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [64])
    args = SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs")
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    config = SimpleNamespace(args=args, scheduler=scheduler)
    return EngineCore(config, executor, loop_features=features)  # type: ignore[arg-type]


def test_a_feature_wakes_and_fails_requests() -> None:
    slow = Slow()
    core = engine(slow, Off())
    (even,) = core.add("2", int32(range(5)), SamplingParams(), max_total=9)
    (odd,) = core.add("3", int32(range(5)), SamplingParams(), max_total=9)
    assert core.step() is None
    assert core.waits
    os.write(slow.write, b"x")
    assert core.step() is None
    slow.open = True
    while core.has_work():
        core.step()
    assert even.num_output_tokens == 4
    assert odd.finish_reason is FinishReason.ERROR
    ((failed, error),) = core.take_failures()
    assert (failed, str(error)) == (odd, "odd")
    assert core.take_failures() == []
    core.shutdown()
    core.shutdown()
    assert slow.calls == ["submit", "update"] * 4 + ["close"]


def test_the_base_class_has_no_effect() -> None:
    base = LoopFeature()
    executor = FakeExecutor([KVGroup(layers=(0,))], [4])
    assert base.start(executor, executor.start()) is None
    assert base.poll(0.0) == ((), ())
    assert not base.waits
    assert (base.fds(), base.stats()) == ((), {})
    base.before_submit()
    base.after_update(0)
    base.close(None)
