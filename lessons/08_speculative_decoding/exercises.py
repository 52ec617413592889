"""Three exercises on drafts.

python -m lessons check 8
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Returns the distribution from which the ratio test draws after a draft was rejected.

    target, draft: float [vocab], distributions. Returns float [vocab], which sums to 1. Where both
    are equal nothing is ever rejected; return the target then.
    """
    raise NotImplementedError


def tokens_of_pass(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Returns the tokens that a pass gives under shared noise.

    drafts: k tokens. drawn: k + 1 tokens, the target's own draws: drawn[i] at the place of
    drafts[i], given the drafts before it; the last one behind all drafts. A draw counts as long as
    all drafts before it were drawn too.
    """
    raise NotImplementedError


def best_draft_count(
    acceptance: float, draft_seconds: float, verify_seconds: Sequence[float]
) -> int:
    """Returns how many drafts a pass should have, so that tokens come fastest.

    acceptance: the probability that a draft is accepted if those before it were. draft_seconds:
    the time of one draft. verify_seconds[k]: the time of a pass that verifies k drafts; k = 0 is a
    plain step. Of counts that are as good, the smallest.
    """
    raise NotImplementedError
