"""Trials of small gains: drafts that take longer than estimated are dropped after some steps."""

from __future__ import annotations

from quire.features.speculation.trials import Trials

ROWS = 200


class Device:
    """Runs steps of `ROWS` rows.

    Args:
        seconds: of a step with drafts; one without takes a second.
        tokens: of a step with drafts.
    """

    def __init__(self, seconds: float, tokens: int, gain: float = 1.1) -> None:
        self.trials = Trials()
        self.drafted = self.steps = 0
        self._seconds, self._tokens, self._gain, self._now = seconds, tokens, gain, 0.0

    def run(self, steps: int, prompts: bool = False) -> float:
        """Returns the share of steps with drafts."""
        before = self.drafted
        for _ in range(steps):
            drafted = self.trials.wants_drafts(ROWS, self._gain)
            gain = self._gain if drafted else 1.0
            self.trials.plan(ROWS, drafted=drafted, gain=gain, prompts=prompts, now=self._now)
            if drafted:
                self.trials.verified(self._tokens)
            self._now += self._seconds if drafted else 1.0
            self.drafted += drafted
        return (self.drafted - before) / steps


def test_a_gain_that_is_a_loss_is_dropped() -> None:
    device = Device(seconds=1.2, tokens=220)
    device.run(100)
    assert device.run(400) == 0.0
    # A second trial comes after some time.
    assert 0.0 < device.run(2000) < 0.05


def test_a_gain_that_is_real_is_kept() -> None:
    device = Device(seconds=1.0, tokens=220)
    device.run(100)
    assert device.run(400) == 1.0
    assert 0.95 < device.run(2000) < 1.0


def test_one_slow_step_decides_nothing() -> None:
    device = Device(seconds=1.0, tokens=220)
    device.run(10)
    device._now += 100.0
    device.run(90)
    assert device.run(100) == 1.0


def test_large_gains_need_no_trial() -> None:
    assert Device(seconds=9.0, tokens=400, gain=2.0).run(500) == 1.0


def test_steps_with_prompts_are_not_compared() -> None:
    assert Device(seconds=9.0, tokens=220).run(500, prompts=True) == 1.0


def test_other_numbers_of_rows_have_trials_of_their_own() -> None:
    device = Device(seconds=1.2, tokens=220)
    device.run(100)
    assert not device.trials.wants_drafts(ROWS, 1.1)
    assert device.trials.wants_drafts(ROWS // 4, 1.1)
