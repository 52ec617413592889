"""Measures what a router costs, and how many prompt tokens its policies reuse.

    python bench/router.py [--seconds 5] [--out bench/results/router.jsonl]

Costs: a client keeps 32 small requests open, then one. They go to a server that answers at once,
directly and through `quire route`. Server, router and client share the machine. So only ratios and
the router's own CPU time are meaningful.

Hits: conversations of several turns at 4 replicas by each policy, and at one replica with all the
memory. Each replica has an LRU cache of blocks of 16 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

from quire.arrays import int32
from quire.cache.block_hash import next_hash, root_hash
from quire.engine.process.placement import Placement, Replica, cheapest, keys_of
from quire.server.http.replica_proofs import TAG_HEADER
from quire.tools.bench.record import append_jsonl, format_table, make_record

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
OPEN = 32
BLOCK = 16


class Server(asyncio.Protocol):
    """Answers every request at once, also those that the router sends for itself."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = b"{}"
        if data.startswith(b"GET /load"):
            body = b'{"running":0,"waiting":0}'
        elif data.startswith(b"GET /v1/models"):
            body = b'{"data":[{"id":"m"}]}'
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body)
        tag = data.partition(TAG_HEADER + b": ")[2].partition(b"\r\n")[0]
        head += b"%s: %s\r\n\r\n" % (TAG_HEADER, tag) if tag else b"\r\n"
        self.transport.write(head + body)  # type: ignore[attr-defined]


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def client(port: int, open_requests: int, seconds: float) -> list[float]:
    """Returns the seconds of each request."""
    body = b'{"model":"m","prompt":"' + b"x" * 2000 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    request, taken = head % len(body) + body, list[float]()
    end = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began := time.perf_counter()) < end:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            await reader.readexactly(length)
            taken.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(one() for _ in range(open_requests)))
    return taken


def costs(seconds: float) -> dict[str, float]:
    """Measures the router between one client and one server."""
    import uvloop

    command = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    words = ["-m", "quire", "route", f"http://127.0.0.1:{port}", "--port", "0"]
    router = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert router.stdout is not None
    routed = int(router.stdout.readline().split(". Its")[0].rpartition(":")[2])
    found: dict[str, float] = {}
    try:
        time.sleep(1.5)
        for name, open_requests in (("alone", 1), ("many", OPEN)):
            uvloop.run(client(routed, open_requests, 1.0))
            spent = cpu_seconds(router.pid)
            through = uvloop.run(client(routed, open_requests, seconds))
            spent = cpu_seconds(router.pid) - spent
            direct = uvloop.run(client(port, open_requests, seconds))
            found[f"{name}_requests_s"] = len(through) / seconds
            found[f"{name}_direct_requests_s"] = len(direct) / seconds
            found[f"{name}_requests_per_cpu_second"] = len(through) / spent
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                slow, fast = (sorted(each)[int(share * len(each))] for each in (through, direct))
                found[f"{name}_added_{label}_ms"] = 1e3 * (slow - fast)
    finally:
        router.send_signal(signal.SIGINT)
        router.wait()
        server.kill()
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Cache:
    """The cached prompt blocks of one replica."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def compute(self, tokens: list[int]) -> int:
        """Stores a prompt. Returns how many of its tokens were cached before."""
        key, keys = root_hash((0, "")), []
        for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = next_hash(key, int32(tokens[at : at + BLOCK]).tobytes())
            keys.append(key)
        held = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return held * BLOCK


def conversations(users: int, turns: int, seed: int) -> list[list[int]]:
    """Returns prompts in the order of arrival.

    Users share eight system prompts. Each turn of a user adds text to the last one.
    """
    draw = random.Random(seed)
    system = [[draw.randrange(50_000) for _ in range(512)] for _ in range(8)]
    texts = [list(draw.choice(system)) for _ in range(users)]
    order = [user for user in range(users) for _ in range(turns)]
    draw.shuffle(order)
    prompts = []
    for user in order:
        texts[user] += [draw.randrange(50_000) for _ in range(draw.randint(50, 400))]
        prompts.append(list(texts[user]))
    return prompts


def hit_rate(policy: str, replicas: int, tokens: int, prompts: list[list[int]]) -> float:
    """Returns the share of prompt tokens that need not be computed. 32 requests run at once."""
    caches = [Cache(tokens) for _ in range(replicas)]
    states = {index: Replica() for index in range(replicas)}
    for state in states.values():
        state.has_room(tokens)
    running: list[Placement] = []
    held = 0
    for turn, prompt in enumerate(prompts):
        if len(running) == 32:
            running.pop(0).end()
        if policy == "prefix":
            placement = cheapest(states, keys_of(int32(prompt), ""), len(prompt), turn)
        else:
            index = turn % replicas
            if policy == "least-loaded":
                index = min(states, key=lambda n: (states[n].running, (n - turn) % replicas))
            placement = Placement(states[index], index, len(prompt))
        placement.answered()
        running.append(placement)
        held += caches[placement.index].compute(prompt)
    return held / sum(map(len, prompts))


def hits() -> dict[str, float]:
    """Returns hit rates, the mean of three traces."""
    found: dict[str, list[float]] = {}
    for seed in range(3):
        prompts = conversations(users=120, turns=8, seed=seed)
        for name, policy, replicas, tokens in (
            ("one", "round-robin", 1, 400_000),
            ("prefix", "prefix", 4, 100_000),
            ("least-loaded", "least-loaded", 4, 100_000),
            ("round-robin", "round-robin", 4, 100_000),
        ):
            found.setdefault(name, []).append(hit_rate(policy, replicas, tokens, prompts))
    return {f"hits_{name}": statistics.mean(rates) for name, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
    metrics = {**costs(args.seconds), **hits()}
    cores = os.cpu_count() or 1
    record = make_record("router", metrics, settings={"cores": cores, "open": OPEN})
    print(format_table([record]))
    for name, value in metrics.items():
        print(f"{name:36} {value:10.3f}")
    if args.out is not None:
        append_jsonl(args.out, [record])


if __name__ == "__main__":
    main()
