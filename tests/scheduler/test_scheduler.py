"""Contents of steps, the order of requests, and the ways in which requests end."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from quire.arrays import int32
from quire.config import SchedulerConfig
from quire.errors import OverloadedError, RefusedError, RequestError, RequestTooLargeError
from quire.plan import KVGroup, RowFlag, StepPlan, StepResult
from quire.request import FinishReason, Request, RequestStatus
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler
from quire.scheduler.fair_share import FairShare
from tests.brain import Loop
from tests.fakes import FakeExecutor, expected_output

_PROMPT, _SAMPLE = int(RowFlag.PROMPT), int(RowFlag.SAMPLE)


def make(
    *,
    blocks: int = 100,
    block_size: int = 4,
    stop_token: int | None = None,
    fair: bool = False,
    **config: Any,
) -> Loop:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | config
    executor = FakeExecutor(
        [KVGroup(layers=(0,), tokens_per_block=block_size)], [blocks], stop_token=stop_token
    )
    resolved = SchedulerConfig(**settings)
    order = FairShare(resolved) if fair else None
    return Loop(Scheduler(resolved, executor.start(), order=order), executor)


def request(name: str, prompt: int | list[int], output: int = 4, **options: Any) -> Request:
    tokens = int32([7] * prompt if isinstance(prompt, int) else prompt)
    params = options.pop("params", SamplingParams())
    return Request(name, tokens, params, max_total=len(tokens) + output, **options)


def own(seed: int, length: int) -> list[int]:
    """Returns a prompt without common prefixes with those of other seeds."""
    return [1000 * seed + i for i in range(length)]


def rows(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Returns (lane, q_len, n_logits, flags) of each row."""
    return list(
        zip(
            plan.lanes.tolist(),
            plan.q_len.tolist(),
            plan.n_logits.tolist(),
            plan.flags.tolist(),
            strict=True,
        )
    )


def check_output(loop: Loop, one: Request) -> None:
    expected = expected_output(one, loop.executor.vocab, loop.executor.stop_token)
    assert loop.outputs[one.request_id] == expected


# -- rows ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_chunked_and_decodes_ride_along() -> None:
    loop = make()
    first, second = request("a", own(1, 3)), request("b", own(2, 30))
    loop.scheduler.add(first)
    loop.step()
    assert rows(loop.plans[0]) == [(0, 3, 1, _PROMPT | _SAMPLE)]
    loop.collect()
    loop.scheduler.add(second)
    for _ in range(2):
        loop.step()
        loop.collect()
    assert rows(loop.plans[1]) == [(0, 1, 1, _SAMPLE), (1, 15, 0, _PROMPT)]
    assert rows(loop.plans[2]) == [(0, 1, 1, _SAMPLE), (1, 15, 1, _PROMPT | _SAMPLE)]
    loop.drain()
    check_output(loop, first)
    check_output(loop, second)


@pytest.mark.parametrize(
    ("count", "length", "steps"),
    [
        (4, 600, [1, 1, 1, 1]),  # a few do not wait for each other
        (5, 200, [3, 2]),  # short ones fill a step together
        (9, 600, [5, 4]),  # of many, as many as the budget holds
        (1, 2000, [1]),
    ],
)
def test_few_prompts_come_one_after_the_other(count: int, length: int, steps: list[int]) -> None:
    loop = make(
        blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=2999, max_model_len=2048
    )
    for i in range(count):
        loop.scheduler.add(request(str(i), own(i, length)))
    begun = []
    while sum(begun) < count:
        plan = loop.scheduler.plan()
        assert plan is not None
        begun.append(len(plan.admits))
        loop.executor.submit(plan)
        loop.scheduler.update(loop.executor.collect())
    assert begun == steps


def test_counts_of_a_request() -> None:
    loop = make(max_num_batched_tokens=6, steps_in_flight=2)
    one = request("a", own(1, 8))
    loop.scheduler.add(one)
    loop.launch()
    assert (one.known, one.planned, one.computed, one.generating) == (8, 6, 0, False)
    loop.launch()
    assert (one.known, one.planned, one.computed, one.generating) == (8, 8, 0, True)
    loop.collect()
    assert (one.known, one.planned, one.computed) == (8, 8, 6)
    loop.launch()
    loop.collect()
    assert (one.known, one.planned, one.computed) == (9, 9, 8)
    loop.drain()
    assert (one.known, one.computed) == (12, 11)
    assert one.finish_reason is FinishReason.LENGTH


