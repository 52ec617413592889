"""Text that a grammar forces: its tokens are known before the model has computed them.

llguidance says which tokens must come next (`compute_ff_tokens`). Its masks allow nothing else at
these places. So such tokens are drafts that are accepted with certainty, and the distribution of
texts stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from quire.arrays import Int32
from quire.executor import StepSeconds

_MOST_SKIPPED = 4
"""Positions at which a request is not asked again, after it had no forced text several times."""
_MARGIN = 1.02
"""Drafts must make a step this much better, because measurements are not exact."""


class ForcedText(NamedTuple):
    """Tokens that must come.

    Attributes:
        start: Position of the first one.
        tokens: The tokens.
    """

    start: int = 0
    tokens: tuple[int, ...] = ()

    def after(self, position: int) -> tuple[int, ...]:
        """Returns the tokens from a position on; none if the position lies outside."""
        if position < self.start:
            return ()
        return self.tokens[position - self.start :]


NO_TEXT = ForcedText()


class ForcedTextFinder:
    """Finds a request's forced text.

    Asking costs about ten microseconds. So a request without forced text is asked less often.

    Attributes:
        text: What was found last.
    """

    __slots__ = ("_misses", "_skip", "text")

    def __init__(self) -> None:
        self.text = NO_TEXT
        self._misses = self._skip = 0

    def find(self, matcher: LLMatcher, position: int) -> tuple[int, ...]:
        """Returns the tokens that must come from `position` on.

        Args:
            matcher: It has all tokens before `position`.
        """
        if known := self.text.after(position):
            return known
        if self._skip:
            self._skip -= 1
            return ()
        found = tuple(matcher.compute_ff_tokens())
        if found:
            self.text, self._misses = ForcedText(position, found), 0
        else:
            self._misses += 1
            self._skip = min(self._misses // 2, _MOST_SKIPPED)
        return found


def write_forced(forced: Sequence[int], drafts: Sequence[int], lines: Int32) -> bool:
    """Writes the masks of a row whose next tokens are forced.

    Returns False if it needs further masks: the drafts are all right, and longer than what is
    forced.

    Args:
        forced: The tokens that must come, at least one.
        drafts: The row's drafts.
        lines: int32 [1 + drafts at least, words].
    """
    right = 0
    for token, draft in zip(forced, drafts, strict=False):
        if token != draft:
            break
        right += 1
    if right == len(forced):
        return False
    lines[: right + 1] = 0
    # No token can follow a draft that is refused.
    lines[right + 1 :] = -1
    for line, token in enumerate(forced[: right + 1]):
        lines[line, token >> 5] = np.uint32(1 << (token & 31)).view(np.int32)
    return True


class DraftCosts:
    """Tells whether a step gets faster by drafts that are certain.

    Args:
        seconds: What was measured at the start (`Capacity.step_seconds`). Without measurements,
            drafts cost nothing.
    """

    def __init__(self, seconds: StepSeconds) -> None:
        self._decode = sorted(seconds.get("decode", {}).items())
        self._verify = sorted(seconds.get("verify", {}).items())

    def pays(self, rows: int, drafts: int) -> bool:
        """Whether a step of so many rows should verify so many drafts."""
        if not self._decode or not self._verify:
            return True
        plain = rows / _seconds(self._decode, rows)
        return (rows + drafts) / _seconds(self._verify, rows + drafts) > _MARGIN * plain


def _seconds(measured: Sequence[tuple[int, float]], size: int) -> float:
    """Returns the time of the next size that was measured; beyond the last, in proportion."""
    for known, seconds in measured:
        if known >= size:
            return seconds
    known, seconds = measured[-1]
    return seconds * size / known
