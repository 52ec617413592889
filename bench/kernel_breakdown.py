"""Where the time of decode steps goes on a GPU: µs per step by kernel, and the GPU's idle time.

    python bench/kernel_breakdown.py MODEL_FOLDER --rows 1 64 [--steps 200]

Random weights. Reads a profile of the steps after the prompts; idle is what no kernel covers
between the first and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from quire import LLM, SamplingParams
from quire.bench.record import append_jsonl, make_record


def spans(llm: LLM, rows: int, prompt: int, steps: int) -> list[tuple[str, float, float]]:
    """(kernel, start, end) in µs, of the middle of a run of `steps` decode steps."""
    draw = random.Random(0)
    prompts = [[draw.randint(10, 10000) for _ in range(prompt)] for _ in range(rows)]
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 40, ignore_eos=True, detokenize=False
    )
    step, count = llm._core.step, 0
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def counted() -> object:
        nonlocal count
        count += 1
        if count == 30:
            profiler.start()
        if count == 30 + steps:
            torch.cuda.synchronize()
            profiler.stop()
        return step()

    llm._core.step = counted  # type: ignore[method-assign,assignment]
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm._core.step = step  # type: ignore[method-assign]
    return sorted(
        (
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ),
        key=lambda span: span[1],
    )


def summary(found: list[tuple[str, float, float]], steps: int) -> dict[str, float]:
    by_name: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, found[0][1]
    for name, start, end in found:
        by_name[name.split("(")[0][:60]] += (end - start) / steps
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - found[0][1]
    metrics = {"step_us": whole / steps, "idle_percent": 100.0 * (1.0 - busy / whole)}
    for name, us in sorted(by_name.items(), key=lambda item: -item[1])[:18]:
        metrics[f"{name}_us"] = us
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    llm = LLM(
        args.model, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False
    )
    for rows in args.rows:
        metrics = summary(spans(llm, rows, args.prompt, args.steps), args.steps)
        name = json.loads((Path(args.model) / "config.json").read_text()).get("model_type", "")
        print(f"\n{Path(args.model).name} ({name}), {rows} rows")
        for key, value in metrics.items():
            print(f"  {value:10.1f}  {key}")
        if "OUT" in os.environ:
            record = make_record(
                f"breakdown_{rows}", metrics, model=Path(args.model).name, device="cuda"
            )
            append_jsonl(Path(os.environ["OUT"]) / "breakdown.jsonl", [record])
    llm.shutdown()


if __name__ == "__main__":
    main()