def test_an_admission_carries_all_request_state() -> None:
    loop = make()
    params = SamplingParams(temperature=0.5)
    one = request("a", own(1, 5), params=params, seed=3, sample_index=0)
    loop.scheduler.add(one)
    loop.step()
    (admit,) = loop.plans[0].admits
    assert admit.tokens.tolist() == own(1, 5)
    assert (admit.lane, admit.computed, admit.prompt_len, admit.max_total) == (0, 0, 5, 9)
    assert (admit.params, admit.seed, admit.request_id) == (params, 3, "a")


def test_a_lane_is_freed_before_it_is_given_again() -> None:
    loop = make(max_num_seqs=1)
    a, b = request("a", own(1, 3), 1), request("b", own(2, 3), 1)
    loop.scheduler.add(a)
    loop.scheduler.add(b)
    loop.drain()
    assert [plan.frees for plan in loop.plans] == [[], [0]]
    assert [plan.admits[0].lane_epoch for plan in loop.plans] == [0, 1]


def test_steady_steps_share_their_rows() -> None:
    loop = make()
    loop.scheduler.add(request("a", own(1, 3), 10))
    for _ in range(4):
        loop.step()
        loop.collect()
    assert loop.plans[2].lanes is loop.plans[3].lanes
    assert loop.plans[2].flags is loop.plans[3].flags


def test_no_more_steps_in_flight_than_allowed() -> None:
    loop = make(steps_in_flight=3)
    loop.scheduler.add(request("a", own(1, 3), 20))
    assert [loop.launch() for _ in range(4)] == [True, True, True, False]
    assert loop.scheduler.num_in_flight == 3
    loop.collect()
    assert loop.launch()
    loop.drain()


def test_pipeline_depth_spaces_the_steps_of_a_lane() -> None:
    loop = make(steps_in_flight=3, pipeline_depth=3)
    for i in range(3):
        loop.scheduler.add(request(f"r{i}", own(i, 3), 6))
        loop.launch()
    for _ in range(6):
        loop.collect()
        loop.launch()
    steps = {}
    for plan in loop.plans:
        for lane in plan.lanes.tolist():
            steps.setdefault(lane, []).append(plan.step_id)
    for ids in steps.values():
        assert all(b - a >= 3 for a, b in itertools.pairwise(ids))
    loop.drain()


# -- order -----------------------------------------------------------------------------------------


def order_of_admission(loop: Loop) -> list[str]:
    return [admit.request_id for plan in loop.plans for admit in plan.admits]


def test_first_come_first_served() -> None:
    loop = make(max_num_seqs=1)
    for name, arrival in (("late", 2.0), ("early", 1.0), ("tie", 2.0)):
        loop.scheduler.add(request(name, own(1, 3), arrival=arrival))
    loop.drain()
    assert order_of_admission(loop) == ["early", "late", "tie"]


def test_lower_priority_values_go_first_until_others_have_aged() -> None:
    loop = make(max_num_seqs=1, policy="priority", priority_weight=10.0)
    for name, arrival, priority in (
        ("old", 0.0, 1),
        ("urgent", 9.0, 0),
        ("too late", 11.0, 0),
        ("most urgent", 11.0, -1),
    ):
        loop.scheduler.add(request(name, own(1, 3), arrival=arrival, priority=priority))
    loop.drain()
    assert order_of_admission(loop) == ["most urgent", "urgent", "old", "too late"]


