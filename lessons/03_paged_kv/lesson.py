"""Paged KV: blocks on demand in place of room for the longest sequence.

Run it from the repository's root: python -m lessons 3 [--mine FILE] [--requests 300] [--plot FILE]
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from lessons import mine, plots
from lessons.common import Loaded, check, engine, load, own_model, parser, skewed_lengths, table
from quire import SamplingParams

LONGEST = 2048


def logit_error(model: mine.Model, vocab: int) -> tuple[float, dict[str, list[int]]]:
    """Runs two sequences whose blocks alternate. Returns the largest difference of their logits
    from those with a cache of one tensor each, and the tables."""
    paged, start, worst = mine.PagedCache(model, count=12, size=8), 0, 0.0
    plain = {name: mine.Cache(model, 48) for name in ("a", "b")}
    for name in plain:
        paged.open(name, [])
    for count in (11, 1, 1, 9, 1):
        for name, cache in plain.items():
            ids = torch.randint(0, vocab, (count,))
            paged.begin([(name, start, count)])
            x = model.forward(ids, torch.arange(start, start + count), paged)
            difference = model.logits(x[-1]) - mine.extend(model, ids.tolist(), cache)
            worst = max(worst, float(difference.abs().max()))
        start += count
    return worst, paged.tables


def simulate(size: int, memory: int, requests: list[tuple[int, int]]) -> tuple[float, float]:
    """Runs requests in a memory of so many tokens. Returns the share of booked memory that holds
    tokens, and how many requests ran at once, as means over the steps."""
    blocks, waiting = mine.Blocks(memory // size, size), deque(enumerate(requests))
    running: dict[str, tuple[int, int]] = {}
    held = booked = steps = rows = 0
    while waiting or running:
        # A request starts if all that run could grow to their ends.
        ends = sum(-(-end // size) for _, end in running.values())
        while waiting and (ends := ends - (-waiting[0][1][1] // size)) <= memory // size:
            number, lengths = waiting.popleft()
            running[str(number)] = lengths
            blocks.open(str(number), [])
        for name, (length, _) in running.items():
            blocks.grow(name, length)
            held += length
        booked += size * sum(map(len, blocks.tables.values()))
        steps, rows = steps + 1, rows + len(running)
        for name, (length, end) in list(running.items()):
            running[name] = length + 1, end
            if length == end:
                blocks.close(name, [])
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


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=300, help="requests of the simulation")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, lengths = load(args), skewed_lengths(args.requests)
    sizes = [1, 4, 16, 64, 256, LONGEST]
    error, tables = logit_error(own_model(model), model.config["vocab_size"])
    print(table(["sequence", "its blocks"], [[n, str(blocks)] for n, blocks in tables.items()]))
    check(error < 1e-3, f"blocks in any order give the same logits: they differ by {error:.1e}\n")
    found = [simulate(size, 4 * LONGEST, lengths) for size in sizes]
    rows = [[size, 100 * used, batch] for size, (used, batch) in zip(sizes, found, strict=True)]
    print(table(["block size", "% of booked memory used", "requests at once"], rows))
    (_, used, batch), (_, reserved, few) = rows[2], rows[-1]
    check(used >= 85, f"blocks of 16 are {used:.1f} % full; room for the longest {reserved:.1f} %")
    check(batch > 2 * few, f"the same memory holds {batch / few:.1f} x as many requests\n")
    shipped = {size: booked_by_engine(model, size) for size in (16, 64, 256)}
    share = {size: 100 * used for size, (used, _) in shipped.items()}
    print(table(["the engine's block size", "% used"], share.items()))
    check(share[16] >= 85, f"the engine's blocks of 16 are {share[16]:.1f} % full")
    check(shipped[16][1] == shipped[256][1], "and their size changes no token")
    series = {"used": [row[1] for row in rows]}
    plots.lines(args.plot, sizes, series, ("tokens in a block", "% of booked memory"), log="x")


if __name__ == "__main__":
    main()
