"""Compares `quire simulate` with a real run: four replicas of the embedded model behind a router.

The engine's model is measured at the first replica before the run. Both get the same trace of
conversations. Records are ratios: simulated over real, and each policy's real times over those of
round-robin. The model ignores that replicas on shared cores slow each other down. `--cores` gives
each replica its own cores, apart from router and clients. Without it the trace must keep less than
one core busy. Other work on the machine disturbs both.

    python bench/simulate_vs_real.py --requests 300 --rate 3
    python bench/simulate_vs_real.py --requests 480 --rate 8 --cores 3      # 16 cores
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from quire.tools.bench.online.drive import drive, launched
from quire.tools.bench.online.load import Ask, body
from quire.tools.bench.record import make_record
from quire.tools.simulate.calibrate import calibrate, encode
from quire.tools.simulate.engine_model import EngineModel
from quire.tools.simulate.fleet import SimulatedFleet
from quire.tools.simulate.summary import summarize
from quire.tools.workload import QWEN_BLOCK, WorkloadTrace, read_trace
from tables import print_and_append

FLAGS = "--device cpu --kv-cache-gb 0.25 --max-num-batched-tokens 256 --served-model-name tiny"
TOP = 2000
"""Ids of random tokens are below this."""
NAMES = ("ttft_p50", "ttft_p99", "latency_p50", "latency_p99")


def conversations(requests: int, rate: float, seed: int) -> list[dict[str, object]]:
    """Returns lines of a trace in Qwen's format: users with one of four beginnings."""
    draw = random.Random(seed)
    ids = iter(range(10**9))
    systems = [[next(ids) for _ in range(8)] for _ in range(4)]
    chats: list[list[int]] = []
    lines, at = [], 0.0
    for number in range(requests):
        at += draw.expovariate(rate)
        if len(chats) < 8 or draw.random() < 0.2:
            chats.append(list(draw.choice(systems)))
        chat = draw.choice(chats[-8:])
        if len(chat) > 40:
            chat[:] = draw.choice(systems)
        chat += [next(ids) for _ in range(draw.randint(2, 8))]
        lines.append(
            {
                "chat_id": number,
                "timestamp": at,
                "input_length": QWEN_BLOCK * len(chat),
                "output_length": draw.randint(8, 24),
                "hash_ids": list(chat),
            }
        )
    return lines


def tokens_of(blocks: tuple[int, ...]) -> list[int]:
    return [
        draw.randrange(TOP)
        for block in blocks
        for draw in (random.Random(block),)
        for _ in range(QWEN_BLOCK)
    ]


@contextlib.contextmanager
def router(urls: list[str], policy: str):
    words = ["-m", "quire", "route", *urls, "--port", "0", "--policy", policy]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split(". Its")[0].partition(" at ")[2]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextlib.contextmanager
def bound(cores: set[int]):
    """Binds processes that start in the block to these cores. An empty set means all cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def shares(replicas: int, cores: int) -> list[set[int]]:
    """Returns the cores of each replica, and those that are left; empty sets without `cores`."""
    own = sorted(os.sched_getaffinity(0))
    if cores and len(own) <= replicas * cores:
        raise SystemExit(f"{replicas} replicas of {cores} cores leave none of {len(own)}")
    parts = [set(own[i * cores : (i + 1) * cores]) for i in range(replicas)]
    return [*parts, set(own[replicas * cores :]) if cores else set()]


def real(urls: list[str], policy: str, trace: WorkloadTrace) -> dict[str, float]:
    """Returns percentiles of a real run. All caches are empty before it."""
    for url in urls:
        asked = urllib.request.Request(f"{url}/reset_prefix_cache", data=b"", method="POST")
        urllib.request.urlopen(asked, timeout=60).read()
    sampling = {"temperature": 0.0, "ignore_eos": True}
    bodies = [
        body(Ask(tokens_of(each.blocks), each.output), "tiny", "completions", sampling)
        for each in trace.requests
    ]
    with router(urls, policy) as url:
        time.sleep(3.0)
        at = [each.at for each in trace.requests]
        target = f"{url}/v1/completions"
        answers, _ = drive(target, {}, bodies, concurrency=0, processes=1, send_at=at)
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    first = [answer.times[0] - answer.sent for answer in answers]
    whole = [answer.times[-1] - answer.sent for answer in answers]
    values = [np.percentile(each, p) for each in (first, whole) for p in (50, 99)]
    cached = sum(answer.cached_tokens for answer in answers)
    hits = cached / sum(answer.prompt_tokens for answer in answers)
    return dict(zip(NAMES, map(float, values), strict=True)) | {"hit_rate": hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--cores", type=int, default=0, help="of each replica; 0: all share all")
    parser.add_argument("--policies", nargs="+", default=["prefix", "round-robin"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder, "trace.jsonl")
        lines = conversations(args.requests, args.rate, seed=1)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        trace = read_trace(path)
        *parts, rest = shares(args.replicas, args.cores)
        urls = []
        for part in parts:
            with bound(part):
                urls.append(stack.enter_context(launched(FLAGS))[0])
        stack.enter_context(bound(rest))
        # The first steps of an engine are slow. Replicas that share cores are measured in turn.
        with ThreadPoolExecutor(len(urls) if args.cores else 1) as pool:
            measured = list(pool.map(lambda url: calibrate(url, key=None, model=None), urls[::-1]))
        model: EngineModel = measured[-1]
        print(encode(model).decode())
        records, runs = [], dict[str, dict[str, float]]()
        for policy in args.policies:
            runs[policy] = measured = real(urls, policy, trace)
            fleet = SimulatedFleet(args.replicas, model, policy, trace.block_size)
            found = summarize(fleet.run(trace), policy, args.replicas, 0)
            simulated = {name: getattr(found, f"{name}_s") for name in NAMES}
            simulated["hit_rate"] = found.hit_rate
            for name in (*NAMES, "hit_rate"):
                print(f"{policy:>12} {name:>12} {measured[name]:9.4f} real", end=" ")
                print(f"{simulated[name]:9.4f} simulated")
            ratios = {name: simulated[name] / measured[name] for name in measured}
            settings = {
                "policy": policy,
                "requests": args.requests,
                "rate": args.rate,
                "cores": args.cores,
            }
            records.append(make_record("simulate-vs-real", ratios, settings=settings))
        turns = runs.pop("round-robin", None)
        for policy, measured in runs.items() if turns is not None else ():
            ratios = {name: measured[name] / turns[name] for name in measured}
            settings = {"policy": policy, "requests": args.requests, "rate": args.rate}
            records.append(make_record("policy-vs-round-robin", ratios, settings=settings))
        print_and_append(records, args.out)


if __name__ == "__main__":
    main()