def test_the_latest_is_preempted_and_still_gets_its_tokens() -> None:
    loop = make(blocks=8, max_num_batched_tokens=64)
    requests = [request(f"r{i}", own(i, 7), 16, arrival=float(i)) for i in range(3)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    assert loop.scheduler.stats().preemptions > 0
    for one in requests:
        check_output(loop, one)


def test_preemption_takes_the_lowest_priority() -> None:
    loop = make(blocks=8, max_num_batched_tokens=64, policy="priority")
    low = request("low", own(1, 7), 16, priority=5)
    high = request("high", own(2, 7), 16, priority=0, arrival=1.0)
    loop.scheduler.add(low)
    loop.step()
    loop.scheduler.add(high)
    loop.drain()
    assert (high.num_preemptions, low.num_preemptions > 0) == (0, True)
    check_output(loop, low)


def test_a_resumed_request_finds_its_own_blocks() -> None:
    loop = make(blocks=9, max_num_batched_tokens=64)
    requests = [request(f"r{i}", own(i, 7), 20, arrival=float(i)) for i in range(2)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    again = [a for p in loop.plans for a in p.admits if a.request_id == "r1"][1:]
    assert again
    assert all(a.prompt_len == 7 and len(a.tokens) > 7 for a in again)


def test_rows_of_a_preempted_request_in_flight_are_ignored() -> None:
    loop = make(blocks=6, max_num_batched_tokens=64, steps_in_flight=3)
    requests = [request(f"r{i}", own(i, 7), 14, arrival=float(i)) for i in range(2)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    assert requests[1].num_preemptions
    for one in requests:
        check_output(loop, one)


# -- ends ------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_request_while_later_steps_are_in_flight() -> None:
    loop = make(stop_token=0, steps_in_flight=3, max_model_len=512, blocks=500)
    requests = [request(f"r{i}", own(i, 3), 400) for i in range(4)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    for one in requests:
        check_output(loop, one)
        assert one.finish_reason is FinishReason.STOP
        assert one.output[-1] == 0
    assert loop.scheduler.stats().blocks_used == [0]


def test_progress_names_the_stop_token_and_the_finished() -> None:
    loop = make()
    a, b = request("a", own(1, 3), 9), request("b", own(2, 3), 9)
    loop.scheduler.add(a)
    loop.scheduler.add(b)
    plan = loop.scheduler.plan()
    assert plan is not None
    progress = loop.scheduler.update(
        StepResult(plan.step_id, int32([[5], [6]]), int32([1, 1]), int32([0, 1]))
    )
    assert progress.requests == [a, b]
    assert progress.finished == [1]
    assert progress[0].stop_token is None
    assert progress[1].stop_token == 6
    assert [p.new_tokens.tolist() for p in progress] == [[5], [6]]
    assert [p.finished for p in progress] == [False, True]
    assert b.output.tolist() == [6]


def test_results_must_come_in_order() -> None:
    loop = make(steps_in_flight=2)
    loop.scheduler.add(request("a", own(1, 3)))
    loop.launch()
    with pytest.raises(RuntimeError, match="came before"):
        loop.scheduler.update(StepResult(1, int32([[1]]), int32([1]), int32([0])))


@pytest.mark.parametrize("stage", ["queued", "in its prompt", "generating", "preempted", "parked"])
def test_abort_at_any_moment(stage: str) -> None:
    loop = make(blocks=8, steps_in_flight=2, max_num_batched_tokens=8)
    other = request("other", own(1, 7), 20)
    loop.scheduler.add(other)
    one = request("one", own(2, 12), 12, arrival=1.0)
    loop.scheduler.add(one)
    target = one
    if stage == "parked":
        target = request("sibling", own(2, 12), 12, arrival=1.0, leader=one, sample_index=1)
        loop.scheduler.add(target)
        assert target.status is RequestStatus.PARKED
    reached = {
        "queued": lambda: True,
        "parked": lambda: True,
        "in its prompt": lambda: one.status is RequestStatus.RUNNING and not one.generating,
        "generating": lambda: one.generating and one.num_output_tokens > 1,
        "preempted": lambda: one.num_preemptions > 0,
    }[stage]
    while not reached():
        loop.step()
    assert loop.scheduler.abort(target.request_id) is target
    assert loop.scheduler.abort(target.request_id) is None
    assert target.finish_reason is FinishReason.ABORT
    before = loop.outputs.get(target.request_id)
    loop.drain()
    assert loop.outputs.get(target.request_id) == before
    check_output(loop, other)
    assert loop.scheduler.stats().blocks_used == [0]
    assert not loop.scheduler.has_work()


@pytest.mark.parametrize(
    ("caps", "taken"), [({"max_queue": 3}, 5), ({"max_queue_tokens": 20}, 4), ({}, 9)]
)
def test_a_full_queue_takes_no_more(caps: dict[str, int], taken: int) -> None:
    loop = make(max_num_seqs=2, **caps)
    names = []
    for i in range(9):
        try:
            loop.scheduler.add(request(f"r{i}", own(i, 5)))
        except OverloadedError:
            continue
        names.append(f"r{i}")
    assert len(names) == taken
    loop.drain()
    assert sorted(loop.finished) == names
    loop.scheduler.add(request("later", own(20, 5)))
    loop.drain()


def test_siblings_are_never_cut_off_by_a_full_queue() -> None:
    loop = make(max_num_seqs=1, max_queue=2)
    leader = request("a", own(1, 5))
    loop.scheduler.add(leader)
    for i in range(5):
        loop.scheduler.add(request(f"b{i}", own(1, 5), sample_index=1 + i, leader=leader))
    with pytest.raises(OverloadedError):
        loop.scheduler.add(request("c", own(2, 5)))
    loop.drain()
    assert len(loop.finished) == 6


def test_many_aborted_requests_leave_the_queue() -> None:
    loop = make(max_num_seqs=1)
    loop.scheduler.add(request("runs", own(1, 3), 30))
    loop.step()
    for i in range(500):
        loop.scheduler.add(request(f"r{i}", 3))
        loop.scheduler.abort(f"r{i}")
    assert loop.scheduler.num_waiting == 0
    assert len(loop.scheduler._order._queue._heap) < 100
    loop.drain()


def test_an_unknown_request_cannot_be_aborted_or_woken() -> None:
    loop = make()
    assert loop.scheduler.abort("nobody") is None
    loop.scheduler.wake("nobody")


# -- the door --------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused() -> None:
    loop = make(blocks=4)
    loop.scheduler.add(request("fits", own(1, 10), 7))
    with pytest.raises(RequestTooLargeError) as error:
        loop.scheduler.add(request("does not", own(2, 10), 8))
    assert error.value.code == "kv_cache_too_small"
    loop.drain()


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("a", 0), "prompt"),
        (request("a", 5, 0), "prompt"),
        (request("a", 60, 5), "max_tokens"),
        (request("taken", 5), "request_id"),
    ],
)
def test_malformed_requests_are_refused(bad: Request, param: str) -> None:
    loop = make()
    loop.scheduler.add(request("taken", 3))
    with pytest.raises(RequestError) as error:
        loop.scheduler.add(bad)
    assert error.value.param == param
    assert loop.scheduler.num_waiting == 1


# -- without chunked prefill -----------------------------------------------------------------------


def test_without_chunking_prompts_go_whole() -> None:
    loop = make(enable_chunked_prefill=False)
    for i in range(3):
        loop.scheduler.add(request(f"r{i}", own(i, 10), 3))
    loop.drain()
    prompts = [row for plan in loop.plans for row in rows(plan) if row[3] & _PROMPT]
    assert [row[1] for row in prompts] == [10, 10, 10]
    with pytest.raises(RefusedError, match="must fit a step of max_num_batched_tokens=16"):
        loop.scheduler.add(request("long", own(9, 17)))


def test_without_chunking_a_resumed_request_may_still_be_split() -> None:
    loop = make(enable_chunked_prefill=False, blocks=9, enable_prefix_caching=False)
    requests = [request(f"r{i}", own(i, 12), 18, arrival=float(i)) for i in range(2)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    assert requests[1].num_preemptions
    for one in requests:
        check_output(loop, one)


# -- shared prompts --------------------------------------------------------------------------------


def test_equal_prompts_share_blocks_even_within_a_step() -> None:
    loop = make(max_num_batched_tokens=64)
    a, b = request("a", 10, seed=1), request("b", 10, seed=2)
    loop.scheduler.add(a)
    loop.scheduler.add(b)
    loop.drain()
    assert rows(loop.plans[0]) == [(0, 10, 1, 3), (1, 2, 1, 3)]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)
    check_output(loop, a)
    check_output(loop, b)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    loop = make(max_num_batched_tokens=64)
    first = request("first", own(1, 5), 9)
    loop.scheduler.add(first)
    loop.drain()
    turn = request("turn", own(1, 5) + first.output.tolist() + [1, 2, 3])
    loop.scheduler.add(turn)
    loop.drain()
    # All tokens except the last answer's last one, which was never computed.
    assert turn.num_cached_tokens == 13
    stats = loop.scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.copied_blocks, stats.evicted_blocks) == (13, 1, 0)
    check_output(loop, turn)


