"""Prefix caching: what an earlier prompt left in the cache serves the next one.

Run it from the repository's root: python -m lessons 7 [--mine FILE] [--longest 32768] [--plot FILE]
"""

from __future__ import annotations

import importlib
import timeit
from collections.abc import Callable
from functools import partial
from itertools import takewhile

import numpy as np

from lessons import mine, plots
from lessons.common import Loaded, check, engine, load, own_model, parser, table
from quire import SamplingParams
from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.plan import KVGroup

radix = importlib.import_module("lessons.07_prefix_caching.radix")
SIZE, SPACE = 16, (0, "")
Conversation = tuple[list[int], list[list[int]]]
"""Tokens of each turn's prompt that were computed, and the answers."""


class HashedBlocks:
    """Whole blocks by the hash of all tokens up to their end."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, int] = {}

    def insert(self, tokens: Int32) -> None:
        for each in mine.block_keys(tokens.tolist(), SIZE):
            self.blocks.setdefault(each, len(self.blocks))

    def match(self, tokens: Int32) -> int:
        """Returns how many tokens of a prompt are known."""
        keys = mine.block_keys(tokens.tolist(), SIZE)
        return SIZE * sum(1 for _ in takewhile(self.blocks.__contains__, keys))


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


def turns(model: Loaded, answer: Callable[[str, Int32], tuple[int, list[int]]]) -> Conversation:
    """Plays three turns. answer: returns how many tokens were found, and the answer's tokens."""
    draw, text = np.random.default_rng(0), int32([])
    computed, answers = [], []
    for turn in range(3):
        text = np.concatenate([text, draw.integers(100, 5000, 150, dtype=np.int32)])
        found, tokens = answer(str(turn), text)
        computed.append(len(text) - found)
        answers.append(tokens)
        text = np.concatenate([text, int32(tokens)])
    return computed, answers


def own_conversation(model: Loaded, cache: type[mine.PagedCache]) -> Conversation:
    own = own_model(model)
    core = mine.Engine(own, cache(own, count=64))

    def answer(name: str, text: Int32) -> tuple[int, list[int]]:
        request = mine.Request(name, text.tolist(), len(text) + 8)
        core.add(request)
        core.admit()
        found = request.computed
        core.run()
        return found, request.tokens[len(text) :]

    return turns(model, answer)


def shipped_conversation(model: Loaded) -> Conversation:
    core, params = engine(model), SamplingParams(temperature=0.0, ignore_eos=True)

    def answer(name: str, text: Int32) -> tuple[int, list[int]]:
        (request,) = core.add(name, text, params, max_total=len(text) + 8)
        while core.has_work():
            core.step()
        return request.num_cached_tokens, request.output.tolist()

    found = turns(model, answer)
    core.shutdown()
    return found


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
    print(table(headers, rows))
    whole = all(row[2] == row[1] // SIZE * SIZE for row in rows)
    check(whole, "hashed blocks find all whole blocks that prompts share")
    check(all(row[1] == row[3] == row[4] for row in rows), "both trees find every token\n")

    plain, ours = (own_conversation(model, cache) for cache in (mine.PagedCache, mine.PrefixCache))
    theirs = shipped_conversation(model)
    numbered = zip(range(1, 4), plain[0], ours[0], theirs[0], strict=True)
    print(table(["turn", "tokens computed, no cache", "mine", "Quire"], numbered))
    check(plain[1] == ours[1] == theirs[1], "the answers are the same with and without a cache")
    later, whole_text = sum(ours[0][1:]), sum(plain[0][1:])
    check(2 * later < whole_text, f"later turns compute {later} tokens, not {whole_text}")
    check(sum(theirs[0]) <= sum(ours[0]), "Quire also reuses a block that is shared in part")
    series = {name: [row[5 + i] for row in rows] for i, name in enumerate(names)}
    plots.lines(args.plot, [row[0] for row in rows], series, ("tokens", "µs to match"), log="xy")


if __name__ == "__main__":
    main()
