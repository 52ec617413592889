"""Records where a run with schemas spends its time.

`HostRecorder` costs a few µs a step: it reads when masks were built, in whatever process.
`kernel_waits` reads torch's profiler: how long the GPU has waited for masks. `replay` builds the
masks of a finished run once more on one thread, row by row, which tells the cost of each row.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from quire import LLM
from quire.features.structured_output import compiler as compiling
from quire.features.structured_output.compiler import compiler_setup
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.input_memory import DEPTH
from quire.outputs import RequestOutput
from quire.plan import RowFlag, StepPlan
from quire.sampling_params import StructuredOutputsParams

_COLD_US = 30.0
"""A mask is cold if it took this much longer, and twice as long, as at its second visit."""
_WAIT_KERNELS = ("_wait",)
"""Beginnings of the names of kernels that wait for masks."""

now = time.perf_counter


@dataclass(slots=True)
class StepTrace:
    """The host's work for the masks of one step. All times in seconds.

    Attributes:
        rows: rows that needed masks.
        begun: moments at which the masks of the rows were begun.
        placed: moments at which they were in place.
    """

    step_id: int
    rows: int
    begun: list[float]
    placed: list[float]

    @property
    def masks(self) -> float:
        """The time from the first row's begin to the last row's end."""
        return max(self.placed) - min(self.begun)

    @property
    def row(self) -> float:
        """The mean time of a row."""
        return (sum(self.placed) - sum(self.begun)) / len(self.begun)

    @property
    def slowest(self) -> float:
        return max(end - start for start, end in zip(self.begun, self.placed, strict=True))


@dataclass(slots=True)
class RunTrace:
    """The host's work of one run.

    Attributes:
        steps: those that needed masks.
        gpu_us: device time of every step, waits included; wall time on a CPU.
        collected: moment at which each step's result was read.
        compiled: seconds of each compiled grammar, on its thread.
        cpu: seconds that each group of threads spent on a core, by the thread's name.
        threads: number of threads of the process.
    """

    steps: list[StepTrace] = field(default_factory=list)
    gpu_us: list[float] = field(default_factory=list)
    collected: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    threads: int = 0

    def metrics(self) -> dict[str, float]:
        """Returns the sums and percentiles that the table shows."""
        found = {
            "compiles": float(len(self.compiled)),
            "compile_cpu_ms": 1e3 * sum(self.compiled),
            "compile_max_ms": 1e3 * max(self.compiled, default=0.0),
            "threads": float(self.threads),
        }
        periods = 1e6 * np.diff(self.collected)
        found |= _spread("period_us", periods.tolist())
        found |= _spread("device_us", self.gpu_us)
        for name, value in self._of_steps().items():
            found |= _spread(name, value)
        for name, seconds in self.cpu.items():
            found[f"cpu_{name}_ms"] = 1e3 * seconds
        return found

    def _of_steps(self) -> dict[str, list[float]]:
        steps = self.steps
        return {
            "masks_us": [1e6 * step.masks for step in steps],
            "built_row_us": [1e6 * step.row for step in steps],
            "slowest_built_us": [1e6 * step.slowest for step in steps],
            "begin_us": [1e6 * (max(step.begun) - min(step.begun)) for step in steps],
        }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    found = {f"{name}_mean": float(np.mean(values))}
    for percent in (50, 90, 99):
        found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    return found


def _thread_seconds() -> dict[str, float]:
    """Returns the CPU seconds of this process's threads, summed by name."""
    ticks, seconds = os.sysconf("SC_CLK_TCK"), defaultdict[str, float](float)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            text = (task / "stat").read_text()
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            short = "".join(c if c.isalnum() else "_" for c in name.strip()) or "unnamed"
            seconds[short.rstrip("_0123456789")] += (int(fields[11]) + int(fields[12])) / ticks
    return dict(seconds)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


