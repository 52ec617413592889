"""Benchmark of the scheduler: the CPU time to plan a step and to process its result.

Results are made up without an executor, so only `Scheduler.plan` and `Scheduler.update` are timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.arrays import Int32
from quire.config import SchedulerConfig
from quire.executor import Capacity
from quire.plan import KVGroup, StepPlan, StepResult, StopReason
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler import Scheduler

TARGETS_AT_256 = {"plan_us": 100.0, "update_us": 150.0}
"""Targets of a steady decode step of 256 requests, in microseconds."""

_BLOCK = 16
_PARAMS = SamplingParams(max_tokens=None)


class _SchedulerBench:
    """A scheduler with `running` generating requests, whose positions in a block are spread
    evenly."""

    def __init__(self, running: int, num_blocks: int, seed: int, room: int) -> None:
        self._random = np.random.default_rng(seed)
        self._room = room
        self._made = 0
        group = KVGroup(layers=(0,), tokens_per_block=_BLOCK)
        config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=1 << 16,
            max_model_len=room + 1024,
        )
        began = time.perf_counter()
        self.scheduler = Scheduler(config, Capacity((group,), (num_blocks,)))
        self.create_us = (time.perf_counter() - began) * 1e6
        for _ in range(running):
            self.add()
        while any(not r.generating for r in self.requests.values()):
            self.step(np.zeros(0, dtype=np.int32))

    @property
    def requests(self) -> dict[str, Request]:
        return self.scheduler._requests

    def add(self) -> None:
        """Adds a request with 64 to 511 prompt tokens that no other request shares."""
        self._made += 1
        length = int(self._random.integers(64, 512))
        prompt: Int32 = self._random.integers(0, 32_000, length, dtype=np.int32)
        name = f"request-{self._made}"
        self.scheduler.add(Request(name, prompt, _PARAMS, max_total=length + self._room))

    def answer(self, plan: StepPlan, stopping: Int32) -> StepResult:
        """Returns a result with a token for each row. The rows `stopping` end."""
        rows = plan.num_rows
        stop = np.zeros(rows, dtype=np.int32)
        stop[stopping] = StopReason.STOP_TOKEN
        return StepResult(
            step_id=plan.step_id,
            tokens=self._random.integers(0, 32_000, (rows, 1), dtype=np.int32),
            n_tokens=((plan.flags & 2) > 0).astype(np.int32),
            stop_reason=stop,
        )

    def step(self, stopping: Int32) -> tuple[float, float]:
        """Runs one step. Returns the microseconds of plan and of update."""
        clock: Callable[[], int] = time.perf_counter_ns
        began = clock()
        plan = self.scheduler.plan()
        planned = clock()
        if plan is None:
            raise RuntimeError("the benchmark's scheduler has nothing to do")
        result = self.answer(plan, stopping)
        answered = clock()
        self.scheduler.update(result)
        return (planned - began) / 1e3, (clock() - answered) / 1e3


def steady(running: int, *, num_blocks: int, steps: int, seed: int = 0) -> dict[str, float]:
    """Measures decode steps in which no request arrives or ends.

    Each time is a mean over as many steps as a block has tokens, so each request crosses one block
    boundary. The result has the best mean, because the machine may be shared, and the median."""
    bench = _SchedulerBench(running, num_blocks, seed, steps + 4 * _BLOCK)
    nobody = np.zeros(0, dtype=np.int32)
    for _ in range(_BLOCK):
        bench.step(nobody)
    times = np.array([bench.step(nobody) for _ in range(steps // _BLOCK * _BLOCK)])
    means = times.reshape(-1, _BLOCK, 2).mean(axis=1)
    best, middle = means.min(axis=0), np.median(means, axis=0)
    return {
        "running": running,
        "plan_us": float(best[0]),
        "update_us": float(best[1]),
        "plan_median_us": float(middle[0]),
        "update_median_us": float(middle[1]),
        "create_us": bench.create_us,
    }


def changing(
    running: int, change: int, *, num_blocks: int, steps: int, seed: int = 0
) -> dict[str, float]:
    """Measures steps in each of which `change` requests end and as many arrive.

    `change_us` is the time of one request's arrival, prompt and end in addition to a steady
    step."""
    bench = _SchedulerBench(running, num_blocks, seed, 10 * steps + 4 * _BLOCK)
    nobody = np.zeros(0, dtype=np.int32)
    calm = np.array([sum(bench.step(nobody)) for _ in range(4 * _BLOCK)])
    busy = []
    for _ in range(steps // _BLOCK * _BLOCK):
        began = time.perf_counter_ns()
        for _ in range(bench.scheduler._config.max_num_seqs - len(bench.requests)):
            bench.add()
        added = (time.perf_counter_ns() - began) / 1e3
        busy.append(added + sum(bench.step(np.arange(change, dtype=np.int32))))
    calm_us = float(calm.reshape(-1, _BLOCK).mean(axis=1).min())
    busy_us = float(np.array(busy).reshape(-1, _BLOCK).mean(axis=1).min())
    return {"running": running, "changed": change, "change_us": (busy_us - calm_us) / change}


def run(
    running: Sequence[int] = (1, 64, 256, 1024),
    *,
    num_blocks: int = 1_000_000,
    steps: int = 480,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Returns metrics for each number of running requests. Times are in microseconds.

    With 256 running requests, `within_target` is 1 if plan and update meet `TARGETS_AT_256`, else
    0.
    """
    records: list[dict[str, float]] = []
    for count in running:
        # A garbage collection would count as time of the step during which it happens.
        gc.collect()
        gc.disable()
        try:
            record: dict[str, float] = {"num_blocks": num_blocks}
            record |= steady(count, num_blocks=num_blocks, steps=steps, seed=seed)
            change = max(1, count // 16)
            record |= changing(count, change, num_blocks=num_blocks, steps=steps // 4, seed=seed)
        finally:
            gc.enable()
        if count == 256:
            met = all(record[name] <= limit for name, limit in TARGETS_AT_256.items())
            record["within_target"] = float(met)
        records.append(record)
    return records


def table(records: Sequence[dict[str, float]]) -> str:
    """Returns the records of `run` as text."""
    lines = [f"{'running':>8} {'plan µs':>9} {'update µs':>10} {'µs per changed request':>23}"]
    for r in records:
        lines.append(
            f"{r['running']:>8.0f} {r['plan_us']:>9.1f} {r['update_us']:>10.1f} "
            f"{r['change_us']:>23.1f}"
        )
        if "within_target" in r:
            limits = ", ".join(f"{k[:-3]} {v:.0f} µs" for k, v in TARGETS_AT_256.items())
            lines.append(f"         target {limits}: {'met' if r['within_target'] else 'missed'}")
    return "\n".join(lines)
