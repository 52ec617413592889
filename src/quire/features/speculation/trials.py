"""Tries out whether small expected gains are real.

The estimates of `draft_count` leave out attention, sampling and the host. These take longer in a
step with drafts, so an expected gain of some percent can be a loss. A trial runs some steps with
drafts and some without, and compares their tokens per second.
"""

from __future__ import annotations

from statistics import fmean, median

_CERTAIN = 1.3
"""Expected gain from which drafts are made without a trial."""
_UNSETTLED, _COMPARED = 4, 12
"""Steps of each half of a trial: the first ones are not compared, because their times are those of
earlier steps that were still in flight."""
_VALID = 512
"""Steps for which the result of a trial holds."""


class _Half:
    """The steps of a trial with drafts, or those without."""

    def __init__(self) -> None:
        self.steps = 0
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    @property
    def over(self) -> bool:
        return self.steps >= _UNSETTLED + _COMPARED

    def add(self, seconds: float, tokens: int) -> None:
        self.steps += 1
        if self.steps > _UNSETTLED:
            self._seconds.append(seconds)
            self._tokens.append(tokens)

    def rate(self) -> float:
        """Returns tokens per second. The median ignores a step that something else delayed."""
        return fmean(self._tokens) / max(median(self._seconds), 1e-9)


class _Trial:
    """A trial for a number of rows, and its result."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._with_drafts, self._without = _Half(), _Half()
        self._steps_left = _VALID
        self._won = True

    def wants_drafts(self) -> bool:
        """Returns whether the next step should have drafts."""
        return not self._with_drafts.over or (self._without.over and self._won)

    def add(self, drafted: bool, seconds: float, tokens: int) -> None:
        half = self._with_drafts if drafted else self._without
        if self._with_drafts.over and self._without.over:
            self._steps_left -= 1
            if not self._steps_left:
                self._begin()
        # Steps without drafts count only after those with: contexts are about as long then.
        elif not half.over and (drafted or self._with_drafts.over):
            half.add(seconds, tokens)
            if self._without.over:
                self._won = self._with_drafts.rate() > self._without.rate()


class Trials:
    """Trials by number of rows: each power of two has its own."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}
        self._previous: tuple[int, bool] | None = None
        self._planned_at = 0.0
        self._tokens = 0

    def wants_drafts(self, rows: int, gain: float) -> bool:
        """Returns whether a step should have drafts.

        Args:
            gain: expected speed, divided by that of a step without drafts.
        """
        if gain >= _CERTAIN:
            return True
        trial = self._trials.get(rows.bit_length())
        return trial is None or trial.wants_drafts()

    def verified(self, tokens: int) -> None:
        """Takes in the tokens that the rows of a step with drafts gave."""
        self._tokens += tokens

    def plan(self, rows: int, *, drafted: bool, gain: float, prompts: bool, now: float) -> None:
        """Takes in a step that is planned. The time between two plans is that of a step.

        Args:
            rows: generating rows.
            gain: expected speed of the last choice; see `wants_drafts`.
            prompts: whether the step has prompt tokens. Such steps are not compared.
            now: in seconds.
        """
        step = None if prompts or not rows or gain >= _CERTAIN else (rows.bit_length(), drafted)
        if step is not None and step == self._previous:
            trial = self._trials.setdefault(step[0], _Trial())
            tokens = self._tokens if drafted else rows
            trial.add(drafted, now - self._planned_at, tokens)
        self._previous, self._planned_at, self._tokens = step, now, 0
