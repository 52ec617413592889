"""Records an `LLM`'s steps at its executor, and sums them up.

While the engine runs, recording only keeps references. Everything is computed afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.arrays import Int32
from quire.executor import Answered, Asked, Capacity, Executor, WorkerCall
from quire.input_memory import InputMemory
from quire.plan import KVGroup, RowFlag, StepPlan, StepResult
from quire.tools.bench.work import Ceilings, ModelWork

if TYPE_CHECKING:
    from quire.llm import LLM

_NONE: Int32 = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class SeenStep:
    """A recorded step.

    Attributes:
        plan: the step's plan.
        used: number of blocks of each KV group that requests held after the step was planned.
        n_tokens: int32 [R], number of tokens that each row produced.
        gpu_us: time on the device, in µs.
        collected: when the result was collected, by `time.perf_counter`.
    """

    plan: StepPlan
    used: Sequence[int]
    n_tokens: Int32 = field(default_factory=lambda: _NONE)
    gpu_us: float = 0.0
    collected: float = 0.0


class StepRecorder:
    """An executor that forwards all calls to another executor and records the steps."""

    def __init__(self, inner: Executor, used_blocks: Callable[[], Sequence[int]]) -> None:
        self.inner = inner
        self._used_blocks = used_blocks
        self._open: deque[SeenStep] = deque()
        self._done: list[SeenStep] = []

    def take(self) -> list[SeenStep]:
        """Returns the steps since the last call, in order."""
        done, self._done = self._done, []
        return done

    def start(self) -> Capacity:
        return self.inner.start()

    def submit(self, plan: StepPlan) -> None:
        self.inner.submit(plan)
        self._open.append(SeenStep(plan, self._used_blocks()))

    def host_inputs(self) -> InputMemory:
        return self.inner.host_inputs()

    def collect(self) -> StepResult:
        result = self.inner.collect()
        step = self._open.popleft()
        step.n_tokens, step.gpu_us = result.n_tokens, result.gpu_us
        step.collected = time.perf_counter()
        self._done.append(step)
        return result

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        return self.inner.call(call, request)

    def shutdown(self) -> None:
        self.inner.shutdown()


def watch(llm: LLM) -> StepRecorder:
    """Records all steps of `llm` from now on."""
    core = llm._core
    trace = StepRecorder(
        core._executor, lambda: [usage.used for usage in core.scheduler.blocks.usage()]
    )
    core._executor = trace
    return trace


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over one run.

    Attributes:
        steps: number of steps.
        rows: number of rows of all steps.
        gpu_seconds: time on the device from each step's first launch to its end.
        bytes: bytes that the steps must read and write.
        flops: FLOPs that the steps must compute.
        bound_seconds: least time of the steps. A step's least time is the longer one of the times
            for its bytes and for its FLOPs. It is 0 if the device's ceilings are unknown.
        stored: KV bytes that hold tokens, averaged over time.
        allocated: KV bytes of the blocks that hold them, averaged over time.
        reserved: KV bytes if every running request had room for the longest sequence.
    """

    steps: int
    rows: int
    gpu_seconds: float
    bytes: float
    flops: float
    bound_seconds: float
    stored: float
    allocated: float
    reserved: float


class _Lanes:
    """Positions of each lane's request, as the device tracks them: int64 [lanes]."""

    def __init__(self, steps: Sequence[SeenStep]) -> None:
        # The first step may free lanes of requests that ran before.
        used = [lanes for step in steps for lanes in (step.plan.lanes, step.plan.frees)]
        lanes = [int(max(each)) for each in used if len(each)]
        self.positions = np.zeros(max(lanes, default=-1) + 1, dtype=np.int64)
        self.running = np.zeros(len(self.positions), dtype=bool)

    def apply(self, step: SeenStep) -> Int32:
        """Advances the positions by a step. Returns the first position of each row, int32 [R]."""
        plan = step.plan
        self.positions[plan.frees] = 0
        self.running[plan.frees] = False
        for admit in plan.admits:
            self.positions[admit.lane] = admit.computed
            self.running[admit.lane] = True
        first = self.positions[plan.lanes].astype(np.int32)
        prompt = (plan.flags & RowFlag.PROMPT) != 0
        self.positions[plan.lanes] += np.where(prompt, plan.q_len, step.n_tokens)
        return first


def sum_up(
    steps: Sequence[SeenStep],
    began: float,
    work: ModelWork,
    groups: Sequence[KVGroup],
    max_model_len: int,
    limits: Ceilings | None,
) -> StepTotals:
    """Returns the sums of a run that began without running requests.

    Args:
        began: when the run began, by `time.perf_counter`.
    """
    lanes, before = _Lanes(steps), began
    weights, stored, allocated, reserved = [], [], [], []
    bytes_ = flops = bound = 0.0
    per_token = [group.block_bytes / group.tokens_per_block for group in groups]
    for step in steps:
        first = lanes.apply(step)
        more = work.of_step(first, step.plan.q_len, int(step.plan.n_logits.sum()))
        bytes_, flops = bytes_ + more[0], flops + more[1]
        if limits is not None:
            bound += max(more[0] / limits.memory, more[1] / limits.matmul)
        weights.append(max(0.0, step.collected - before))
        before = step.collected
        stored.append(_stored(lanes.positions, groups, per_token))
        held = zip(step.used, groups, strict=True)
        allocated.append(float(sum(used * group.block_bytes for used, group in held)))
        reserved.append(int(lanes.running.sum()) * max_model_len * sum(per_token))
    average = _average(weights)
    return StepTotals(
        steps=len(steps),
        rows=sum(step.plan.num_rows for step in steps),
        gpu_seconds=sum(step.gpu_us for step in steps) / 1e6,
        bytes=bytes_,
        flops=flops,
        bound_seconds=bound,
        stored=average(stored),
        allocated=average(allocated),
        reserved=average(reserved),
    )


def _stored(
    positions: np.ndarray[Any, np.dtype[np.int64]],
    groups: Sequence[KVGroup],
    per_token: Sequence[float],
) -> float:
    total = 0.0
    for group, size in zip(groups, per_token, strict=True):
        kept = positions if group.window is None else np.minimum(positions, group.window)
        total += float(kept.sum()) * size
    return total


def _average(weights: Sequence[float]) -> Callable[[Sequence[float]], float]:
    """Returns a function for the mean with these weights. Without weights the mean is 0."""
    total = sum(weights)
    if not total:
        return lambda values: 0.0
    return lambda values: float(np.dot(weights, values)) / total
