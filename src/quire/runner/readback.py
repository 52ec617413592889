"""A step in flight, and its results on their way to the host, which reads them late."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32
from quire.plan import RowFlag, StepPlan, StepResult


@dataclass(slots=True)
class Step:
    """A plan whose programs are launched, or about to be.

    logit_start: int32 [R + 1] on the host, where the logit rows of each row begin.
    waits: the head is yet to be launched: its masks have not come, and the device cannot wait.
    notes: what hooks remember of the step until they read its results.
    result: for hooks to add to, once the step is done.
    """

    plan: StepPlan
    device: torch.device
    logit_start: Int32
    waits: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    result: StepResult = field(init=False)
    _sent: dict[str, Tensor] = field(default_factory=dict)
    _started: Any = None
    _done: Any = None

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> Step:
        """Begins a step, whose time counts from now."""
        step = cls(plan, device, logit_starts(plan))
        step._started = step._mark()
        return step

    def send(self, name: str, values: Tensor) -> None:
        """Starts a copy to the host, which `arrived` gives once the step is done."""
        if self.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._sent[name] = host.copy_(values, non_blocking=True)
        else:
            self._sent[name] = values.clone()

    def arrived(self, name: str) -> Tensor | None:
        """Returns what was sent under a name, None if nothing was."""
        return self._sent.get(name)

    def launched(self) -> None:
        """Marks the end of the step on the device."""
        self._done = self._mark()

    def wait(self) -> None:
        """Waits until all that was sent has arrived, and begins `result`."""
        rows = self.plan.num_rows
        if self.device.type == "cuda":
            self._done.synchronize()
            gpu_us = self._started.elapsed_time(self._done) * 1e3
        else:
            gpu_us = (self._done - self._started) * 1e6
        lines = self.arrived("results")
        found = np.empty((0, 3), np.int32) if lines is None else lines.numpy()
        if len(found) < rows:
            # Rows without logits only move on.
            found = np.full((rows, 3), -1, dtype=np.int32)
            found[:, :2] = 0
        self.result = StepResult(
            step_id=self.plan.step_id,
            tokens=found[:rows, 2:],
            n_tokens=found[:rows, 0],
            stop_reason=found[:rows, 1],
            gpu_us=gpu_us,
        )

    def _mark(self) -> Any:
        """Returns a point in time on the device, an event on a GPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def logit_starts(plan: StepPlan) -> Int32:
    """Returns where the logit rows of each row begin, int32 [R + 1].

    A generating row has one for each of its tokens, a PROMPT row one if it samples: what it needs
    besides, for its prompt's log-probabilities, is no part of the head.
    """
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
    np.cumsum(np.where(prompt, samples, plan.n_logits), out=starts[1:])
    return starts
