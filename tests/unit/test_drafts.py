"""Draft tokens: claims that are right, late, and cut where room is short."""

from __future__ import annotations

import pytest

from quire.arrays import Int32, int32
from quire.config import SchedulerConfig
from quire.errors import ConfigError
from quire.executor import Capacity
from quire.plan import DRAFT_IDS, DRAFT_START, KVGroup, RowFlag
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Feature, PlanBuilder, Scheduler
from quire.scheduler.running import cut_evenly
from tests.brain import Loop
from tests.fakes import FakeExecutor, expected_output

_GROUP = KVGroup(layers=(0,), tokens_per_block=4)
_WIDTH = 40


class Oracle(Feature):
    """Claims all of a request's text, once, with the step that computes its prompt."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self.lanes: list[list[int]] = []

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        assert len(lanes) == len(room)
        self.lanes.append(lanes.tolist())
        return int32([self.most] * len(lanes))

    def plan(self, builder: PlanBuilder) -> None:
        for row, request in enumerate(builder.requests):
            if builder.flags[row] & RowFlag.PROMPT:
                text = expected_output(request, 50, None)[:_WIDTH]
                ids = text + [-1] * (_WIDTH - len(text))
                lane = builder.lanes[row : row + 1]
                builder.write(DRAFT_IDS, lane, int32([ids]))
                builder.write(DRAFT_START, lane, int32([request.prompt_len]))


def make(feature: Feature, *, logit_rows: int | None = 40, **config: int) -> Loop:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | config
    executor = FakeExecutor([_GROUP], [80], logit_rows=logit_rows)
    return Loop(Scheduler(SchedulerConfig(**settings), executor.start(), [feature]), executor)


def request(name: str, output: int = 20) -> Request:
    return Request(name, int32(range(6)), SamplingParams(), max_total=6 + output)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_drafts_take_fewer_steps(depth: int) -> None:
    loop = make(Oracle(), steps_in_flight=depth)
    one = request("one")
    loop.scheduler.add(one)
    loop.drain()
    assert loop.outputs["one"] == expected_output(one, 50, None)
    assert loop.executor.accepted_drafts >= 12
    assert len(loop.plans) <= 5 + 2 * depth


def test_drafts_are_cut_to_the_logit_rows_of_a_step() -> None:
    loop = make(Oracle(), logit_rows=6)
    requests = [request(f"r{i}") for i in range(4)]
    for one in requests:
        loop.scheduler.add(one)
    loop.drain()
    assert loop.executor.accepted_drafts > 0
    assert max(int(plan.n_logits.sum()) for plan in loop.plans[4:]) == 6
    for one in requests:
        assert loop.outputs[one.request_id] == expected_output(one, 50, None)


def test_one_logit_row_a_lane_leaves_no_room_for_drafts_in_a_full_batch() -> None:
    loop = make(Oracle(), logit_rows=None, max_num_seqs=1)
    loop.scheduler.add(request("one"))
    loop.drain()
    assert loop.executor.accepted_drafts == 0


@pytest.mark.parametrize(
    ("counts", "total", "cut"),
    [
        ([4, 4, 4], 12, [4, 4, 4]),
        ([4, 4, 4], 7, [3, 2, 2]),
        ([1, 4, 0], 3, [1, 2, 0]),
        ([5], 0, [0]),
        ([5], -1, [0]),
        ([], 3, []),
    ],
)
def test_cut_evenly(counts: list[int], total: int, cut: list[int]) -> None:
    assert cut_evenly(int32(counts), total).tolist() == cut


def test_drafts_that_nothing_verifies_are_refused() -> None:
    with pytest.raises(ConfigError, match="Oracle proposes draft tokens"):
        Scheduler(SchedulerConfig(), Capacity((_GROUP,), (80,)), [Oracle()])


def test_fewer_logit_rows_than_lanes_are_refused() -> None:
    with pytest.raises(ConfigError, match="fewer than max_num_seqs=8"):
        Scheduler(SchedulerConfig(max_num_seqs=8), Capacity((_GROUP,), (80,), logit_rows=7))