class HostRecorder:
    """Wraps the engine's functions for masks and grammars. One at a time; call `close`.

    Names that the engine does not have are left out, so it works with any version of the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self.trace = RunTrace()
        self._core = llm._core
        self._stack = contextlib.ExitStack()
        self._planned: deque[tuple[int, list[int]]] = deque()
        self._wrap(compiling.Compiler, "_compiled_now", self._compile)
        self._wrap(self._core._executor, "submit", self._submit)
        self._wrap(self._core._executor, "collect", self._collect)
        self._cpu, self._began = _thread_seconds(), now()

    def take(self) -> RunTrace:
        """Returns what was recorded since the last call."""
        trace, self.trace = self.trace, RunTrace()
        cpu = _thread_seconds()
        trace.cpu = {
            name: used
            for name, seconds in cpu.items()
            if (used := seconds - self._cpu.get(name, 0.0)) > 0.0
        }
        self._cpu, trace.threads = cpu, _threads()
        return trace

    def close(self) -> None:
        self._stack.close()

    def _wrap(self, owner: Any, name: str, by: Callable[..., Any], *, static: bool = False) -> None:
        if not hasattr(owner, name):
            return
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return by(inner, *args, **kwargs)

        own = vars(owner).get(name)
        setattr(owner, name, staticmethod(wrapped) if static else wrapped)

        def undo() -> None:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._stack.callback(undo)

    def _compile(self, inner: Any, *args: Any) -> Any:
        began = now()
        try:
            return inner(*args)
        finally:
            self.trace.compiled.append(now() - began)

    def _submit(self, inner: Any, plan: StepPlan) -> Any:
        gated = plan.lanes[(plan.flags & RowFlag.GATED) != 0]
        self._planned.append((plan.step_id, gated.tolist()))
        return inner(plan)

    def _collect(self, inner: Any) -> Any:
        result = inner()
        self.trace.gpu_us.append(result.gpu_us)
        self.trace.collected.append(now())
        step_id, lanes = self._planned.popleft()
        if lanes:
            times = self._core._executor.host_inputs().times[step_id % DEPTH, lanes]
            # A row that was late may still be built.
            times = times[times[:, 1] > self._began]
            if len(times):
                begun, placed = times.T.tolist()
                self.trace.steps.append(StepTrace(step_id, len(lanes), begun, placed))
        return result


def kernel_waits(run: Callable[[], object]) -> dict[str, float]:
    """Profiles a run on a GPU. Returns how long a step's head waits for masks, and for nothing.

    The profiler slows steps by some percent.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities={ProfilerActivity.CUDA}) as profiler:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    )
    waits, periods, idles = list[float](), list[float](), list[float]()
    reached, idle, last = spans[0][0], 0, None
    for start, end, name in spans:
        idle += max(0, start - reached)
        if name.startswith(_WAIT_KERNELS):
            waits.append((end - start) / 1e3)
            if last is not None:
                periods.append((start - last) / 1e3)
                idles.append(idle / 1e3)
            last, idle = start, 0
        reached = max(reached, end)
    if not periods:
        return {}
    found = _spread("profiled_period_us", periods)
    found |= _spread("wait_us", waits) | _spread("idle_us", idles)
    found["wait_percent"] = 100 * sum(waits[1:]) / sum(periods)
    busy = np.array(periods) - np.array(waits[: len(periods)]) - np.array(idles)
    return found | _spread("body_us", busy.tolist())


# The cost of each row's mask.


@dataclass(frozen=True, slots=True)
class Replay:
    """Masks of a run, built on one thread.

    Attributes:
        first: float [requests, tokens], CPU time of each mask in µs.
        second: of the same masks once more.
        compile_ms: of each grammar, alone.
        tables: masks that were put together from string tables.
    """

    first: np.ndarray[Any, np.dtype[np.float64]]
    second: np.ndarray[Any, np.dtype[np.float64]]
    compile_ms: list[float]
    tables: int

    def metrics(self) -> dict[str, float]:
        cold = (self.first - self.second > _COLD_US) & (self.first > 2 * self.second)
        sums, slowest = self.first.sum(axis=0), self.first.max(axis=0)
        found = {
            "row_us_mean": float(self.first.mean()),
            "row_us_p50": float(np.percentile(self.first, 50)),
            "row_us_p99": float(np.percentile(self.first, 99)),
            "row_us_max": float(self.first.max()),
            "warm_row_us_mean": float(self.second.mean()),
            "cold_percent": 100 * float(cold.mean()),
            "cold_cpu_percent": 100 * float(self.first[cold].sum() / self.first.sum()),
            "steps_with_cold_percent": 100 * float(cold.any(axis=0).mean()),
            "tables_percent": 100 * self.tables / self.first.size,
            "compile_alone_ms": float(np.mean(self.compile_ms)),
        }
        found |= _spread("slowest_row_us", slowest) | _spread("step_cpu_us", sums)
        found |= _spread("warm_slowest_row_us", self.second.max(axis=0))
        for limit in (100, 300, 1000):
            found[f"rows_over_{limit}us_percent"] = 100 * float((self.first > limit).mean())
        return found


def replay(
    llm: LLM, grammars_of: Sequence[StructuredOutputsParams], outputs: Sequence[RequestOutput]
) -> Replay:
    """Builds the masks of requests once more, step by step and row by row, on this thread.

    Each grammar is compiled again, so that its states are as cold as in the run.
    """
    compiler = compiler_setup(llm.config, walks=True).open()
    compiler.load()
    states, compile_ms = [], []
    for each in grammars_of:
        began = now()
        matcher = compiler.compile(each).result()
        compile_ms.append(1e3 * (now() - began))
        state = GrammarState(position=0)
        state.begin(matcher, compiler.walk(each))
        states.append(state)
    texts = [output.outputs[0].token_ids for output in outputs]
    steps = min(map(len, texts))
    words = -(-compiler.vocab_size // 32)
    room = np.zeros((1, words), dtype=np.int32)
    builder = MaskBuilder(compiler.vocab_size)
    tables = 0
    visits = []
    for visit in range(2):
        found = np.zeros((len(states), steps))
        for step in range(steps):
            for i, state in enumerate(states):
                began = time.thread_time()
                builder.build([MaskRow(state)], room, compiler.tokenizer_vocab)
                found[i, step] = 1e6 * (time.thread_time() - began)
                strings = state.strings
                tables += visit == 0 and strings is not None and strings.short
                state.advance([texts[i][step]])
                state.settle()
        visits.append(found)
        for state, each in zip(states, grammars_of, strict=True):
            # Its states stay known.
            state.matcher.reset()  # type: ignore[union-attr]
            grammar = state.matcher
            state.restart(0)
            state.begin(grammar, compiler.walk(each))
    return Replay(visits[0], visits[1], compile_ms, tables)
