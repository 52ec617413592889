"""Profiles a workload by torch's profiler: time by kernel, gaps, and fractions of the ceilings.

A kernel may be launched early (programmatic dependent launch) and wait while its predecessors run.
So a kernel's time counts only from the end of all kernels before it. Time without any kernel is
idle time, and counts for the next kernel. On a CPU, ops take the place of kernels. An op's time
does not include the ops that it calls.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from quire.engine.ranks.workers import WorkerExecutor
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.tools.bench.cases import TTFT, Case
from quire.tools.bench.model_work import model_work
from quire.tools.bench.trace import SeenStep, sum_up, watch
from quire.tools.bench.work import Ceilings, percent_of

if TYPE_CHECKING:
    from quire.llm import LLM

record_function: Any = torch.autograd.profiler.record_function
emit_nvtx: Any = torch.autograd.profiler.emit_nvtx
torch_profile: Any = torch.profiler.profile

Span = tuple[str, int, int]
"""Kernel, start and end in ns."""

_WARM = 30
"""Number of decode steps before the profiled ones."""
_SHOWN = 16
_SHOWN_IDLE = 4
_RANGES = ("step ", "layer ")
"""Prefixes of the names of ranges, which are not kernels."""
_NAME = 60
"""Longest name of a kernel, in characters. Longer names are cut."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of some steps.

    Attributes:
        case: name of the workload.
        steps: number of steps.
        spans: the kernels, with start and end, in order of their start.
        launches: number of launches of all steps.
        flops: the least FLOPs of the steps.
        bytes: the least bytes that the steps read and write.
        limits: the device's ceilings, or None if they are unknown.
    """

    case: str
    steps: int
    spans: Sequence[Span]
    launches: int
    flops: float
    bytes: float
    limits: Ceilings | None

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a mean step.

        They are its time, its launches, its fractions of the ceilings, and the kernels and gaps
        with the most time, in µs per step.
        """
        busy, idle, whole = charged(self.spans)
        seconds = whole / 1e9
        found = {
            "step_us": whole / self.steps / 1e3,
            "idle_percent": 100.0 * idle.total() / whole,
            "launches": self.launches / self.steps,
            "tflop_s": self.flops / seconds / 1e12,
        }
        if self.limits is not None:
            found["mfu_percent"] = percent_of(self.flops, seconds, self.limits.matmul)
            found["bandwidth_percent"] = percent_of(self.bytes, seconds, self.limits.memory)
        for name, ns in busy.most_common(_SHOWN):
            found[f"{name}_us"] = ns / self.steps / 1e3
        for name, ns in idle.most_common(_SHOWN_IDLE):
            found[f"idle before {name}_us"] = ns / self.steps / 1e3
        return found


def charged(spans: Sequence[Span]) -> tuple[Counter[str], Counter[str], int]:
    """Returns the ns of each kernel, the idle ns before each kernel, and the total ns.

    Args:
        spans: at least one span, in order of their starts.
    """
    busy: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    reached = spans[0][1]
    for name, start, end in spans:
        short = name.split("(")[0][:_NAME]
        if start > reached:
            idle[short] += start - reached
        busy[short] += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy, idle, reached - spans[0][1]


def innermost(calls: Sequence[Span]) -> list[Span]:
    """Cuts calls into spans without the calls that they made.

    Args:
        calls: calls of one thread, in any order. A call may contain others.
    """
    spans: list[Span] = []
    open_: list[tuple[str, int]] = []
    at = 0

    def run_to(moment: int) -> None:
        nonlocal at
        if open_ and moment > at:
            spans.append((open_[-1][0], at, moment))
        at = max(at, moment)

    for name, start, end in sorted(calls, key=lambda call: (call[1], -call[2])):
        while open_ and open_[-1][1] <= start:
            run_to(open_[-1][1])
            open_.pop()
        run_to(start)
        open_.append((name, end))
    while open_:
        run_to(open_[-1][1])
        open_.pop()
    return spans


