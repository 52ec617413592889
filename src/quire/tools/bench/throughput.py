"""Runs cases as fast as an engine can. Throughput counts only output tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig
from quire.plan import KVGroup
from quire.sampling_params import SamplingParams
from quire.tools.bench.cases import TTFT, TTFT_LENGTHS, Case, Workload, random_prompt, scaled
from quire.tools.bench.gpu_meter import GpuMeter, Metrics
from quire.tools.bench.trace import StepRecorder, StepTotals, sum_up, watch
from quire.tools.bench.work import Ceilings, percent_of

if TYPE_CHECKING:
    from quire.llm import LLM

_TTFT_RUNS = 12


class Engine(Protocol):
    """An engine to measure: Quire, or an adapter of another engine."""

    vocab_size: int
    max_model_len: int

    def prepare(self, work: Workload) -> Callable[[], object]:
        """Returns the function that runs the work to its end."""
        ...

    def account(self, began: float, seconds: float) -> Metrics:
        """Returns more metrics of the last run.

        Args:
            began: when the run began, by `time.perf_counter`.
            seconds: how long it took.
        """
        ...


class QuireEngine:
    """An `LLM` whose steps are recorded."""

    def __init__(self, llm: LLM, limits: Ceilings | None) -> None:
        # Imported here because it imports PyTorch, which `quire bench throughput --help` must not.
        from quire.tools.bench.model_work import model_work

        self.llm = llm
        self.config: EngineConfig = llm.config
        self.vocab_size = self.config.vocab_size
        self.max_model_len = self.config.scheduler.max_model_len
        self.trace: StepRecorder = watch(llm)
        self._limits = limits
        self.work = model_work(self.config)
        self.groups: Sequence[KVGroup] = llm._core.capacity.groups

    def prepare(self, work: Workload) -> Callable[[], object]:
        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **work.sampling)  # type: ignore[arg-type]
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        self.trace.take()
        return lambda: self.llm.generate(prompts, params, use_tqdm=False)

    def account(self, began: float, seconds: float) -> Metrics:
        steps = self.trace.take()
        totals = sum_up(steps, began, self.work, self.groups, self.max_model_len, self._limits)
        return step_metrics(totals, seconds, self._limits)


def step_metrics(totals: StepTotals, seconds: float, limits: Ceilings | None) -> Metrics:
    """Returns metrics of the steps.

    `cpu_overhead_percent` is the percentage of time in which no step was on the device.
    `bound_percent` is the percentage of time that the steps need by the device's ceilings."""
    metrics: Metrics = {"steps": totals.steps, "mean_batch": totals.rows / max(1, totals.steps)}
    if totals.gpu_seconds:
        idle = 1.0 - totals.gpu_seconds / seconds
        metrics["cpu_overhead_percent"] = 100.0 * max(0.0, idle)
    if limits is not None:
        metrics["bandwidth_percent"] = percent_of(totals.bytes, seconds, limits.memory)
        metrics["mfu_percent"] = percent_of(totals.flops, seconds, limits.matmul)
        metrics["bound_percent"] = 100.0 * totals.bound_seconds / seconds
    if totals.allocated:
        metrics["kv_utilization_percent"] = 100.0 * totals.stored / totals.allocated
        metrics["kv_utilization_reserved_percent"] = 100.0 * totals.stored / totals.reserved
    return metrics


def measure(
    engine: Engine,
    case: Case,
    *,
    scale: float = 1.0,
    repeat: int = 2,
    meter: GpuMeter | None = None,
) -> Metrics:
    """Returns the metrics of the best of `repeat` runs after a warm-up.

    For `ttft` they are milliseconds by prompt length.

    Args:
        meter: meter of the engine's GPUs; None adds no metrics of GPUs.
    """
    meter = meter or GpuMeter()
    if case is TTFT:
        with meter.reading() as reading:
            metrics = _measure_ttft(engine, scale)
        return {**metrics, **reading.metrics()}
    work = case.workload(engine.vocab_size, scale)
    few = Workload(work.prompts[:4], [8] * len(work.prompts[:4]), work.sampling)
    engine.prepare(few)()
    best, metrics = float("inf"), {}
    for _ in range(repeat):
        run = engine.prepare(work)
        with meter.reading() as reading:
            began, seconds = _timed(run)
        more = {**engine.account(began, seconds), **reading.metrics(work.output_tokens)}
        if seconds < best:
            best, metrics = seconds, more
    return {
        "requests": len(work.prompts),
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "seconds": best,
        "output_tok_s": work.output_tokens / best,
        "total_tok_s": (work.prompt_tokens + work.output_tokens) / best,
        **metrics,
    }


def _measure_ttft(engine: Engine, scale: float) -> Metrics:
    """Measures the time to one token after a prompt of new random ids.

    It is the best of 12 runs for each length. Lengths above the model's context are left out."""
    draw, metrics = random.Random(0), {}
    for length in TTFT_LENGTHS:
        tokens = scaled(length, scale)
        if tokens >= engine.max_model_len:
            continue
        best = float("inf")
        for _ in range(_TTFT_RUNS):
            prompt = random_prompt(draw, tokens, engine.vocab_size)
            run = engine.prepare(Workload([prompt], [1], {"temperature": 0.0}))
            best = min(best, _timed(run)[1])
        metrics[f"ttft_{tokens}_ms"] = best * 1e3
    return metrics


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Runs a function. Returns when it began and how many seconds it took."""
    began = time.perf_counter()
    run()
    return began, time.perf_counter() - began
