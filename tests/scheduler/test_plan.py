"""Plans: mask lines, claims of drafts, and plans without rows."""

from __future__ import annotations

import pytest

from quire.arrays import int32
from quire.features.structured_output.feature import claimed_drafts
from quire.plan import KVGroup, RowFlag, StepPlan
from tests.fakes import FakeExecutor

_PROMPT, _SAMPLE, _GATED = int(RowFlag.PROMPT), int(RowFlag.SAMPLE), int(RowFlag.GATED)


def test_each_logit_row_of_a_gated_row_has_a_mask_line() -> None:
    flags = [_SAMPLE | _GATED, _SAMPLE, _SAMPLE | _GATED, _PROMPT, _PROMPT | _SAMPLE | _GATED]
    n_logits = int32([3, 2, 1, 0, 4])
    plan = StepPlan(0, int32(range(5)), int32([3, 2, 1, 5, 6]), n_logits, int32(flags))
    # A prompt samples from its last logit row only.
    assert plan.mask_lines.tolist() == [0, 1, 2, -1, -1, 3, -1, -1, -1, 4]


def test_without_gated_rows_there_are_no_lines() -> None:
    plan = StepPlan(0, int32([0]), int32([2]), int32([2]), int32([_SAMPLE]))
    assert plan.mask_lines.tolist() == [-1, -1]


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
