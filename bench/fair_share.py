"""Measures how long a second key waits during the flood of another key.

    python bench/fair_share.py [--flood 500] [--rounds 3] [--out bench/results/fair_share.jsonl]

One server runs the embedded model. The second key sends one request after another, first alone,
then while the server answers 500 requests that the first key sent at once. The ratio is its p95
time to first token in the flood over that when alone. Sending the single requests with the flood's
key gives the ratio without fair turns. The flood comes from a separate process. Rounds alternate,
and the median of their ratios counts, because other work disturbs both sides. The run needs two
cores of its own. `load_before` records the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

from quire.tools.bench.online.drive import launched
from quire.tools.bench.record import make_record
from tables import print_and_append

VOCAB = 6000


async def first_token(address: tuple[str, int], key: str, prompt: list[int], output: int) -> float:
    """Returns the seconds to the first token of a streamed request, and reads it to its end."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: quire\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    try:
        began = time.perf_counter()
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"refused: {status!r} {await reader.read(2000)!r}")
        first = None
        while line := await reader.readline():
            if first is None and line.startswith(b"data: "):
                first = time.perf_counter() - began
        if first is None:
            raise SystemExit("an answer without a token")
        return first
    finally:
        writer.close()


def prompt_of(dice: random.Random, tokens: int) -> list[int]:
    return [dice.randrange(VOCAB) for _ in range(tokens)]


def flood(
    address: tuple[str, int], count: int, prompt: int, output: int, seed: int, over: Event
) -> None:
    """Sends all requests at once. Sets `over` when half of them are answered."""

    async def go() -> None:
        dice, done = random.Random(seed), 0

        async def one() -> None:
            nonlocal done
            await first_token(address, "sk-flood", prompt_of(dice, prompt), output)
            done += 1
            if done == count // 2:
                over.set()

        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(go())


async def singles(
    address: tuple[str, int], key: str, args: argparse.Namespace, seed: int, until: Event | None
) -> list[float]:
    """Returns times to the first token of requests sent one after the other.

    Sends `args.singles` requests, or goes on until the event `until` is set.
    """
    dice, times = random.Random(seed), []
    while len(times) < args.singles if until is None else not until.is_set():
        prompt = prompt_of(dice, args.prompt)
        times.append(await first_token(address, key, prompt, args.single_output))
        await asyncio.sleep(dice.uniform(0.0, 0.02))
    return times


def under_flood(
    address: tuple[str, int], key: str, args: argparse.Namespace, seed: int
) -> tuple[list[float], float]:
    """Returns the single requests' times, and the seconds until half the flood was answered."""
    context = get_context("spawn")
    over = context.Event()
    sizes = (args.flood, args.prompt, args.output)
    sender = context.Process(target=flood, args=(address, *sizes, seed, over))
    sender.start()
    began = time.perf_counter()
    time.sleep(args.lead)  # the flood then occupies the server
    times = asyncio.run(singles(address, key, args, seed + 1, over))
    seconds = time.perf_counter() - began
    sender.terminate()  # this aborts its open requests
    sender.join()
    return times, seconds


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]


def measure(args: argparse.Namespace, address: tuple[str, int]) -> dict[str, float]:
    asyncio.run(singles(address, "sk-second", args, 1, None))  # warm
    idle: list[float] = []
    fair: list[float] = []
    halves: list[float] = []
    ratios: list[float] = []
    for turn in range(args.rounds):
        alone = asyncio.run(singles(address, "sk-second", args, 10 * turn, None))
        times, seconds = under_flood(address, "sk-second", args, 100 + turn)
        ratios.append(p95(times) / p95(alone))
        idle += alone
        fair += times
        halves.append(seconds)
    unfair, half = under_flood(address, "sk-flood", args, 500)
    return {
        "idle_ttft_p50_ms": 1e3 * statistics.median(idle),
        "idle_ttft_p95_ms": 1e3 * p95(idle),
        "flood_ttft_p50_ms": 1e3 * statistics.median(fair),
        "flood_ttft_p95_ms": 1e3 * p95(fair),
        "flood_requests_measured": float(len(fair)),
        "ratio_p95": statistics.median(ratios),
        "ratio_p95_least": min(ratios),
        "ratio_p95_most": max(ratios),
        "same_key_ttft_p50_ms": 1e3 * statistics.median(unfair),
        "same_key_ratio_p95": p95(unfair) / p95(idle),
        "flood_half_answered_s": statistics.median(halves),
        "same_key_flood_half_answered_s": half,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--flood", type=int, default=500, help="requests sent at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of the flood's answers")
    parser.add_argument("--single-output", type=int, default=8, help="of the second key's")
    parser.add_argument("--singles", type=int, default=60, help="requests when alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lead", type=float, default=3.0, help="seconds before the second key")
    parser.add_argument("--out", type=Path, help="JSONL file to append the record to")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        keys.write('[flood]\nkey = "sk-flood"\n[second]\nkey = "sk-second"\n')
        keys.flush()
        with launched(shlex.join(["--api-key-file", keys.name, *args.flags])) as (url, _):
            place = urlsplit(url)
            metrics = measure(args, (place.hostname or "", place.port or 0))
    named = ("flood", "prompt", "output", "single_output", "rounds")
    settings = {name: getattr(args, name) for name in named}
    settings |= {"flags": " ".join(args.flags), "load_before": load, "cores": os.cpu_count()}
    record = make_record("fair_share", metrics, model="quire-tiny", settings=settings)
    print_and_append([record], args.out)


if __name__ == "__main__":
    main()
