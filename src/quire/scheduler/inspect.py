"""A summary of a scheduler's requests and steps, small enough to be displayed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.arrays import Int32, int32
from quire.request import Request, RequestStatus
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import StepInFlight

_LOOKED_AT = 4096


@dataclass(slots=True)
class StepSummary:
    """A step that was planned, and its last rows.

    Attributes:
        prompt_tokens: tokens of all prompt rows.
        generating: tokens of all generating rows.
        requests: the requests of the rows that are shown.
        lanes: int32 [rows].
        q_len: int32 [rows].
        prompt: bool [rows], whether the row is a prompt's.
    """

    step_id: int
    prompt_tokens: int
    generating: int
    requests: list[Request]
    lanes: Int32
    q_len: Int32
    prompt: np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(slots=True)
class SchedulerSummary:
    """Some of a scheduler's requests, and its last steps.

    Attributes:
        running: requests, with the number of blocks that they hold in the first KV group.
        waiting: queued or parked requests.
        step: the last step.
        prompt_step: the last step that computed a part of a prompt.
    """

    running: list[tuple[Request, int]]
    waiting: list[Request]
    step: StepSummary | None
    prompt_step: StepSummary | None


def summarize(scheduler: Scheduler, running: int, waiting: int, rows: int) -> SchedulerSummary:
    """Returns a summary, in time that does not grow with the number of requests.

    Args:
        running: most running requests.
        waiting: most waiting requests.
        rows: most rows of a step.
    """
    tables = scheduler.blocks.groups[0]
    summary = SchedulerSummary(
        [], [], _step(scheduler.last_step, rows), _step(scheduler.last_prompt_step, rows)
    )
    for request in islice(scheduler.requests(), _LOOKED_AT):
        if request.status is not RequestStatus.RUNNING:
            if len(summary.waiting) < waiting:
                summary.waiting.append(request)
        elif len(summary.running) < running:
            held = int(tables.end[request.lane] - tables.start[request.lane])
            summary.running.append((request, held))
        if len(summary.waiting) == waiting and len(summary.running) == running:
            break
    return summary


def _step(step: StepInFlight | None, rows: int) -> StepSummary | None:
    if step is None:
        return None
    split, count = step.num_generating, len(step.requests)
    # Prompt rows come last and matter most, so surplus generating rows are left out.
    first = max(0, count - rows)
    return StepSummary(
        step.step_id,
        int(step.q_len[split:].sum()),
        int(step.q_len[:split].sum()),
        step.requests[first:],
        int32(step.lanes[first:]),
        int32(step.q_len[first:]),
        np.arange(first, count) >= split,
    )
