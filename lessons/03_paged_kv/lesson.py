"""Paged KV: blocks on demand in place of room for the longest sequence.

Run it from the repository's root: python -m lessons 3 [--requests 300] [--plot FILE]
"""

from __future__ import annotations

import importlib
from collections import deque

import numpy as np
import torch
from torch import Tensor

from lessons import plots
from lessons.common import Loaded, check, engine, load, parser, skewed_lengths, table
from quire import SamplingParams

lesson_01 = importlib.import_module("lessons.01_generation.lesson")
lesson_02 = importlib.import_module("lessons.02_kv_cache.lesson")
LONGEST = 2048


class Blocks:
    """A list of free blocks, and a table of blocks for each sequence."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.free = size, list(range(count))
        self.tables: dict[int, list[int]] = {}

    def grow(self, sequence: int, length: int) -> None:
        """Gives a sequence blocks until it has room for `length` tokens."""
        own = self.tables.setdefault(sequence, [])
        while len(own) * self.size < length:
            own.append(self.free.pop())

    def release(self, sequence: int) -> None:
        self.free += self.tables.pop(sequence)


class PagedQwen3(lesson_01.Qwen3):  # type: ignore[name-defined,misc]
    """The model of lesson 1 over one pool of blocks, for any number of sequences.

    kv: keys and values, [2, layers, blocks, block size, kv_heads, head_dim].
    """

    def __init__(self, model: Loaded, blocks: Blocks) -> None:
        super().__init__(model)
        shape = len(blocks.free), blocks.size, self.kv_heads, self.head_dim
        self.kv, self.blocks = torch.zeros(2, self.layers, *shape), blocks

    def step(self, sequence: int, ids: Tensor, start: int) -> Tensor:
        self.blocks.grow(sequence, start + len(ids))
        self.table = torch.tensor(self.blocks.tables[sequence])
        return self.forward(ids, start)

    def attention(self, x: Tensor, layer: int, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x, layer, positions)
        # Position p lies in the table's block p // size, at place p % size.
        block, place = self.table[positions // self.blocks.size], positions % self.blocks.size
        self.kv[:, layer, block, place] = torch.stack((k, v)).transpose(1, 2)
        seen = torch.arange(int(positions[-1]) + 1)
        # A copy of all that the sequence has; a kernel reads the blocks where they lie (lesson 5).
        keys, values = self.kv[:, layer, self.table].flatten(1, 2)[:, : len(seen)].transpose(1, 2)
        return self.attend(q, keys, values, positions[:, None] >= seen, layer)


def logit_error(model: Loaded) -> float:
    """Returns the largest difference from a cache that is one tensor, for two sequences whose
    blocks alternate."""
    paged, start, worst = PagedQwen3(model, Blocks(count=12, size=8)), 0, 0.0
    plain = [lesson_02.CachedQwen3(model, 48) for _ in range(2)]
    for count in (11, 1, 1, 9, 1):
        for sequence in range(2):
            ids = torch.randint(0, model.config["vocab_size"], (count,))
            difference = paged.step(sequence, ids, start) - plain[sequence].step(ids)
            worst = max(worst, float(difference.abs().max()))
        start += count
    return worst


def simulate(size: int, memory: int, requests: list[tuple[int, int]]) -> tuple[float, float]:
    """Runs requests in a memory of so many tokens. Returns the share of booked memory that holds
    tokens, and how many requests ran at once, as means over the steps."""
    blocks, waiting = Blocks(memory // size, size), deque(enumerate(requests))
    running: dict[int, tuple[int, int]] = {}
    held = booked = steps = rows = 0
    while waiting or running:
        # A request starts if all that run could grow to their ends.
        ends = sum(-(-end // size) for _, end in running.values())
        while waiting and (ends := ends - (-waiting[0][1][1] // size)) <= memory // size:
            name, lengths = waiting.popleft()
            running[name] = lengths
        for name, (length, _) in running.items():
            blocks.grow(name, length)
            held += length
        booked += size * sum(map(len, blocks.tables.values()))
        steps, rows = steps + 1, rows + len(running)
        for name, (length, end) in list(running.items()):
            running[name] = length + 1, end
            if length == end:
                blocks.release(name)
                del running[name]
    return held / booked, rows / steps


def booked_by_engine(model: Loaded, size: int) -> tuple[float, list[list[int]]]:
    """Returns the shipped engine's share of booked memory that holds tokens, and its outputs."""
    settings = {"block_size": size, "num_kv_blocks": 8192 // size, "max_model_len": 512}
    core = engine(model, enable_prefix_caching=False, **settings)
    params, added, held, booked = SamplingParams(temperature=0.0, ignore_eos=True), [], 0, 0
    for length in (20, 45, 70, 120, 160, 200):
        prompt = np.arange(100, 100 + length, dtype=np.int32)
        added += core.add(str(length), prompt, params, max_total=length + 8)
    while core.has_work():
        core.step()
        held += sum(request.computed for request in core.scheduler.requests())
        booked += size * core.scheduler.blocks.usage()[0].used
    core.shutdown()
    return held / booked, [request.output.tolist() for request in added]


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=300, help="requests of the simulation")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, lengths = load(args), skewed_lengths(args.requests)
    sizes = [1, 4, 16, 64, 256, LONGEST]
    error = logit_error(model)
    check(error < 1e-3, f"blocks in any order give the same logits: they differ by {error:.1e}\n")
    found = [simulate(size, 4 * LONGEST, lengths) for size in sizes]
    rows = [[size, 100 * used, batch] for size, (used, batch) in zip(sizes, found, strict=True)]
    print(table(["block size", "% of booked memory used", "requests at once"], rows), "\n")
    (_, used, batch), (_, reserved, few) = rows[2], rows[-1]
    check(used >= 85, f"blocks of 16 are {used:.1f} % full; room for the longest {reserved:.1f} %")
    check(batch > 2 * few, f"the same memory holds {batch / few:.1f} x as many requests\n")
    shipped = {size: booked_by_engine(model, size) for size in (16, 64, 256)}
    share = {size: 100 * used for size, (used, _) in shipped.items()}
    print(table(["the engine's block size", "% used"], share.items()), "\n")
    check(share[16] >= 85, f"the engine's blocks of 16 are {share[16]:.1f} % full")
    check(shipped[16][1] == shipped[256][1], "and their size changes no token")
    series = {"used": [row[1] for row in rows]}
    plots.lines(args.plot, sizes, series, ("tokens in a block", "% of booked memory"), log="x")


if __name__ == "__main__":
    main()
