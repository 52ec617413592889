"""Prefix caching: what an earlier prompt left in the cache serves the next one.

Run it from the repository's root: python -m lessons 7 [--longest 32768] [--plot FILE]
"""

from __future__ import annotations

import hashlib
import importlib
import timeit
from collections.abc import Iterator
from functools import partial
from itertools import takewhile

import numpy as np
import torch

from lessons import plots
from lessons.common import Loaded, check, engine, load, parser, table
from quire import SamplingParams
from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.plan import KVGroup

radix = importlib.import_module("lessons.07_prefix_caching.radix")
SIZE, SPACE = 16, (0, "")


class HashedBlocks:
    """Whole blocks by the hash of all tokens up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}

    def hashes(self, tokens: Int32) -> Iterator[bytes]:
        last = b""
        for end in range(SIZE, len(tokens) + 1, SIZE):
            # The hash before goes in: equal tokens behind other tokens have other keys and values.
            key = last + tokens[end - SIZE : end].tobytes()
            yield (last := hashlib.blake2b(key, digest_size=16).digest())

    def insert(self, tokens: Int32) -> None:
        for each in self.hashes(tokens):
            self.blocks.setdefault(each, len(self.blocks))

    def match(self, tokens: Int32) -> int:
        """Returns how many tokens of a prompt are known."""
        return SIZE * sum(1 for _ in takewhile(self.blocks.__contains__, self.hashes(tokens)))


class Shipped:
    """The engine's block manager, with one lane that prompts go through."""

    def __init__(self, blocks: int, longest: int) -> None:
        self.manager = BlockManager([KVGroup(layers=(0,))], [blocks], 1, longest)

    def match(self, tokens: Int32) -> int:
        return self.manager.match(SPACE, tokens, len(tokens)).length

    def insert(self, tokens: Int32) -> None:
        n, match = len(tokens), self.manager.match(SPACE, tokens, len(tokens))
        ends = {"computed": match.length, "chunk_end": n, "known": n}
        self.manager.admit(0, SPACE, match, spare=0, **ends)
        self.manager.insert(int32([0]), tokens[None], int32([n]), ahead=True)
        self.manager.take_copies()  # as a plan does
        self.manager.release(0, tokens, n)  # its blocks stay in the tree


def conversation(model: Loaded, caching: bool) -> tuple[list[int], list[list[int]]]:
    """Returns how many tokens of three turns' prompts the engine computes, and its answers."""
    core, draw = engine(model, enable_prefix_caching=caching), np.random.default_rng(0)
    text, computed, answers = int32([]), [], []
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for turn in range(3):
        text = np.concatenate([text, draw.integers(100, 5000, 150, dtype=np.int32)])
        (request,) = core.add(str(turn), text, params, max_total=len(text) + 8)
        while core.has_work():
            core.step()
        computed.append(len(text) - request.num_cached_tokens)
        answers.append(request.output.tolist())
        text = np.concatenate([text, request.output])
    core.shutdown()
    return computed, answers


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--longest", type=int, default=32768, help="tokens of the longest prompt")
    plots.add_option(options)
    args = options.parse_args(arguments)
    model, draw, rows = load(args), np.random.default_rng(0), []
    caches = HashedBlocks(), radix.RadixTree(), Shipped(3 * args.longest // SIZE, args.longest)
    for size in [1024 * 2**i for i in range(6) if 1024 * 2**i <= args.longest]:
        known, other = draw.integers(0, 30000, (2, size), dtype=np.int32)
        shared = size - size // 50  # the last part differs, from the middle of a block on
        prompt = np.concatenate([known[:shared], other[shared:]])
        for cache in caches:
            cache.insert(known)
        times = [1e6 * min(timeit.repeat(partial(c.match, prompt), number=1)) for c in caches]
        rows.append([size, radix.common(known, prompt), *(c.match(prompt) for c in caches), *times])
    names = "hashed", "tree", "engine"
    headers = ["prompt", "shared", *names, *(f"{name}, µs" for name in names)]
    print(table(headers, rows), "\n")
    whole = all(row[2] == row[1] // SIZE * SIZE for row in rows)
    check(whole, "hashed blocks find all whole blocks that prompts share")
    check(all(row[1] == row[3] == row[4] for row in rows), "both trees find every token\n")

    (all_of_it, plain), (new, same) = (conversation(model, caching) for caching in (False, True))
    turns = zip(range(1, 4), all_of_it, new, strict=True)
    print(table(["turn", "tokens computed, no cache", "with it"], turns), "\n")
    check(plain == same, "the engine's answers are the same with and without")
    check(2 * sum(new[1:]) < sum(all_of_it[1:]), "later turns compute what is new in them")
    series = {name: [row[5 + i] for row in rows] for i, name in enumerate(names)}
    plots.lines(args.plot, [row[0] for row in rows], series, ("tokens", "µs to match"), log="xy")


if __name__ == "__main__":
    main()
