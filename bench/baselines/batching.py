"""Ways to serve requests without an engine: alone, in static batches, in slots of one cache.

Time is the device's and the host's work alone: where nothing has arrived yet, the clock jumps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from plain_model import PlainModel
from torch import Tensor

T = TypeVar("T")


@dataclass
class Job:
    """A request for `length` tokens after a prompt.

    Attributes:
        arrival: in seconds.
        output: generated tokens.
        times: seconds at which each token arrived.
    """

    prompt: list[int]
    length: int
    arrival: float = 0.0
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.prompt) + self.length


class Clock:
    """Adds up the seconds of the functions that it runs.

    With a single computing thread it counts this process's own CPU time, because other programs on
    the machine do not change that.

    Args:
        limit: seconds of real time after which it refuses to run more.
    """

    def __init__(self, device: torch.device, limit: float = math.inf) -> None:
        self.now = 0.0
        self._device = device
        self._limit, self._end = limit, time.monotonic() + limit
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._time = time.process_time if alone else time.perf_counter

    def run(self, work: Callable[[], T], *, settle: bool = True) -> T:
        """Runs a piece of work.

        Args:
            settle: wait for all that the device has been given; an engine launches ahead.

        Raises:
            TimeoutError: the limit has passed.
        """
        if time.monotonic() > self._end:
            raise TimeoutError(f"not done within {self._limit:.0f} s")
        began = self._time()
        found = work()
        if settle and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.now += self._time() - began
        return found

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


def naive(model: PlainModel, jobs: Sequence[Job], clock: Clock) -> None:
    """Computes the whole text again for each token, one request after the other."""
    for job in jobs:
        clock.wait_until(job.arrival)
        text = list(job.prompt)
        for _ in range(job.length):
            ids = torch.tensor([text], device=model.device)
            positions = torch.arange(len(text), device=model.device).unsqueeze(0)
            token = int(clock.run(lambda ids=ids, at=positions: model.step(ids, at)))
            text.append(token)
            job.output.append(token)
            job.times.append(clock.now)


def cached(model: PlainModel, jobs: Sequence[Job], clock: Clock) -> None:
    """Keeps keys and values, one request after the other."""
    static(model, jobs, clock, size=1)


def static(
    model: PlainModel,
    jobs: Sequence[Job],
    clock: Clock,
    *,
    size: int,
    window: float | None = None,
) -> None:
    """Pads `size` requests on the left to one length and decodes until the longest is done.

    window: seconds after a batch's first arrival at which it starts with whoever is there; None:
    it waits until it is full.
    """
    left = list(jobs)
    while left:
        batch = left[:size]
        if window is not None:
            closes = max(clock.now, left[0].arrival + window)
            batch = [job for job in batch if job.arrival <= closes]
            full = len(batch) == size
            clock.wait_until(batch[-1].arrival if full else closes)
        clock.wait_until(batch[-1].arrival)
        left = left[len(batch) :]
        _run_batch(model, batch, clock)


def _run_batch(model: PlainModel, batch: Sequence[Job], clock: Clock) -> None:
    device, width = model.device, max(len(job.prompt) for job in batch)
    steps = max(job.length for job in batch)
    padding = torch.tensor([width - len(job.prompt) for job in batch], device=device).unsqueeze(1)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
    ids, columns = ids.to(device), torch.arange(width + steps, device=device)
    cache = model.cache(len(batch), width + steps)

    def step(ids: Tensor, first: int) -> Tensor:
        new = columns[first : first + ids.shape[1]].expand(len(batch), -1)
        seen = columns[: first + ids.shape[1]]
        # Padding sees itself, so that no row of the softmax is empty.
        mask = (seen <= new.unsqueeze(2)) & (seen >= torch.minimum(padding, new).unsqueeze(2))
        return model.step(ids, (new - padding).clamp(min=0), cache, new, mask.unsqueeze(1))

    for count in range(steps):
        first = 0 if count == 0 else width + count - 1
        tokens = clock.run(lambda ids=ids, at=first: step(ids, at))
        ids = tokens.unsqueeze(1)
        for job, token in zip(batch, tokens.tolist(), strict=True):
            if count < job.length:
                job.output.append(token)
                job.times.append(clock.now)


def continuous(model: PlainModel, jobs: Sequence[Job], clock: Clock, *, slots: int) -> None:
    """Gives each request a slot with room for the longest one; a slot's next request starts when
    the one before is done, in a pass of its own."""
    left, device = list(jobs), model.device
    cache = model.cache(slots, max(job.total for job in jobs))
    running: list[Job | None] = [None] * slots
    while left or any(running):
        if not any(running):
            clock.wait_until(left[0].arrival)
        for slot in range(slots):
            if running[slot] is None and left and left[0].arrival <= clock.now:
                job = left.pop(0)
                columns = torch.arange(len(job.prompt), device=device).unsqueeze(0)
                ids = torch.tensor([job.prompt], device=device)
                own = cache[:, :, slot : slot + 1]
                token = clock.run(lambda ids=ids, at=columns, own=own: model.step(ids, at, own, at))
                _give(running, slot, job, int(token), clock)
        if any(running):
            _decode(model, cache, running, clock)


def _decode(model: PlainModel, cache: Tensor, running: list[Job | None], clock: Clock) -> None:
    """Makes a token for each slot; those of free slots are lost."""
    last = [0 if job is None else job.output[-1] for job in running]
    lengths = [1 if job is None else len(job.prompt) + len(job.output) for job in running]
    ids = torch.tensor(last, device=model.device).unsqueeze(1)
    columns = torch.tensor(lengths, device=model.device).unsqueeze(1) - 1
    seen = torch.arange(max(lengths), device=model.device)
    mask = (seen <= columns).view(len(running), 1, 1, -1)
    tokens = clock.run(lambda: model.step(ids, columns, cache, columns, mask))
    for slot, token in enumerate(tokens.tolist()):
        job = running[slot]
        if job is not None:
            _give(running, slot, job, token, clock)


def _give(running: list[Job | None], slot: int, job: Job, token: int, clock: Clock) -> None:
    job.output.append(token)
    job.times.append(clock.now)
    running[slot] = job if len(job.output) < job.length else None
