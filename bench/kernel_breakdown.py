"""Breaks a step's time on a GPU down: µs by kernel, and the GPU's idle time.

    python bench/kernel_breakdown.py MODEL_FOLDER [--rows 1 64] [--steps 200] [--case nano]

Random weights. `--rows` profiles decode steps of so many requests; `--case` a whole case of `quire
bench throughput`, prompts included. Kernels that are launched early (programmatic dependent launch)
wait while their predecessors run, so a kernel is charged only for the time by which it outlasts all
before it; what no kernel covers is idle, charged to the kernel that ends it.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from quire import LLM, SamplingParams
from quire.bench.cases import parse_case
from quire.bench.record import append_jsonl, make_record

Span = tuple[str, int, int]
"""Kernel, start and end in ns."""

_SHOWN = 16


def profiled(llm: LLM, work: Callable[[], object], first: int, steps: int | None) -> list[Span]:
    """The kernels of steps [first, first + steps) of `work`, to its end if `steps` is None."""
    step, count = llm._core.step, 0
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def counted() -> object:
        nonlocal count
        count += 1
        if count == first:
            profiler.start()
        if steps is not None and count == first + steps:
            torch.cuda.synchronize()
            profiler.stop()
        return step()

    llm._core.step = counted  # type: ignore[method-assign,assignment]
    try:
        work()
    finally:
        llm._core.step = step  # type: ignore[method-assign]
    if steps is None:
        torch.cuda.synchronize()
        profiler.stop()
    # The raw events: a case has hundreds of thousands, too many to wrap each one.
    events = profiler.profiler.kineto_results.events()
    return sorted(
        (
            (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ),
        key=lambda span: span[1],
    )


def charged(spans: list[Span]) -> tuple[Counter[str], Counter[str], int]:
    """ns by kernel, idle ns by the kernel that ends it, and the whole."""
    busy: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    reached = spans[0][1]
    for name, start, end in spans:
        name = name.split("(")[0][:60]
        if start > reached:
            idle[name] += start - reached
        busy[name] += max(0, end - max(start, reached))
        reached = max(reached, end)
    return busy, idle, reached - spans[0][1]


def summary(spans: list[Span], steps: int) -> dict[str, float]:
    busy, idle, whole = charged(spans)
    metrics = {
        "step_us": whole / steps / 1e3,
        "idle_percent": 100.0 * idle.total() / whole,
        "launches": len(spans) / steps,
    }
    for name, ns in busy.most_common(_SHOWN):
        metrics[f"{name}_us"] = ns / steps / 1e3
    for name, ns in idle.most_common(4):
        metrics[f"idle before {name}_us"] = ns / steps / 1e3
    return metrics


def decode_steps(llm: LLM, rows: int, prompt: int, steps: int) -> dict[str, float]:
    draw = random.Random(0)
    prompts = [[draw.randint(10, 10000) for _ in range(prompt)] for _ in range(rows)]
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 40, ignore_eos=True, detokenize=False
    )
    work = lambda: llm.generate(prompts, params, use_tqdm=False)  # noqa: E731
    return summary(profiled(llm, work, 30, steps), steps)


def whole_case(llm: LLM, case: str) -> dict[str, float]:
    """One "step" is the whole case."""
    requests = parse_case(case).workload(llm.config.vocab_size)
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **requests.sampling)
        for n in requests.lengths
    ]
    work = lambda: llm.generate(requests.prompts, params, use_tqdm=False)  # noqa: E731
    work()
    return summary(profiled(llm, work, 1, None), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--case", nargs="*", default=[])
    args = parser.parse_args()
    llm = LLM(
        args.model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False
    )
    works = [
        (f"breakdown_{rows}", lambda n=rows: decode_steps(llm, n, args.prompt, args.steps))
        for rows in args.rows
    ] + [(f"breakdown_{case}", lambda c=case: whole_case(llm, c)) for case in args.case]
    for case, work in works:
        metrics = work()
        print(f"\n{Path(args.model).name}, {case}")
        for key, value in metrics.items():
            print(f"  {value:12.1f}  {key}")
        if "OUT" in os.environ:
            record = make_record(case, metrics, model=Path(args.model).name, device="cuda")
            append_jsonl(Path(os.environ["OUT"]) / "breakdown.jsonl", [record])
    llm.shutdown()


if __name__ == "__main__":
    main()
