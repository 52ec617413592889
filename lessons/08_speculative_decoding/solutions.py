"""Solutions of the exercises on drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def residual(target: Tensor, draft: Tensor) -> Tensor:
    more = (target - draft).clamp(min=0)
    return more / more.sum() if more.any() else target


def tokens_of_pass(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    count = 0
    while count < len(drafts) and drafts[count] == drawn[count]:
        count += 1
    return list(drawn[: count + 1])


def best_draft_count(
    acceptance: float, draft_seconds: float, verify_seconds: Sequence[float]
) -> int:
    def rate(count: int) -> float:
        tokens = sum(acceptance**place for place in range(count + 1))
        return tokens / (verify_seconds[count] + count * draft_seconds)

    return max(range(len(verify_seconds)), key=rate)