def test_evicted_blocks_are_counted() -> None:
    loop = make(blocks=6)
    for seed in range(3):
        loop.scheduler.add(request(f"r{seed}", own(seed, 12), 1))
        loop.drain()
    assert loop.scheduler.stats().evicted_blocks == 3


def test_siblings_compute_only_the_last_prompt_token() -> None:
    loop = make()
    leader = request("r0", own(1, 10), 8)
    siblings = [request(f"r{i}", own(1, 10), 8, leader=leader, sample_index=i) for i in (1, 2)]
    for one in (leader, *siblings):
        loop.scheduler.add(one)
    assert (loop.scheduler.num_waiting, siblings[0].status) == (3, RequestStatus.PARKED)
    loop.step()
    loop.collect()
    parent = loop.scheduler.blocks.groups[0].table[leader.lane, :3].tolist()
    filled = loop.executor.store[0].reshape(-1, 4)[parent].copy()
    loop.drain()
    admits = {a.request_id: a.computed for plan in loop.plans for a in plan.admits}
    assert admits == {"r0": 0, "r1": 9, "r2": 9}
    assert loop.plans[1].copies[0].src.tolist() == [parent[2]] * 2
    # The parent's blocks still hold the tokens that they held at the fork.
    after = loop.executor.store[0].reshape(-1, 4)[parent]
    assert (after.ravel()[:10] == filled.ravel()[:10]).all()
    for one in (leader, *siblings):
        check_output(loop, one)
    assert len({tuple(loop.outputs[r.request_id]) for r in (leader, *siblings)}) == 3


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_siblings_go_on_without_their_leader(end: str) -> None:
    loop = make(max_num_batched_tokens=4)
    leader = request("r0", own(1, 10), 8)
    sibling = request("r1", own(1, 10), 8, leader=leader, sample_index=1)
    loop.scheduler.add(leader)
    loop.scheduler.add(sibling)
    loop.step()
    assert sibling.status is RequestStatus.PARKED
    if end == "abort":
        loop.scheduler.abort("r0")
    else:
        loop.scheduler._preempt(leader)
    assert sibling.status is RequestStatus.WAITING
    loop.drain()
    check_output(loop, sibling)


