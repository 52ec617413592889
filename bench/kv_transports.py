"""Measures how fast each transport brings KV blocks from the cache of another process.

    python bench/kv_transports.py [--blocks 256] [--kilobytes 256] [--rounds 5]

The other process holds blocks in its cache. For a connection and for shared memory it copies them
to the memory between engines, in batches of 16, and this process copies them from there. NIXL reads
them from the cache itself, in batches of 64. It needs the extra `nixl`; `UCX_TLS=tcp` makes it use
connections. Prints the medians, and their ratios to the connection's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from quire.arrays import int32
from quire.errors import require_nixl
from quire.features.disaggregation.messages import MemoryHandle, PeerChannel
from quire.features.disaggregation.pulls import map_memory
from quire.parallel import SingleGroup
from quire.runner.transfer.copier import HostCopier
from quire.runner.transfer.engine_memory import RankMemory, find_pieces, group_memory
from quire.runner.transfer.layer_reads import WrittenPieces
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.nixl_agent import NixlAgent
from quire.runner.transfer.peer import StagingPool
from quire.runner.transfer.remote_reads import Read, ReadPart

_BATCH, _LARGE_BATCH = 16, 64
_CPU = torch.device("cpu")


class Cache:
    """Blocks of a KV cache, and the memory between engines."""

    def __init__(self, blocks: int, size: int, value: int) -> None:
        self.tensor = torch.full((blocks, size), value, dtype=torch.uint8)
        self.layout = BlockLayout([self.tensor])
        self.pool = StagingPool([size], _BATCH, SingleGroup(), "cpu")
        self.copier = HostCopier([self.layout], self.pool)
        self.agent = NixlAgent([self.tensor], _CPU)

    def batches(self, size: int) -> list[Any]:
        ids = range(len(self.tensor))
        return [int32(ids[at : at + size]) for at in range(0, len(ids), size)]


def write(pipe: Connection, blocks: int, size: int) -> None:
    """Sends its blocks on each request."""
    cache = Cache(blocks, size, 7)
    pool, handle = cache.pool, cache.pool.handle
    assert handle is not None
    memory = group_memory(cache.layout, owner=True)
    told = MemoryHandle(
        handle.pid, handle.descriptor, handle.size, handle.token, [pool.start(0, 0)], [size]
    )
    pipe.send((RankMemory(cache.agent.metadata, "DRAM", 0, [memory]), told))
    connected = socket.create_connection(("127.0.0.1", pipe.recv()))
    channel = PeerChannel(connected)
    while (way := pipe.recv()) != "end":
        for ids in cache.batches(_BATCH):
            slots = int32(range(len(ids)))
            cache.copier.out(0, ids, slots)
            if way == "connection":
                for slot in slots.tolist():
                    channel.send_block(pool.view(0, slot))
            else:
                pipe.send(len(ids))
            pipe.recv()
    cache.agent.close(5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--kilobytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    require_nixl()
    size = options.kilobytes << 10
    pipe, given = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=write, args=(given, options.blocks, size), daemon=True
    )
    process.start()
    cache = Cache(options.blocks, size, 0)
    remote, handle = pipe.recv()
    listening = socket.create_server(("127.0.0.1", 0))
    pipe.send(listening.getsockname()[1])
    channel = PeerChannel(listening.accept()[0])
    memory = map_memory(handle)
    assert memory is not None

    def staged(way: str) -> None:
        pipe.send(way)
        for ids in cache.batches(_BATCH):
            count = len(ids) if way == "connection" else pipe.recv()
            for slot in range(count):
                into = cache.pool.view(0, slot)
                if way == "connection":
                    channel.receive_into(into)
                else:
                    memory.copy_block(0, slot, into)
            pipe.send("taken")
            cache.copier.into(0, ids, int32(range(count)))

    def direct() -> None:
        for ids in cache.batches(_LARGE_BATCH):
            pieces = find_pieces(cache.layout, ids, remote.groups[0], ids)
            assert pieces is not None
            read = Read([ReadPart(remote, WrittenPieces(pieces))], lambda: True)
            cache.agent.read(read)
            while read.good is None:
                time.sleep(5e-5)
            assert read.good

    ways: dict[str, Callable[[], None]] = {
        "connection": lambda: staged("connection"),
        "shared memory": lambda: staged("shared memory"),
        "nixl": direct,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + options.rounds):
        for way, run in ways.items():
            cache.tensor.zero_()
            begun = time.perf_counter()
            run()
            if turn:  # the first connects, and touches pages
                seconds[way].append(time.perf_counter() - begun)
            assert (cache.tensor == 7).all(), way
    pipe.send("end")
    base = statistics.median(seconds["connection"])
    for way, found in seconds.items():
        median = statistics.median(found)
        rate = options.blocks * size / median / 1e9
        print(f"{way:14} {rate:6.2f} GB/s  {base / median:5.2f} x")
    process.join(10)
    cache.agent.close(5.0)


if __name__ == "__main__":
    main()
