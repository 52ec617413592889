"""Models on one to eight GPUs: cases and starts, beside what `quire roofline` predicts.

    make bench-gpu-scaling                       # on a machine of any number of GPUs, nine minutes
    python bench/scaling.py --list               # the runs, in the order in which they come
    python bench/scaling.py --seconds 500 --only 8b --only start
    python bench/scaling.py --only async-tp      # long prompts as halves, on two GPUs
    python bench/scaling.py --try                # a CPU: gloo ranks, the embedded model

Weights are random. Runs share the machine: each has GPUs of its own. Runs that need more GPUs than
there are, or more time than is left, are named and left out. Records are appended to
RESULTS/scaling/CARD.jsonl. Sums over ranks are timed by bench/kernels/all_reduce.py. Prints a table
last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_table import card_name, slug
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.tools.bench.cases import TTFT, parse_case
from quire.tools.roofline.roofline import CARDS, Roofline

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
CASES = ("b1-256", "b64", "nano", "ttft")
_LIMIT = 240
"""Seconds that one run may take."""


@dataclass(frozen=True)
class Run:
    """One engine and its measured cases.

    Attributes:
        model: a folder of bench/configs, or "" for the embedded model.
        start: measure the time to the first token instead of cases.
        async_tp: see --async-tp; "" leaves the default.
    """

    model: str
    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    quantization: str = ""
    cases: tuple[str, ...] = CASES
    start: bool = False
    async_tp: str = ""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        parts = [self.model or "embedded", self.quantization, f"tp{self.tensor}"]
        parts += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        parts += ["ep"] if self.experts else []
        parts += [f"async-tp {self.async_tp}"] if self.async_tp else []
        parts += ["start"] if self.start else []
        return " ".join(part for part in parts if part)

    def options(self) -> dict[str, Any]:
        """Returns the settings of the engine that differ from the defaults."""
        found: dict[str, Any] = {}
        if self.tensor > 1:
            found["tensor_parallel_size"] = self.tensor
        if self.pipeline > 1:
            found["pipeline_parallel_size"] = self.pipeline
        if self.experts:
            found["enable_expert_parallel"] = True
        if self.quantization:
            found["quantization"] = self.quantization
        if self.async_tp:
            found["async_tp"] = self.async_tp
        return found

    def command(self, records: Path, more: list[str]) -> list[str]:
        kind = "startup" if self.start else "throughput"
        words = [sys.executable, "-m", "quire", "bench", kind]
        if self.model:
            folder = str(HERE / "configs" / self.model)
            words += [folder, "--load-format", "dummy", "--skip-tokenizer-init"]
        words += [] if self.start else [f"--case={case}" for case in self.cases]
        for name, value in self.options().items():
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
        return [*words, "--repeat", "1", "--output", str(records), *more]


def runs(gpus: int) -> Iterator[Run]:
    """Yields the runs for a number of GPUs, the most important first."""
    sizes = [size for size in (8, 4, 2, 1) if size <= gpus]
    for size in sizes:
        # Pipelines are compared with one GPU.
        more = ("128x512x256",) if size == 1 else ()
        yield Run("qwen3-8b", size, cases=CASES + more)
    for size in sizes:
        yield Run("qwen3-32b", size, cases=("b1-256", "b64", "ttft"))
    if gpus >= 4:
        yield Run("llama-3.1-70b", sizes[0], quantization="fp8", cases=("b1-256", "b64"))
    for size in sizes[:-1]:
        yield Run("qwen3-30b-a3b", size, experts=True, cases=("b1-256", "b64"))
    yield Run("qwen3-30b-a3b", cases=("b1-256", "b64"))
    for stages in (2, 4):
        yield Run("qwen3-8b", max(1, min(2, gpus // stages)), stages, cases=("b64", "128x512x256"))
    for how in ("off", "on", "auto") if gpus >= 2 else ():
        yield Run("qwen3-8b", 2, cases=("ttft",), async_tp=how)
    for size in sizes:
        yield Run("qwen3-8b", size, quantization="fp8", cases=("b1-256", "b64"))
    for size in sizes:
        yield Run("qwen3-32b-fp8", size, cases=("b1-256", "b64"))
    for size in sizes:
        yield Run("qwen3-8b", size, cases=(), start=True)


TRIED = (
    Run("", cases=("2x16x4",)),
    Run("", 2, cases=("2x16x4",)),
    Run("", 1, 2, cases=("2x16x4",)),
)
"""Runs that show on a CPU that the script works."""


class Gpus:
    """The GPUs of a machine, which runs take in the order of their asking."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._changed = threading.Condition()
        self._turns: list[int] = []

    def ask(self, turn: int) -> None:
        self._turns.append(turn)

    @contextmanager
    def take(self, turn: int, count: int) -> Iterator[list[int]]:
        """Yields the numbers of GPUs, once it is this turn and as many are free."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns[0] == turn and len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            self._turns.pop(0)
            self._changed.notify_all()
        try:
            yield taken
        finally:
            with self._changed:
                self._free = sorted(self._free + taken)
                self._changed.notify_all()


def measure(
    run: Run, kept: Path, more: list[str], limit: float, gpus: list[int]
) -> list[dict[str, Any]]:
    """Stores and returns the records of a run on these GPUs. A failed run has none."""
    with tempfile.TemporaryDirectory() as scratch:
        records = Path(scratch) / "records.jsonl"
        began = time.monotonic()
        try:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
            command = run.command(records, more)
            status = str(subprocess.run(command, timeout=limit, env=environment).returncode)
        except subprocess.TimeoutExpired:
            status = "out of time"
        print(f"== {run.name}: {status}, {time.monotonic() - began:.0f} s", flush=True)
        lines = records.read_text().splitlines() if records.exists() else []
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as file:
        file.writelines(line + "\n" for line in lines)
    return [json.loads(line) for line in lines]


def predictions(run: Run, card: str) -> dict[str, float]:
    """Returns the predicted value of each metric of a run, by "case metric". Pipelines have
    none."""
    short = next((name for name, known in CARDS.items() if known.name == card), None)
    if short is None or not run.model or run.start or run.pipeline > 1:
        return {}
    options = {name: value for name, value in run.options().items() if name != "async_tp"}
    args = EngineArgs(
        model=str(HERE / "configs" / run.model), dtype="bfloat16", device="cpu",
        load_format="dummy", skip_tokenizer_init=True, **options,
    )  # fmt: skip
    line = Roofline(resolve(args), short)
    found = {}
    for name in run.cases:
        for each in line.case(parse_case(name)):
            if parse_case(name) is TTFT:
                found[f"{name} {each.case.replace(' ', '_')}_ms"] = 1e3 * each.first_token_seconds
            else:
                found[f"{name} output_tok_s"] = each.output_tok_s
    return found


def table(run: Run, records: list[dict[str, Any]], card: str) -> list[str]:
    """Returns the lines of a run: what was measured, what was predicted, and the error."""
    predicted = predictions(run, card)
    lines = []
    for record in records:
        for name, value in record["metrics"].items():
            if not (name.endswith("_ms") or name.endswith("_seconds") or name == "output_tok_s"):
                continue
            expected = predicted.get(f"{record['case']} {name}")
            behind = (
                ""
                if expected is None
                else f"{expected:,.1f} | {100 * (expected / value - 1):+.0f} %"
            )
            lines.append(
                f"| {run.name} | {record['case']} {name} | {value:,.1f} | {behind or ' | '} |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=530.0, help="for all runs")
    parser.add_argument("--only", action="append", help="runs whose name has this in it")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--try", dest="tried", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments, more = parser.parse_known_args()
    end = time.monotonic() + arguments.seconds
    if arguments.tried or arguments.list:
        gpus, card = 8, "CPU"
    else:
        gpus, card = torch.cuda.device_count(), card_name()
    chosen = list(TRIED) if arguments.tried else list(runs(gpus))
    if arguments.only:
        chosen = [run for run in chosen if all(part in run.name for part in arguments.only)]
    if arguments.list:
        print(
            "\n".join(
                f"{run.gpus} {run.name}: {', '.join(run.cases)}".rstrip(": ") for run in chosen
            )
        )
        return 0
    kept = arguments.results / "scaling" / f"{slug(card)}.jsonl"
    lines, failed = [], []
    pool = Gpus(gpus)

    def go(turn: int, run: Run) -> list[dict[str, Any]] | None:
        """Returns the records of a run, None of one that is left out."""
        with pool.take(turn, run.gpus) as taken:
            left = end - time.monotonic()
            if left < 15:
                print(f"== {run.name}: left out, no time", flush=True)
                return None
            return measure(run, kept, more, min(left, _LIMIT), taken)

    few = [run for run in chosen if run.gpus > gpus]
    for run in few:
        print(f"== {run.name}: left out, few GPUs")
    chosen = [run for run in chosen if run not in few]
    for turn in range(len(chosen)):
        pool.ask(turn)
    with ThreadPoolExecutor(max(1, len(chosen))) as threads:
        results = list(threads.map(go, range(len(chosen)), chosen))
    for run, records in zip(chosen, results, strict=True):
        if records is None:
            continue
        if len(records) < (1 if run.start else len(run.cases)):
            failed.append(run.name)
        lines += table(run, records, card)
    print("| engine | case | measured | predicted | error |\n| --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    if failed:
        print(f"not complete: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
