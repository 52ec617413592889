"""Measures the times of steps at the start, and decides how many drafts pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from quire.arrays import Int32, int32
from quire.executor import StepSeconds
from quire.runner.hooks.hook import Level
from quire.runner.program import BodyShape, CapturedPrograms, HeadShape, StepProgram

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CPU_SIZES = (1, 2, 4, 8, 16)
_RUNS, _AT_ONCE = 3, 4


@torch.inference_mode()
def measure_steps(
    program: StepProgram,
    graphs: CapturedPrograms | None,
    others: Mapping[str, Mapping[int, Callable[[], None]]],
) -> StepSeconds:
    """Returns the seconds of decode steps by rows, of verifying steps by tokens, and of `others` by
    name and size.

    The steps have no real rows, so attention takes almost no time. That is fair, because it takes
    the same time with drafts as without. All stages of a pipeline run the same steps, and the last
    stage's times count.

    Args:
        graphs: captured programs, which are replayed if there are any.
    """
    state = program.bound.state
    device, limits = state.device, state.limits
    found: StepSeconds = {"decode": {}, "verify": {}}
    longest = {"decode": 1, "verify": 2}
    largest = min(limits.logit_rows, limits.tokens)
    # A CPU measures fewer sizes: it is slower, and larger sizes take proportionally longer. All
    # ranks must measure the same sizes.
    sizes = (*_SIZES, largest) if device.type == "cuda" else _CPU_SIZES
    for size in sorted({min(size, largest) for size in sizes}):
        for kind, most in longest.items():
            if size <= (limits.lanes if kind == "decode" else largest):
                run = _step(program, graphs, size, most)
                found[kind][size] = _seconds(run, device)
    for name, runs in others.items():
        found[name] = {size: _seconds(run, device) for size, run in runs.items()}
    return found


def _step(
    program: StepProgram, graphs: CapturedPrograms | None, size: int, longest: int
) -> Callable[[], None]:
    """Returns a function that runs a body and a plain head of `size` tokens."""
    rows = size if longest == 1 else max(1, min(size // 2, program.bound.state.limits.lanes))
    heads = program.model.gives_logits
    body = head = None
    if graphs is not None:
        body = graphs.body(BodyShape(size, rows, longest))
        head = graphs.head(size, Level.PLAIN) if heads else None

    def run() -> None:
        # All stages of a pipeline must run the same body, the earlier ones without a head.
        if graphs is None or body is None:
            program.body(BodyShape(size, 0, longest))
        else:
            graphs.replay(body)
        if graphs is not None and head is not None:
            graphs.replay(head)
        elif heads:
            program.head(HeadShape(size, Level.PLAIN))

    return run


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs, after a warm-up. On a GPU several calls
    are launched without a wait between them, as steps are."""
    run()
    best, at_once = float("inf"), _AT_ONCE if device.type == "cuda" else 1
    for _ in range(_RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(at_once):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - begun) / at_once)
    return best


# Chooses how many drafts each row verifies, so that the step gives the most tokens per second.

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

_MARGIN = 1.02
"""Drafts must make a step faster by this factor, because measurements and estimates are inexact."""
_PRIOR = 0.6
"""Assumed acceptance probability of a source without results."""
_PRIOR_WEIGHT = 4.0
_FADE, _LANE_FADE = 0.998, 0.9
"""Factors by which the weight of earlier results falls: with each step, and with each verified row
of a lane."""


class StepCosts:
    """Estimates the seconds of steps by measurements. Without measurements drafts cost nothing."""

    def __init__(self, seconds: StepSeconds) -> None:
        self._decode = _Table(seconds.get("decode", {}))
        self._verify = _Table(seconds.get("verify", {}))
        self._draft = _Table(seconds.get("draft", {}))
        self._first = _Table(seconds.get("first", {}))

    def decode(self, rows: int) -> float:
        """Returns the seconds of a step of `rows` rows without drafts."""
        return float(self._decode(np.array([rows]))[0])

    def verify(self, tokens: Any) -> Floats:
        """Returns the seconds of verifying steps, float64 [n].

        Args:
            tokens: tokens of each step, drafts included, int [n].
        """
        return self._verify(tokens)

    def draft(self, rows: int, depths: Any) -> Floats:
        """Returns the seconds for making drafts on the device for `rows` rows, float64 [n].

        Args:
            depths: drafts for each row, int [n].
        """
        first = self._first(np.array([rows]), 0.0)[0]
        each = self._draft(np.array([rows]), 0.0)[0]
        found: Floats = np.where(depths > 0, first + (depths - 1) * each, 0.0) * (rows > 0)
        return found


