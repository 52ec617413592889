"""Hooks of features in the scheduler; hooks that a feature does not override cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.config import SchedulerConfig
from quire.errors import RefusedError, RequestError
from quire.plan import KVGroup, RowFlag, Transfer
from quire.request import Request, RequestStatus
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder, Scheduler
from quire.scheduler.feature import FeatureSet
from quire.scheduler.waiting import MOST_PREEMPTIONS
from tests.brain import Loop
from tests.fakes import FakeExecutor, expected_output


def make(*features: Feature, blocks: int = 40, **config: int) -> Loop:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | config
    executor = FakeExecutor([KVGroup(layers=(0,), tokens_per_block=4)], [blocks])
    return Loop(Scheduler(SchedulerConfig(**settings), executor.start(), features), executor)


def request(name: str, length: int = 6, output: int = 6) -> Request:
    prompt = int32(range(length))
    return Request(name, prompt, SamplingParams(), max_total=length + output)


def test_only_overridden_hooks_are_called() -> None:
    class Silent(Feature):
        pass

    class Speaks(Feature):
        def ready(self, request: Request) -> bool:
            return False

    speaks = Speaks()
    features = FeatureSet([Silent(), speaks])
    assert features.unready(request("one")) == speaks.waits_for
    assert features.looks_ahead == []


def test_the_base_class_has_no_effect() -> None:
    base, one = Feature(), request("one")
    assert base.admit(one) is None
    assert base.ready(one)
    assert not base.fetch(one, one.tokens.view(), 5)
    assert not base.preempt(one)
    assert not base.pending(True)
    assert base.lookahead(int32([0, 2]), int32([5, 5])).tolist() == [0, 0]
    assert base.device_params(one, one.params) is one.params
    assert base.result(one, int32([1, 2])) == 2
    assert not base.release(one)


def test_a_feature_may_refuse() -> None:
    class Refuses(Feature):
        def admit(self, request: Request) -> RequestError | None:
            return RefusedError("no adapter of that name", param="model")

    class Holds(Feature):
        def __init__(self) -> None:
            self.held: set[str] = set()

        def admit(self, request: Request) -> RequestError | None:
            self.held.add(request.request_id)
            return None

        def finish(self, request: Request) -> None:
            self.held.discard(request.request_id)

    holds = Holds()
    loop = make(holds, Refuses())
    with pytest.raises(RefusedError, match="no adapter"):
        loop.scheduler.add(request("one"))
    assert not loop.scheduler.has_work()
    assert not holds.held


def test_a_request_waits_until_its_feature_is_ready() -> None:
    class Gate(Feature):
        open = False

        def ready(self, request: Request) -> bool:
            return self.open

    gate = Gate()
    loop = make(gate)
    one = request("one")
    loop.scheduler.add(one)
    loop.scheduler.wake("one")
    assert one.status is RequestStatus.PARKED
    assert not loop.launch()
    assert loop.scheduler.has_work()
    gate.open = True
    loop.scheduler.wake("one")
    assert one.status is RequestStatus.WAITING
    loop.scheduler.wake("one")
    assert loop.scheduler.num_waiting == 1
    loop.drain()


def test_a_request_waits_while_a_feature_loads_its_blocks() -> None:
    class Remote(Feature):
        sent = ended = 0

        def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
            self.wake = wake

        def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
            assert (len(tokens), limit) == (request.known, request.known - 1)
            return request.request_id == "one" and not self.ended

        def pending(self, idle: bool) -> bool:
            return not self.sent or (idle and not self.ended)

        def plan(self, builder: PlanBuilder) -> None:
            if not self.sent:
                self.sent = 1
                builder.transfer(Transfer(7, "out", "host", 0, int32([0]), slots=int32([0])))

        def transferred(self, finished: list[int], failed: list[int]) -> None:
            assert (finished, failed) == ([7], [])
            self.ended = 1
            self.wake("one")

    loop = make(Remote())
    one, two = request("one", 12), request("two", 12)
    loop.scheduler.add(one)
    plan = loop.scheduler.plan()
    assert plan is not None
    assert plan.num_rows == 0
    assert plan.transfers[0].id == 7
    assert one.status is RequestStatus.PARKED
    loop.executor.submit(plan)
    loop.scheduler.add(two)
    loop.drain()
    assert loop.outputs["one"] == expected_output(one, 50, None)
    assert loop.outputs["two"] == expected_output(two, 50, None)


def test_a_request_is_preempted_a_bounded_number_of_times() -> None:
    """After it was preempted for new tenants' shares of the pool, the request takes all blocks it
    needs."""
    loop = make(blocks=12, max_num_seqs=4)
    for i in range(12):
        loop.scheduler.add(request(f"r{i}", 4, 40))
    loop.drain()
    counts = [r.num_preemptions for r in loop.finished.values()]
    assert len(counts) == 12
    assert 1 < max(counts) <= MOST_PREEMPTIONS


def test_drafts_go_when_blocks_run_out_and_never_pass_the_longest_length() -> None:
    class Greedy(Feature):
        def lookahead(self, lanes: Int32, room: Int32) -> Int32:
            return room + 100

    loop = make(Greedy(), blocks=5, steps_in_flight=2)
    one = request("one", 6, 15)
    loop.scheduler.add(one)
    loop.drain()
    assert loop.outputs["one"] == expected_output(one, 50, None)
    for plan in loop.plans:
        assert (plan.n_logits == plan.q_len).all() or plan.admits


def test_a_feature_adds_to_a_settled_step() -> None:
    class Adds(Feature):
        def plan(self, builder: PlanBuilder) -> None:
            builder.gate([0])
            lanes = builder.lanes[:1]
            builder.write("column", lanes, int32([5]))
            builder.write("column", lanes, int32([6]))
            assert builder.requests[0].lane == lanes[0]
            assert builder.step_id == len(loop.plans)
            assert len(builder.flags) == len(builder.n_logits)

    loop = make(Adds())
    loop.scheduler.add(request("one"))
    loop.drain()
    for plan in loop.plans:
        assert plan.gated
        assert plan.flags[0] & RowFlag.GATED
        assert plan.writes["column"][1].tolist() == [5, 6]


def test_keeping_fewer_tokens_starts_over_from_them() -> None:
    class Cuts(Feature):
        """Refuses each fifth token once."""

        def __init__(self) -> None:
            self.cut: set[int] = set()

        def result(self, request: Request, tokens: Int32) -> int:
            at = request.num_output_tokens
            if at % 5 == 4 and at not in self.cut and len(tokens):
                self.cut.add(at)
                return 0
            return len(tokens)

    cuts = Cuts()
    loop = make(cuts, steps_in_flight=2)
    one = request("one", 6, 20)
    loop.scheduler.add(one)
    loop.drain()
    assert cuts.cut == {4, 9, 14, 19}
    assert one.num_preemptions == 4
    assert loop.outputs["one"] == expected_output(one, 50, None)


def test_a_feature_may_keep_the_blocks_of_an_ended_request() -> None:
    class Keeps(Feature):
        def __init__(self) -> None:
            self.released: list[str] = []

        def release(self, request: Request) -> bool:
            self.released.append(request.request_id)
            return True

    keeps = Keeps()
    loop = make(keeps, blocks=4, enable_prefix_caching=False)
    loop.scheduler.add(request("one", 6, 6))
    loop.drain()
    assert keeps.released == ["one"]
    assert loop.scheduler.stats().blocks_used == [3]
    loop.scheduler.add(request("two", 6, 6))
    assert not loop.launch()
    loop.scheduler.free_detached("one")
    loop.scheduler.free_detached("one")
    loop.drain()
    loop.scheduler.add(request("three"))
    loop.scheduler.abort("three")
    assert keeps.released == ["one", "two", "three"]