def test_a_sibling_of_a_refused_leader_goes_alone() -> None:
    loop = make()
    leader = request("r0", own(1, 10), 8)
    sibling = request("r1", own(1, 10), 8, leader=leader, sample_index=1)
    loop.scheduler.add(sibling)
    loop.drain()
    check_output(loop, sibling)


# -- logprobs of the prompt ------------------------------------------------------------------------


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    loop = make(max_num_batched_tokens=8)
    loop.scheduler.add(request("warm", 20))
    loop.drain()
    warm = len(loop.plans)
    one = request("one", 20, params=SamplingParams(prompt_logprobs=2))
    loop.scheduler.add(one)
    loop.drain()
    prompts = [row for plan in loop.plans[warm:] for row in rows(plan) if row[3] & _PROMPT]
    assert [row[1:3] for row in prompts] == [(8, 8), (8, 8), (4, 4)]
    assert sorted(loop.prompt_logprobs["one"]) == list(range(1, 20))
    assert one.prompt_logprobs_done == 19
    assert one.num_cached_tokens == 0


def test_delivered_prompt_logprobs_are_not_asked_for_again() -> None:
    loop = make(max_num_batched_tokens=8)
    one = request("one", own(1, 20), params=SamplingParams(prompt_logprobs=0))
    loop.scheduler.add(one)
    loop.step()
    loop.collect()
    loop.scheduler._preempt(one)
    assert one.prompt_logprobs_done == 8
    loop.drain()
    assert [row[1:3] for plan in loop.plans[1:3] for row in rows(plan)] == [(8, 8), (4, 4)]
    assert sorted(loop.prompt_logprobs["one"]) == list(range(1, 20))


# -- budget ----------------------------------------------------------------------------------------


def test_a_budget_smaller_than_the_lanes_serves_in_policy_order() -> None:
    loop = make(max_num_batched_tokens=2, max_num_seqs=4)
    requests = [request(f"r{i}", own(i, 2), 6, arrival=float(i)) for i in range(4)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    for one in requests:
        check_output(loop, one)
    assert list(loop.finished) == ["r0", "r1", "r2", "r3"]


def test_tokens_lie_in_the_schedulers_arrays_while_running() -> None:
    loop = make()
    one = request("one", own(1, 3), 5)
    loop.scheduler.add(one)
    loop.step()
    loop.collect()
    row = loop.scheduler._lanes.tokens[one.lane]
    assert np.shares_memory(one.tokens.view(), row)
    loop.drain()
    assert not np.shares_memory(one.tokens.view(), row)
    assert one.tokens.view().tolist() == own(1, 3) + loop.outputs["one"]
