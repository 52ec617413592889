"""The causes to which the time of requests goes, from arrival to end."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from quire.arrays import Int32
from quire.request import Request
from quire.scheduler.lanes import Flags
from quire.scheduler.step import StepInFlight

QUEUE = "queue"
"""Waits for its turn, a lane or blocks."""
SIBLING = "sibling"
"""Waits for the prompt that it shares with its leader."""
KV = "kv"
"""Waits for blocks from a lower tier or from another engine."""
PREEMPTED = "preempted"
"""Waits and computes again after a preemption."""
PREFILL = "prefill"
"""Computes its prompt, up to its first token."""
DECODE = "decode"
"""Generates."""
PROMPTS = "prompts"
"""Waits because its steps also compute other prompts."""
INPUTS = "inputs"
"""Sits steps out because its inputs from the host, such as masks, are late."""

_WEIGHT = 0.1
"""Weight of the latest step in the time of a typical one."""


class DelayClock:
    """Divides the time of each request among causes (`RequestTimes.delays`).

    A request has one phase at a time, and the clock adds the phase's seconds to its cause when the
    phase ends. While a request has a lane, two arrays hold the seconds that its phase lost to other
    prompts and to late inputs. So a step without prompts and late rows costs no work per request.

    A step that also computes prompts costs its generating rows what it takes beyond a typical step
    without prompts. A prompt loses to the other prompts of its steps their share of the tokens.

    Attributes:
        totals: seconds by cause, of all requests.
    """

    def __init__(self, num_lanes: int) -> None:
        self.totals: dict[str, float] = {}
        self._launches = deque[tuple[float, int, int]]()
        self._last_result = 0.0
        self._typical = 0.0
        self._prompts = np.zeros(num_lanes)
        self._inputs = np.zeros(num_lanes)
        self._late_since = np.zeros(num_lanes)
        self._any_late = False

    def enter(self, request: Request, phase: str) -> None:
        """Ends a request's phase and begins another. With "" the request has ended."""
        self.settle(request)
        request.times.phase = phase

    def settle(self, request: Request) -> None:
        """Adds the seconds of a request's phase so far to their causes."""
        times, now = request.times, time.monotonic()
        seconds, times.phase_began = now - times.phase_began, now
        if not times.phase:
            return
        if request.lane >= 0:
            lane = request.lane
            if self._late_since[lane]:
                self._inputs[lane] += now - self._late_since[lane]
                self._late_since[lane] = 0.0
            for cause, lost in ((INPUTS, self._inputs), (PROMPTS, self._prompts)):
                part = min(float(lost[lane]), seconds)
                lost[lane] = 0.0
                if part:
                    self._add(times.delays, cause, part)
                    seconds -= part
        self._add(times.delays, times.phase, seconds)

    def _add(self, delays: dict[str, float], cause: str, seconds: float) -> None:
        for each in (delays, self.totals):
            each[cause] = each.get(cause, 0.0) + seconds

    def launched(self, step: StepInFlight) -> None:
        """Records that a step is about to be launched."""
        prompts = sum(chunk.length for chunk in step.chunks)
        tokens = int(step.q_len.sum()) if prompts else 0
        self._launches.append((time.monotonic(), prompts, tokens))

    def result(self, step: StepInFlight, late: Flags) -> None:
        """Records the result of the oldest step.

        Args:
            step: the rows whose requests still run.
            late: bool [R], which of them were late.
        """
        now = time.monotonic()
        launched, prompts, tokens = self._launches.popleft()
        seconds = now - max(launched, self._last_result)
        self._last_result = now
        if prompts:
            self._share_prompts(step, seconds, prompts, tokens)
        elif self._typical:
            self._typical += _WEIGHT * (seconds - self._typical)
        else:
            self._typical = seconds
        if self._any_late or late.any():
            self._note_late(step.lanes, late, now)

    def _share_prompts(self, step: StepInFlight, seconds: float, prompts: int, tokens: int) -> None:
        """Charges a step's prompts to its other rows.

        Args:
            prompts: tokens of all prompt rows.
            tokens: tokens of all rows.
        """
        generating = step.num_generating
        more = seconds - self._typical if self._typical else seconds * prompts / tokens
        self._prompts[step.lanes[:generating]] += max(more, 0.0)
        others = (prompts - step.q_len[generating:]) / tokens
        self._prompts[step.lanes[generating:]] += seconds * others

    def _note_late(self, lanes: Int32, late: Flags, now: float) -> None:
        """Charges the time from late results to the next ones."""
        came, missed = lanes[~late], lanes[late]
        since = self._late_since[came]
        self._inputs[came] += np.where(since > 0, now - since, 0.0)
        self._late_since[came] = 0.0
        self._late_since[missed] = np.where(
            self._late_since[missed] > 0, self._late_since[missed], now
        )
        self._any_late = bool(self._late_since.any())
