"""Measures models by batch and prompt, and servers by users, as shares of the card's bandwidth.

    python bench/suite.py --seconds 540                   # three models on a GPU, random weights
    python bench/suite.py --only qwen3-8b --part grid     # a part of it
    python bench/suite.py bench/configs/llama-2-7b --part users --users 4 64
    python bench/suite.py --small --device cpu            # the embedded model, in a moment
    python bench/suite.py --report bench/results/h200_suite.jsonl     # CSV, Markdown, PNG anew

The part `grid` sends requests at once to one engine, for each batch and prompt. It measures the
time until all have their first token, and a step in which all of them decode. The part `users` has
clients that stream one request after the other from a server. It measures the time to the first
token and between tokens. Each part has a process and a share of the time. Points that do not fit
the memory or the time are named. Records are appended to RESULTS/CARD_suite.jsonl. CSV, Markdown
and, with matplotlib, a picture show the newest record of each point.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import suite_report
from gpu_table import card_name as gpu_name
from gpu_table import slug
from quire.arrays import int32
from quire.cli.bench_serve import meter_of
from quire.config import EngineArgs, EngineConfig
from quire.engine.builder import resolve
from quire.llm import LLM
from quire.models import load_config, resolve_model_path, spec_from_config
from quire.plan import RowFlag
from quire.sampling_params import SamplingParams
from quire.tools.bench.gpu_meter import GpuMeter, Metrics
from quire.tools.bench.model_work import model_work
from quire.tools.bench.online.drive import Server, launched
from quire.tools.bench.online.load import Lengths
from quire.tools.bench.online.sweep import SweepPlan, levels
from quire.tools.bench.record import (
    BenchRecord,
    OutputFiles,
    append_jsonl,
    card_name,
    make_record,
    read_jsonl,
)
from quire.tools.bench.throughput import QuireEngine
from quire.tools.bench.trace import SeenStep, sum_up
from quire.tools.bench.work import Ceilings, ceilings, measured_on_cpu, percent_of
from quire.tools.roofline.residual import last_first_token

HERE = Path(__file__).resolve().parent
MODELS = ("qwen3-0.6b", "qwen2.5-1.5b", "qwen3-8b")
PARTS = {"grid": 2.0, "users": 1.0}
"""Parts, and their shares of the time."""
_GRACE = 30.0
"""Seconds of grace before a part is ended."""
_TERM_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL."""
_QUICK = 2.0
"""Points that take fewer seconds are measured twice."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured points.

    Attributes:
        rows, prompts: batches and prompt lengths of the grid.
        steps: steps in which all rows decode.
        users: numbers of users at once.
        users_prompt, users_output: tokens of a user's prompts and answers.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    prompts: tuple[int, ...] = (128, 512, 2048, 8192)
    steps: int = 32
    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    users_prompt: int = 512
    users_output: int = 128


SMALL = Sizes((1, 4), (16, 64), 4, (1, 2), 16, 4)


def settings_of(folder: str | None, device: str) -> dict[str, Any]:
    """Returns settings of an engine; weights are random where there is no checkpoint."""
    stored = any(resolve_model_path(folder).glob("*.safetensors"))
    return {
        "model": folder, "device": device, "load_format": "auto" if stored else "dummy",
        "skip_tokenizer_init": True, "enable_prefix_caching": False,
    }  # fmt: skip


def step_limits(config: EngineConfig) -> Ceilings | None:
    """Returns the device's ceilings; a CPU's are measured."""
    if config.device == "cpu":
        return measured_on_cpu(config.dtype)
    return ceilings(card_name(config.device), config.dtype)


class Grid:
    """One engine and its points, as far as the model's context reaches."""

    def __init__(self, folder: str | None, device: str, sizes: Sizes) -> None:
        self.sizes = sizes
        context = spec_from_config(load_config(resolve_model_path(folder))).max_positions
        settings = settings_of(folder, device)
        self._tokens = resolve(EngineArgs(**settings)).scheduler.max_num_batched_tokens
        self._tokens = max(self._tokens, 2 * max(sizes.rows))
        longest = max(self.total(max(sizes.rows), n) for n in sizes.prompts)
        llm = LLM(
            **settings, max_num_seqs=max(sizes.rows), max_num_batched_tokens=self._tokens,
            max_model_len=min(context, longest),
        )  # fmt: skip
        self.config = llm.config
        self.limits = step_limits(self.config)
        self.engine = QuireEngine(llm, self.limits)
        self.meter = GpuMeter.of_device(device)
        self._draw = np.random.default_rng(0)

    def _steps_of_prompts(self, rows: int, prompt: int) -> int:
        # A step in which rows decode has less room for prompts, and of a few each may have its own.
        return rows * prompt // (self._tokens - rows) + 1 + min(rows, 8)

    def total(self, rows: int, prompt: int) -> int:
        """Returns the tokens of a request at its end, while others still have prompts to run."""
        return prompt + self._steps_of_prompts(rows, prompt) + self.sizes.steps + 4

    def obstacle(self, rows: int, prompt: int) -> str | None:
        """Returns what keeps a point from being measured."""
        total, longest = self.total(rows, prompt), self.config.scheduler.max_model_len
        if total > longest:
            return f"needs {total} tokens of context, and there are {longest}"
        capacity = self.engine.llm._core.capacity
        for group, blocks in zip(capacity.groups, capacity.num_blocks, strict=True):
            needed = rows * -(-total // group.tokens_per_block)
            if group.kind != "state" and needed > blocks:
                sizes = (n * group.block_bytes / 1e9 for n in (needed, blocks))
                return "needs {:.3g} GB of KV, and there are {:.3g}".format(*sizes)
        return None

    def measure(self, rows: int, prompt: int) -> Metrics:
        """Runs a point once.

        Raises:
            RuntimeError: the rows never decoded together.
        """
        core, recorder = self.engine.llm._core, self.engine.trace
        recorder.take()
        total = self.total(rows, prompt)
        params = SamplingParams(temperature=0.0, max_tokens=total - prompt, ignore_eos=True)
        top = min(10_000, self.config.vocab_size)
        ids = self._draw.integers(0, top, (rows, prompt), dtype=np.int32)
        with self.meter.reading() as reading:
            began = time.perf_counter()
            for row in range(rows):
                core.add(str(row), int32(ids[row]), params, max_total=total)
            left, decoded = {f"{row}/0" for row in range(rows)}, 0
            while core.has_work() and (left or decoded < self.sizes.steps + 1):
                for item in core.step() or ():
                    if len(item.new_tokens):
                        left.discard(item.request.request_id)
                decoded += not left
        for row in range(rows):
            core.abort(str(row))
        while core.has_work():
            core.step()
        return {**self._metrics(recorder.take(), rows, prompt, began), **reading.metrics()}

    def _metrics(self, steps: list[SeenStep], rows: int, prompt: int, began: float) -> Metrics:
        alone = [
            place
            for place, step in enumerate(steps)
            if step.plan.num_rows == rows and not (step.plan.flags & RowFlag.PROMPT).any()
        ][1 : self.sizes.steps + 1]
        if not alone:
            raise RuntimeError("the rows never decoded together")
        first = last_first_token(steps) - began
        each = statistics.median(steps[i].collected - steps[i - 1].collected for i in alone)
        metrics = {
            "rows": rows, "prompt_tokens": prompt, "prefill_ms": 1e3 * first,
            "prefill_tok_s": rows * prompt / first, "decode_step_ms": 1e3 * each,
            "decode_tok_s": rows / each,
        }  # fmt: skip
        if self.limits is not None:
            context = prompt + self._steps_of_prompts(rows, prompt) // 2 + self.sizes.steps // 2
            work, at = self.engine.work, int32([context] * rows)
            bytes_, flops = work.of_step(at, int32([1] * rows), rows)
            metrics["bandwidth_percent"] = percent_of(bytes_, each, self.limits.memory)
            before = self._prompt_flops(steps, began)
            metrics["prefill_mfu_percent"] = percent_of(before, first, self.limits.matmul)
            metrics["decode_mfu_percent"] = percent_of(flops, each, self.limits.matmul)
        return metrics

    def _prompt_flops(self, steps: list[SeenStep], began: float) -> float:
        """Returns the FLOPs of the steps until all requests have their first token."""
        ended = last_first_token(steps)
        until = [step for step in steps if step.collected <= ended]
        groups, longest = self.engine.groups, self.config.scheduler.max_model_len
        return sum_up(until, began, self.engine.work, groups, longest, None).flops


def run_grid(
    folder: str | None, options: argparse.Namespace, sizes: Sizes
) -> Iterator[BenchRecord]:
    """Yields a record for each point that fits the memory and the time."""
    end, grid = time.monotonic() + options.seconds, Grid(folder, options.device, sizes)
    short, long = min(sizes.prompts), max(sizes.prompts)
    for rows, prompt in ((1, short), (max(sizes.rows), short), (1, long), (4, long)):
        if grid.obstacle(rows, prompt) is None:
            grid.measure(rows, prompt)  # kernels of these sizes are made
    for prompt in sizes.prompts:
        spent = 0.0
        for rows in sizes.rows:
            obstacle, left = grid.obstacle(rows, prompt), end - time.monotonic()
            if obstacle is None and (left <= 0 or 2.2 * spent > left):
                obstacle = "no time"
            if obstacle is not None:
                print(f"{rows}x{prompt}: left out, {obstacle}", flush=True)
                continue
            began = time.monotonic()
            try:
                found = [grid.measure(rows, prompt)]
                if time.monotonic() - began < _QUICK:
                    found.append(grid.measure(rows, prompt))
            except RuntimeError as error:
                if grid.engine.llm._core.failed:
                    raise
                print(f"{rows}x{prompt}: failed, {error}", flush=True)
                continue
            spent = time.monotonic() - began
            metrics = min(found, key=lambda each: each["decode_step_ms"])
            yield record_of(f"grid-{rows}x{prompt}", metrics, grid.config, grid.limits)
    grid.engine.llm.shutdown()


def run_users(
    folder: str | None, options: argparse.Namespace, sizes: Sizes
) -> Iterator[BenchRecord]:
    """Yields a record for each number of users."""
    end = time.monotonic() + options.seconds
    config = resolve(EngineArgs(**settings_of(folder, options.device)))
    limits, work = step_limits(config), model_work(config)
    given = {
        "device": options.device, "load-format": config.args.load_format,
        "max-model-len": min(2048, config.scheduler.max_model_len),
    }  # fmt: skip
    flags = " ".join(
        [*([folder] if folder else ()), "--skip-tokenizer-init --no-enable-prefix-caching"]
        + [f"--{name} {value}" for name, value in given.items()]
    )
    lengths = Lengths(input_len=sizes.users_prompt, output_len=sizes.users_output)
    plan = SweepPlan(
        prompts="ids", lengths=lengths, sampling={"temperature": 0.0, "ignore_eos": True},
        warmup=4, timeout=max(10.0, options.seconds),
    )  # fmt: skip
    with launched(flags, options.seconds) as (url, _):
        server, meter, spent = Server(url, None), meter_of(flags), 0.0
        name = server.model()
        for users in sizes.users:
            if 2.2 * spent > end - time.monotonic():
                print(f"{users} users: left out, no time", flush=True)
                continue
            began = time.monotonic()
            (level,) = levels(plan, server, name, [users], lambda text: None, meter)
            spent = time.monotonic() - began
            for problem in level.problems:
                print(f"{users} users: {problem}", flush=True)
            metrics = {"users": float(users), **level.metrics}
            if limits is not None and "itl_p50_ms" in metrics:
                context = sizes.users_prompt + sizes.users_output // 2
                bytes_, _ = work.of_step(int32([context] * users), int32([1] * users), users)
                seconds = metrics["itl_p50_ms"] / 1e3
                metrics["bandwidth_percent"] = percent_of(bytes_, seconds, limits.memory)
            yield record_of(f"users-{users}", metrics, config, limits)


def record_of(
    case: str, metrics: Metrics, config: EngineConfig, limits: Ceilings | None
) -> BenchRecord:
    settings: dict[str, Any] = {"dtype": config.dtype, "load_format": config.args.load_format}
    if limits is not None:
        settings["ceilings"] = limits.described()
    name = Path(config.model_name).name
    return make_record(case, metrics, model=name, device=config.device, settings=settings)


def run_part(part: str, folder: str | None, options: argparse.Namespace, sizes: Sizes) -> None:
    """Measures in this process, and appends records as they come."""
    for record in {"grid": run_grid, "users": run_users}[part](folder, options, sizes):
        append_jsonl(options.records, [record])
        print(suite_report.line(record), flush=True)


def start_part(
    part: str, folder: str | None, options: argparse.Namespace, seconds: float, records: Path
) -> str | None:
    """Measures in a process of its own. Returns what went wrong."""
    command = [
        sys.executable, __file__, *([folder] if folder else ()), "--worker", part,
        "--device", options.device, "--seconds", str(seconds), "--records", str(records),
        *(["--small"] if options.small else ()),
        *(["--users", *map(str, options.users)] if options.users else ()),
    ]  # fmt: skip
    # A group of its own, so that its server ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(seconds + _GRACE)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"ended after {seconds + _GRACE:.0f} s"
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
                time.sleep(0.0 if process.poll() is not None else _TERM_SECONDS)
        process.wait()


def report(file: Path) -> None:
    """Writes CSV, Markdown and, with matplotlib, a picture of the newest records of a file."""
    newest = {(r.model, r.card, r.case): r for r in read_jsonl(file)} if file.exists() else {}
    records = sorted(newest.values(), key=suite_report.order)
    plots = importlib.util.find_spec("matplotlib") is not None
    outputs = OutputFiles(
        csv=file.with_suffix(".csv"),
        markdown=file.with_suffix(".md"),
        png=file.with_suffix(".png") if plots and records else None,
    )
    text = suite_report.markdown(records)
    outputs.finish(records, suite_report.plot, text)
    print(text)
    if not plots:
        print(f"no picture without matplotlib: python bench/suite.py --report {file}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="folders; a config.json alone: random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together")
    parser.add_argument("--only", metavar="MODEL", help="models whose folder has this in its name")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--users", type=int, nargs="+", help="at once, one number after the other")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="a folder")
    parser.add_argument("--small", action="store_true", help="few points, of the embedded model")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only show these records")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = SMALL if options.small else Sizes()
    if options.users:
        sizes = replace(sizes, users=tuple(options.users))
    if options.report is not None:
        report(options.report)
        return 0
    if options.worker is not None:
        run_part(options.worker, (options.models or [None])[0], options, sizes)
        return 0
    models: list[str | None] = [*options.models]
    if not models:
        models = [None] if options.small else [str(HERE / "configs" / name) for name in MODELS]
    if options.only:
        models = [model for model in models if options.only in Path(model or "").name]
    card = card_name("cpu") if options.device == "cpu" else gpu_name()
    options.results.mkdir(parents=True, exist_ok=True)
    records = options.results / f"{slug(card) if options.device != 'cpu' else 'cpu'}_suite.jsonl"
    work = [(part, model) for model in models for part in options.part or PARTS]
    end, failed = time.monotonic() + options.seconds, []
    for place, (part, model) in enumerate(work):
        left = end - time.monotonic()
        share = left * PARTS[part] / sum(PARTS[other] for other, _ in work[place:])
        name = f"{part} of {Path(model).name if model else 'the embedded model'}"
        print(f"== {name}, {share:.0f} s", flush=True)
        problem = "no time" if share < 5 else start_part(part, model, options, share, records)
        if problem:
            failed.append(f"{name}: {problem}")
    report(records)
    print(f"{len(failed)} failures" + "".join(f"\n  {line}" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
