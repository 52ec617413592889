"""A step's results on their way to the host, which reads them late."""

from __future__ import annotations

import time
from typing import Any

import torch

from quire.arrays import int32
from quire.plan import Pooled, RowFlag, StepResult
from quire.runner.step import Step, join


def mark(device: torch.device) -> Any:
    """A point in time on the device, an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def read_back(step: Step, device: torch.device) -> None:
    """Starts the copies to the host that `result` will wait for."""
    step.results = _to_host(step.results, device)
    for part in (*step.logprobs, *step.prompt_logprobs):
        for name in ("positions", "ids", "values", "ranks"):
            setattr(part, name, _to_host(getattr(part, name), device))
    if step.pooled is not None:
        step.pooled.values = _to_host(step.pooled.values, device)
    step.hidden = None
    step.done = mark(device)


def _to_host(x: Any, device: torch.device) -> Any:
    if device.type != "cuda":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def result(step: Step, device: torch.device) -> StepResult:
    """Waits for the copies."""
    if device.type == "cuda":
        step.done.synchronize()
        gpu_us = step.started.elapsed_time(step.done) * 1e3
    else:
        gpu_us = (step.done - step.started) * 1e6
    pooled = step.pooled
    sampled = (step.plan.flags & RowFlag.SAMPLE) != 0
    return StepResult(
        step_id=step.plan.step_id,
        tokens=step.tokens.numpy().reshape(-1, 1),
        n_tokens=int32(sampled),
        stop_reason=step.stop_reason.numpy(),
        logprobs=join(step.logprobs),
        prompt_logprobs=join(step.prompt_logprobs),
        pooled=None if pooled is None else Pooled(pooled.rows, pooled.values.numpy()),
        gpu_us=gpu_us,
    )
