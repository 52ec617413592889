"""Every request of an encoder is one row of one step."""

from __future__ import annotations

import numpy as np

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.executor import Capacity
from quire.plan import KVGroup, StepPlan, StepResult, StopReason
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import TextScheduler
from quire.scheduler.fair_share import FairShare


def scheduler(fair: bool = False, **changes: int) -> TextScheduler:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 32, **changes}
    config = SchedulerConfig(
        **settings,
        steps_in_flight=2,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    capacity = Capacity((KVGroup((0,), tokens_per_block=32),), (4,))
    return TextScheduler(config, capacity, (), FairShare(config) if fair else None)


def add(own: TextScheduler, name: str, length: int, tenant: str = "") -> Request:
    params = SamplingParams(max_tokens=1)
    request = Request(
        name, int32(range(length)), params, max_total=length + 1, seed=0, arrival=0.0,
        pooling="mean", tenant=tenant,
    )  # fmt: skip
    own.add(request)
    return request


def result(plan: StepPlan) -> StepResult:
    rows = plan.num_rows
    stop = np.full(rows, int(StopReason.LENGTH), dtype=np.int32)
    tokens, counts = np.full((rows, 1), -1, np.int32), np.zeros(rows, np.int32)
    return StepResult(plan.step_id, tokens, counts, stop)


def planned(own: TextScheduler) -> StepPlan:
    plan = own.plan()
    assert plan is not None
    return plan


def test_steps_hold_whole_texts_in_order() -> None:
    own = scheduler()
    for index, length in enumerate((20, 15, 30, 5, 5, 5, 5, 5)):
        add(own, f"{index}/0", length)
    first = planned(own)
    assert first.q_len.tolist() == [20, 15]
    assert [admit.request_id for admit in first.admits] == ["0/0", "1/0"]
    second = planned(own)
    assert second.q_len.tolist() == [30, 5]
    assert own.plan() is None  # Two steps are in flight.
    assert (own.num_running, own.num_waiting) == (4, 4)
    progress = own.update(result(first))
    assert [request.request_id for request in progress.requests] == ["0/0", "1/0"]
    assert progress.finished == [0, 1]
    third = planned(own)
    assert third.q_len.tolist() == [5, 5]  # Two lanes are free.
    assert sorted(third.frees) == sorted(first.lanes.tolist())
    for plan in (second, third):
        own.update(result(plan))
    own.update(result(planned(own)))
    assert not own.has_work()
    assert own.stats().running == 0


def test_an_aborted_text_gives_no_result() -> None:
    own = scheduler()
    one, other = add(own, "one/0", 8), add(own, "other/0", 8)
    plan = planned(own)
    assert own.abort("one/0") is one
    assert own.num_running == 1
    again = add(own, "again/0", 8)
    later = planned(own)
    progress = own.update(result(plan))
    assert (progress.requests, progress.rows.tolist()) == ([other], [1])
    assert own.update(result(later)).requests == [again]
    assert not own.has_work()


def test_tenants_share_steps() -> None:
    own = scheduler(fair=True)
    for index in range(12):
        add(own, f"many{index}/0", 30, "many")
    add(own, "few/0", 30, "few")
    names = []
    while own.has_work():
        plan = planned(own)
        names += [request.request_id for request in own.update(result(plan)).requests]
    assert len(names) == 13
    assert names.index("few/0") < 5