class Profiler:
    """Profiles workloads of an engine in this process. With several ranks it profiles the first.

    Args:
        limits: the device's ceilings, or None if they are unknown.
        nvtx: names steps, layers and ops for an outer profiler (nsys). torch's profiler is then
            off, and there are no figures.

    Raises:
        ConfigError: `nvtx` is asked for without a GPU.
    """

    def __init__(self, llm: LLM, limits: Ceilings | None, *, nvtx: bool = False) -> None:
        self._cuda = llm.config.device != "cpu"
        if nvtx and not self._cuda:
            raise ConfigError("nvtx names what a GPU runs, and the device is a CPU", "nvtx")
        self._llm, self._limits, self._nvtx = llm, limits, nvtx
        executor: Any = llm._core._executor
        worker = executor.local if isinstance(executor, WorkerExecutor) else executor
        self._layers = worker.model.layers
        self._recorder = watch(llm)
        self._work = model_work(llm.config)

    def decode(
        self, rows: int, prompt: int, steps: int, trace: Path | None = None
    ) -> Profile | None:
        """Profiles steps in which `rows` requests decode after prompts of random tokens.

        Args:
            rows: number of requests.
            prompt: tokens of each prompt.
            steps: number of steps.
            trace: file for the profile, in a format for Perfetto.

        Returns:
            The profile, or None with `nvtx`.

        Raises:
            ConfigError: the engine does not run so many or so long requests.
        """
        config = self._llm.config
        scheduler = config.scheduler
        if rows > scheduler.max_num_seqs:
            raise ConfigError(f"rows={rows} is larger than max_num_seqs", "rows")
        first = _WARM + math.ceil(rows * prompt / scheduler.max_num_batched_tokens)
        output = first + steps + 10
        if prompt + output > scheduler.max_model_len:
            raise ConfigError(
                f"prompts of {prompt} tokens and {steps} steps need sequences of "
                f"{prompt + output} tokens, and the model takes {scheduler.max_model_len}",
                "steps",
            )
        draw = random.Random(0)
        prompts = [[draw.randrange(config.vocab_size) for _ in range(prompt)] for _ in range(rows)]
        params = SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )

        def run() -> object:
            return self._llm.generate(prompts, params, use_tqdm=False)

        return self._profiled(f"breakdown_{rows}", run, first, steps, trace)

    def case(self, case: Case, trace: Path | None = None) -> Profile | None:
        """Profiles a whole case, including its prompts, after a warm-up run. See `decode`.

        Raises:
            ConfigError: the case is `ttft`, or longer than the model's context.
        """
        longest = self._llm.config.scheduler.max_model_len
        if case is TTFT:
            raise ConfigError("profile one prompt as 1x2048x1", "case")
        if case.positions() > longest:
            raise ConfigError(
                f"case {case.name} needs sequences of {case.positions()} tokens, and the model "
                f"takes {longest}",
                "case",
            )
        work = case.workload(self._llm.config.vocab_size)
        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **work.sampling)  # type: ignore[arg-type]
            for n in work.lengths
        ]

        def run() -> object:
            return self._llm.generate(work.prompts, params, use_tqdm=False)

        run()
        return self._profiled(f"breakdown_{case.name}", run, 1, None, trace)

    def _profiled(
        self,
        name: str,
        run: Callable[[], object],
        first: int,
        count: int | None,
        trace: Path | None,
    ) -> Profile | None:
        """Profiles steps [first, first + count) of `run`, or all from `first` on without
        `count`."""
        # Without this, some versions of torch write to stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kind = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
        also = [ProfilerActivity.CPU] if trace is not None else []
        profiler: Any = emit_nvtx() if self._nvtx else torch_profile(activities={kind, *also})
        self._recorder.take()
        with self._named_layers():
            done = self._window(run, profiler, first, count)
        if self._nvtx:
            return None
        if trace is not None:
            profiler.export_chrome_trace(str(trace))
        flops, bytes_ = self._least(self._recorder.take(), first - 1, done)
        calls = self._calls(profiler)
        spans = calls if self._cuda else innermost(calls)
        return Profile(name, done, spans, len(calls), flops, bytes_, self._limits)

    def _window(
        self, run: Callable[[], object], profiler: Any, first: int, count: int | None
    ) -> int:
        """Calls `run` with the profiler on in a window of steps. Returns the number of its
        steps."""
        core = self._llm._core
        step, begun = core.step, 0

        def end() -> None:
            if self._cuda:
                torch.cuda.synchronize()
            profiler.__exit__(None, None, None)

        def counted() -> Any:
            nonlocal begun
            begun += 1
            if begun == first:
                profiler.__enter__()
            if count is not None and begun == first + count:
                end()
            with record_function(f"step {begun}"):
                return step()

        core.step = counted  # type: ignore[method-assign]
        try:
            run()
        finally:
            core.step = step  # type: ignore[method-assign]
            if begun >= first and (count is None or begun < first + count):
                end()
        seen = begun - first + 1
        return seen if count is None else min(count, seen)

    @contextlib.contextmanager
    def _named_layers(self) -> Iterator[None]:
        """Names ranges for layers, if they run op by op."""
        handles, ranges = [], []

        def enter(number: int) -> None:
            ranges.append(record_function(f"layer {number}"))
            ranges[-1].__enter__()

        for number, layer in enumerate(self._layers):
            handles.append(layer.register_forward_pre_hook(lambda *_, n=number: enter(n)))
            handles.append(
                layer.register_forward_hook(lambda *_: ranges.pop().__exit__(*[None] * 3))
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _calls(self, profiler: Any) -> list[Span]:
        """Returns the profiled calls.

        It reads the raw events, because a case has hundreds of thousands, and wrapping them would
        take too long."""
        wanted = DeviceType.CUDA if self._cuda else DeviceType.CPU
        return sorted(
            (
                (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
                for event in profiler.profiler.kineto_results.events()
                if event.device_type() == wanted and not event.name().startswith(_RANGES)
            ),
            key=lambda span: span[1],
        )

    def _least(self, steps: Sequence[SeenStep], before: int, count: int) -> tuple[float, float]:
        """Returns the least FLOPs and bytes of `count` steps after the first `before` ones."""
        config = self._llm.config
        groups, longest = self._llm._core.capacity.groups, config.scheduler.max_model_len
        sums = [
            sum_up(steps[:end], 0.0, self._work, groups, longest, None)
            for end in (before, before + count)
        ]
        return sums[1].flops - sums[0].flops, sums[1].bytes - sums[0].bytes