class _Table:
    """Seconds by size. A size takes as long as the next larger measured size. Beyond the largest
    one, times are proportional to the size."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self._sizes = np.array(sorted(seconds), dtype=np.int64)
        ordered = [seconds[size] for size in sorted(seconds)]
        # A smaller size is never slower. A measurement to the contrary was disturbed.
        self._seconds = np.minimum.accumulate(np.array(ordered[::-1], dtype=np.float64))[::-1]

    def __call__(self, sizes: Any, nothing: float = 1.0) -> Floats:
        """Returns seconds for sizes, float64 [n]. nothing: the result without measurements."""
        if not len(self._sizes):
            return np.full(len(sizes), nothing)
        place = np.searchsorted(self._sizes, sizes)
        beyond = np.maximum(sizes / self._sizes[-1], 1.0)
        found: Floats = self._seconds[np.minimum(place, len(self._sizes) - 1)] * beyond
        return found


class AcceptanceRates:
    """The probability that a draft is accepted if the drafts before it are, by kind and lane.

    A lane's own results count most, then the recent results of the kind.

    Args:
        kinds: Number of kinds of drafts.
        lanes: Number of lanes.
    """

    def __init__(self, kinds: int, lanes: int) -> None:
        self._tried = np.zeros(kinds)
        self._held = np.zeros(kinds)
        self._lane_tried = np.zeros((kinds, lanes))
        self._lane_held = np.zeros((kinds, lanes))

    def forget(self, lanes: Int32) -> None:
        """Resets lanes that got another request."""
        self._lane_tried[:, lanes] = 0.0
        self._lane_held[:, lanes] = 0.0

    def add(self, kinds: Int32, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        """Takes in the results of a step's rows, int32 [n] each.

        Args:
            drafts: number of drafts of each row.
            accepted: number of accepted drafts of each row.
        """
        tried = np.minimum(accepted + 1, drafts)
        self._tried = self._tried * _FADE + np.bincount(kinds, tried, len(self._tried))
        self._held = self._held * _FADE + np.bincount(kinds, accepted, len(self._held))
        places = kinds, lanes
        self._lane_tried[places] = self._lane_tried[places] * _LANE_FADE + tried
        self._lane_held[places] = self._lane_held[places] * _LANE_FADE + accepted

    def fade(self) -> None:
        """Reduces the weight of earlier results after a step without drafts. So a source with bad
        results is tried again after some time."""
        self._tried *= _FADE
        self._held *= _FADE

    def of_kinds(self) -> Floats:
        """Returns the probability of each kind, float64 [kinds]."""
        found: Floats = (self._held + _PRIOR_WEIGHT * _PRIOR) / (self._tried + _PRIOR_WEIGHT)
        return found

    def of(self, kinds: Int32, lanes: Int32) -> Floats:
        """Returns the probability for rows, float64 [n]."""
        places = kinds, lanes
        held = self._lane_held[places] + _PRIOR_WEIGHT * self.of_kinds()[kinds]
        found: Floats = held / (self._lane_tried[places] + _PRIOR_WEIGHT)
        return np.minimum(found, 0.995)


class Choice:
    """The numbers of drafts of a step's rows.

    Attributes:
        counts: drafts of each row, int32 [n].
        gain: expected speed, divided by that of a step without drafts.
    """

    __slots__ = ("counts", "gain")

    def __init__(self, counts: Int32, gain: float = 1.0) -> None:
        self.counts, self.gain = counts, gain


def may_pay(costs: StepCosts, rows: int, best: float, room: int) -> bool:
    """Returns whether drafts could pay if making them cost nothing.

    Args:
        rows: number of rows.
        best: probability that a draft is accepted.
        room: most drafts of a row.
    """
    if not rows or not room:
        return False
    depth = np.arange(1, room + 1)
    given = rows * (1.0 + np.cumsum(best**depth))
    rates = given / costs.verify(int32(rows * (1 + depth)))
    few = (rows + best) / costs.verify(int32([rows + 1]))[0]
    return max(float(rates.max()), float(few)) > _MARGIN * rows / costs.decode(rows)


def choose(costs: StepCosts, chance: Floats, modelled: Flags, room: Int32) -> Choice:
    """Returns how many drafts each of a step's rows verifies.

    It sorts all drafts by their expected gain, and takes as many as give the step the most tokens
    per second. Drafts of a model also cost its passes: as many as the longest row has drafts. So it
    tries each limit of drafts per row.

    Args:
        costs: Seconds of a step and of its drafts.
        chance: Probability that a draft of the row is accepted, float64 [n]; 0: no drafts.
        modelled: Rows with drafts from a model, bool [n].
        room: Most drafts of each row, int32 [n].
    """
    rows, most = len(chance), int(room.max(initial=0))
    none = Choice(np.zeros(rows, dtype=np.int32))
    plain = rows / costs.decode(rows) if rows else 0.0
    if not most:
        return none
    place = np.arange(1, most + 1)
    gains = np.where(place <= room[:, None], chance[:, None] ** place, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")
    order = order[gains[order] > 0.0]
    gains, owner, place = gains[order], order // most, order % most
    by_model = modelled[owner]
    depths = np.arange(most + 1 if by_model.any() else 1)
    taken = ~by_model | (place < depths[:, None])
    count = taken.cumsum(axis=1)
    given = rows + (gains * taken).cumsum(axis=1)
    verifying = costs.verify(rows + np.arange(len(gains) + 1))
    passes = costs.draft(int(modelled.sum()), depths)
    rates = np.where(count > 0, given / (verifying[count] + passes[:, None]), 0.0)
    if not rates.size or rates.max() <= _MARGIN * plain:
        return none
    depth, last = np.unravel_index(rates.argmax(), rates.shape)
    chosen = owner[: last + 1][taken[depth, : last + 1]]
    return Choice(int32(np.bincount(chosen, minlength=rows)), float(rates.max()) / plain)
