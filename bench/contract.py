"""Compares the speed of the working tree with an earlier commit's, such as the last release's.

    make bench-contract                           # on a GPU: recorded cases of two models
    make bench-contract-cpu                       # anywhere: host work of a step and of a stream
    python bench/contract.py --base v0.3 qwen3-8b # other base, other models

Both sources run in turns on this machine, so neither another card nor another host is in the ratio.
Fails if a case is slower than the base by more than --limit. Each side counts with its best round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from quire.tools.bench.record import BenchRecord, make_record
from tables import CONFIGS, print_and_append

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "bench" / "contract_base.txt"
"""Holds the commit of the last release."""
MODELS = ("qwen3-0.6b", "qwen3-8b")
CASES = ("nano", "b64", "b1", "ttft")
GPU_LIMIT, CPU_LIMIT = 0.02, 0.15
_SECONDS = 1.5
"""Seconds in which a work is repeated."""
_CHUNKS = 10_000

Times = dict[str, float]
"""By case, a time or the inverse of a rate. Lower is better."""


def scheduler_step() -> float:
    """Returns the µs of planning and updating a step of 256 generating requests."""
    from quire.tools.bench.scheduler import steady

    found = steady(256, num_blocks=100_000, steps=64)
    return found["plan_us"] + found["update_us"]


def detokenizing() -> float:
    """Returns the µs of a token in `Detokenizer.step`."""
    from quire.models.config import resolve_model_path
    from quire.text.detokenizer import Detokenizer
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_path(resolve_model_path(None))
    text = "Once upon a time, a little dragon lived near the sea. She liked stories. "
    ids = tokenizer.encode(text * 200).tolist()
    detokenizer = Detokenizer(tokenizer, [])
    began = time.perf_counter()
    for id in ids:
        detokenizer.step(id)
    return (time.perf_counter() - began) / len(ids) * 1e6


def event_writing() -> float:
    """Returns the µs of a chunk of a streamed chat answer."""
    from quire.server.apis.openai.chunks import ChunkWriter
    from quire.server.apis.openai.objects import ChatChunkChoice, ChatDelta, CompletionObject

    def envelope(choices: list[Any], usage: Any) -> CompletionObject[Any]:
        kind = "chat.completion.chunk"
        return CompletionObject("chatcmpl-1", kind, 1, "model", choices, usage)

    writer = ChunkWriter(None, envelope, dict)
    buffer = bytearray()
    began = time.perf_counter()
    for _ in range(_CHUNKS):
        writer.write(buffer, ChatChunkChoice(0, ChatDelta(content=" token"), None, None))
        if len(buffer) > 1 << 16:
            buffer.clear()
    return (time.perf_counter() - began) / _CHUNKS * 1e6


HOST_WORK = (scheduler_step, detokenizing, event_writing)


def measure_host() -> Times:
    """Returns the best of several runs of each work. Leaves out what this source cannot run."""
    best: Times = {}
    for work in HOST_WORK:
        try:
            times = [work()]
            until = time.perf_counter() + _SECONDS
            while time.perf_counter() < until:
                times.append(work())
            best[work.__name__] = min(times)
        except (ImportError, AttributeError, TypeError) as error:
            print(f"{work.__name__}: {error!r}", file=sys.stderr)
    return best


def host_times(source: Path) -> Times:
    """Measures the host's work with the package in `source`, in a process of its own."""
    found: Times = json.loads(_run(source, str(Path(__file__).resolve()), "--measure"))
    return found


def gpu_times(source: Path, models: Sequence[str]) -> Times:
    """Measures the recorded cases of models with the package in `source`: ms to the first token,
    and µs of a token."""
    cases = [word for case in CASES for word in ("--case", case)]
    found: Times = {}
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "records.jsonl"
            _run(
                source, "-m", "quire", "bench", "throughput", str(CONFIGS / model), *cases,
                "--load-format", "dummy", "--skip-tokenizer-init", "--output", str(out),
            )  # fmt: skip
            for record in map(json.loads, out.read_text().splitlines()):
                for name, value in record["metrics"].items():
                    if name == "output_tok_s":
                        found[f"{model} {record['case']}"] = 1e6 / value
                    elif name.startswith("ttft"):
                        found[f"{model} {name}"] = value
    return found


def _run(source: Path, *words: str) -> str:
    paths = [str(source), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def compare(
    measure: Callable[[Path], Times], base: Path, rounds: int, limit: float
) -> dict[str, tuple[float, float]]:
    """Measures both sources in turns. Returns the best times of both, by case.

    A busy machine may slow one side down for a while. So while a case is slower than `limit`
    allows, there are more rounds, up to three times as many.
    """
    sides: tuple[Times, Times] = {}, {}
    found: dict[str, tuple[float, float]] = {}
    for number in range(3 * rounds):
        order = ((0, base), (1, ROOT / "src"))
        for side, source in order if number % 2 == 0 else order[::-1]:
            for case, value in measure(source).items():
                sides[side][case] = min(sides[side].get(case, math.inf), value)
        found = {case: (sides[0][case], now) for case, now in sides[1].items() if case in sides[0]}
        if number + 1 >= rounds and not slower(found, limit):
            break
    return found


def slower(found: dict[str, tuple[float, float]], limit: float) -> list[str]:
    """Returns the cases that take longer than the base by more than a share of `limit`."""
    return [case for case, (base, now) in found.items() if now > base * (1 + limit)]


def extract(commit: str, folder: Path) -> Path:
    """Writes the package of a commit into a folder, and returns its `src`.

    Raises:
        CalledProcessError: this clone does not have the commit.
    """
    data = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def records_of(
    found: dict[str, tuple[float, float]], commit: str, device: str
) -> list[BenchRecord]:
    return [
        make_record(
            f"contract: {case}", {"base": base, "now": now, "ratio": now / base}, device=device,
            settings={"base": commit},
        )
        for case, (base, now) in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, help="folders of bench/configs")
    parser.add_argument("--cpu", action="store_true", help="the host's work instead of models")
    parser.add_argument("--base", help=f"a commit; default: the one in {BASE.name}")
    parser.add_argument("--limit", type=float, help="share by which a case may be slower")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--out", type=Path, help="append the records to this JSONL file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure_host()))
        return
    commit = args.base or BASE.read_text().strip()
    limit = args.limit or (CPU_LIMIT if args.cpu else GPU_LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        base = extract(commit, Path(folder))
        if args.cpu:
            found = compare(host_times, base, args.rounds, limit)
        else:
            found = compare(lambda source: gpu_times(source, args.models), base, args.rounds, limit)
    print_and_append(records_of(found, commit, "cpu" if args.cpu else "cuda"), args.out)
    if missed := slower(found, limit):
        sys.exit(f"slower than {commit[:12]} by more than {limit:.0%}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
