"""Decode beside a flood of long prompts: one server, and two of which one computes the prompts.

    python bench/disagg.py [--streams 4] [--seconds 20] [MODEL]

Streams decode while a client sends one long prompt after the other, each new. Printed are the times
between a stream's tokens (ITL) at rest and under the flood, and prompts per second. Servers of this
script share the machine's cores, so what counts is p99 / p50, not how the setups compare in speed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai

READY = re.compile(r"^Serving (\S+) at (\S+)\. ", re.MULTILINE)
NAME = "bench"


@dataclass
class Times:
    """Seconds between tokens, and how many prompts were answered meanwhile."""

    between: list[float] = field(default_factory=list)
    prompts: int = 0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.between)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def server(model: list[str], *flags: str) -> Iterator[str]:
    """Runs a server; yields its address."""
    command = [sys.executable, "-m", "quire", "serve", *model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--served-model-name", NAME, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        said = ""
        for line in process.stdout or ():
            said += line
            found = READY.search(said)
            if found:
                threading.Thread(target=(process.stdout or sys.stdin).read, daemon=True).start()
                yield found[2]
                return
        raise SystemExit(f"a server did not start:\n{said}")
    finally:
        process.terminate()
        process.wait()


def measure(url: str, streams: int, seconds: float, words: int) -> Times:
    """Times streams at a server. words: of the prompts that flood it; 0: none do."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    times, over = Times(), threading.Event()

    def stream(index: int) -> None:
        while not over.is_set():
            last = 0.0
            answer = client.completions.create(
                model=NAME,
                prompt=f"Story {index}",
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in answer:
                now = time.perf_counter()
                if last and not over.is_set():
                    times.between.append(now - last)
                last = now
                if over.is_set():
                    break
            answer.close()

    def flood() -> None:
        draw = random.Random(1)
        while not over.is_set():
            prompt = " ".join(
                draw.choice(["red", "fox", "owl", "sky", "sea"]) for _ in range(words)
            )
            client.completions.create(model=NAME, prompt=prompt, max_tokens=1)
            times.prompts += not over.is_set()

    threads = [threading.Thread(target=stream, args=(i,), daemon=True) for i in range(streams)]
    if words:
        threads.append(threading.Thread(target=flood, daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join()
    return times


def show(what: str, times: Times, seconds: float) -> None:
    p50, p99 = times.quantile(0.5), times.quantile(0.99)
    mean = statistics.fmean(times.between)
    print(
        f"{what:28} {1e3 * mean:8.1f} {1e3 * p50:8.1f} {1e3 * p99:8.1f} {p99 / p50:8.2f}"
        f" {times.prompts / seconds:10.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help="model's folder or hub id; none: the embedded one")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--words", type=int, default=1000, help="of a flooding prompt")
    parser.add_argument("--remote", type=int, default=128, help="--remote-prefill-tokens")
    given = parser.parse_args()
    print(f"{'':28} {'mean ms':>8} {'p50 ms':>8} {'p99 ms':>8} {'p99/p50':>8} {'prompts/s':>10}")

    def run(what: str, url: str, words: int) -> None:
        measure(url, given.streams, 2.0, words)  # the first steps are slower
        show(what, measure(url, given.streams, given.seconds, words), given.seconds)

    with server(given.model) as url:
        run("one server, no flood", url, 0)
        run("one server, flood", url, given.words)
    for mode in ("sync", "async"):
        with (
            server(given.model, "--role", "prefill", "--kv-transfer", mode) as writer,
            server(
                given.model,
                *("--role", "decode", "--peer", writer),
                *("--remote-prefill-tokens", str(given.remote)),
            ) as reader,
        ):
            run(f"prefill apart ({mode}), flood", reader, given.words)


if __name__ == "__main__":
    main()
