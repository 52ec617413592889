"""Plans: claims of drafts, and plans without rows."""

from __future__ import annotations

import pytest

from quire.arrays import int32
from quire.features.structured_output.mask_worker import claimed_drafts
from quire.plan import KVGroup, StepPlan
from tests.fakes import FakeExecutor


@pytest.mark.parametrize(
    ("ids", "start", "most", "drafts"),
    [
        ([7, 8, 9], 3, 5, [7, 8, 9]),
        ([7, 8, 9], 3, 2, [7, 8]),
        ([2, 3, 7, 8], 1, 5, [7, 8]),
        ([2, 4, 7, 8], 1, 5, []),
        ([2, 3, 7, -1], 1, 5, [7]),
        ([2, -1, -1, -1], 1, 5, []),
        ([7, 8], 4, 5, []),
        ([7, 8], -1, 5, []),
        ([1, 2, 3], 0, 5, []),
        ([7], 3, 0, []),
        ([2], 1, 5, []),
        ([1], 0, 5, []),
    ],
)
def test_a_claim_counts_where_it_matches_the_known_tokens(
    ids: list[int], start: int, most: int, drafts: list[int]
) -> None:
    assert claimed_drafts(int32(ids), start, int32([1, 2, 3]), most).tolist() == drafts


def test_a_plan_may_have_dummy_tokens_alone() -> None:
    none = int32([])
    plan = StepPlan(0, none, none, none, none, dummy_tokens=8)
    assert (plan.num_rows, plan.num_tokens) == (0, 8)
    executor = FakeExecutor([KVGroup(layers=(0,))], [4])
    executor.start()
    executor.submit(plan)
    assert len(executor.collect().tokens) == 0
    assert executor.dummy_tokens == 8
