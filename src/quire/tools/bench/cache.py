"""Benchmark of the prefix cache: CPU time per request of a full cache, by prompt length.

Only bookkeeping is timed. No KV is moved. The cache is full of prompts of one length. A new request
evicts others. A known request shares a cached prompt up to the middle of one of its last blocks.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.plan import KVGroup

TARGET_US = 20.0
"""Targets of match, insert and evict per request, in microseconds."""

_BLOCK = 16
_SPACE = (0, "")
_BATCH = 20
_OWN = 24
"""Number of a request's tokens after the cached ones."""


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache full of prompts of `length` tokens, of which the first `shared` are the same in
    all."""

    name: str
    length: int
    shared: int = 0


CASES = (
    CacheCase("1k", 1024),
    CacheCase("4k", 4096),
    CacheCase("32k", 32768),
    # Conversations with one system prompt that ends inside a block: all are children of one node.
    CacheCase("hub", 2600, shared=1000),
)


class _CacheBench:
    """A block manager whose cache is full of one case's prompts."""

    def __init__(self, case: CacheCase, num_blocks: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._case = case
        self._lines: Int32 = np.zeros((1, case.length + _BLOCK), dtype=np.int32)
        group = KVGroup(layers=(0,), tokens_per_block=_BLOCK)
        self.manager = BlockManager([group], [num_blocks], 1, case.length + _BLOCK)
        self._shared = self._draw(case.shared)
        self._prompts: deque[Int32] = deque()
        while not self.manager.evicted:
            self.new()
        # The newest half of the prompts stays cached, because eviction takes the oldest first.
        self._prompts = deque(self._prompts, maxlen=max(1, len(self._prompts) // 2))

    def _draw(self, count: int) -> Int32:
        return self._random.integers(0, 32_000, count, dtype=np.int32)

    def new(self) -> dict[str, float]:
        """Times a request that shares only the common beginning, and ends inside a block."""
        own = self._case.length - self._case.shared - 5
        prompt = np.concatenate([self._shared, self._draw(own)])
        times = self._run(prompt, own)
        self._prompts.append(prompt)
        return times

    def known(self) -> dict[str, float]:
        """Times a request that differs from a cached one from the middle of one of its last blocks
        on.
        """
        prompt = self._prompts[int(self._random.integers(len(self._prompts)))]
        cut = len(prompt) - int(self._random.integers(_OWN, 2 * _OWN))
        return self._run(np.concatenate([prompt[:cut], self._draw(_OWN)]), _OWN)

    def _run(self, tokens: Int32, own: int) -> dict[str, float]:
        """Times a request from its arrival to its end. Returns the µs of each part.

        Args:
            own: number of the last tokens that are not cached.
        """
        manager, length = self.manager, len(tokens)
        lane, ends = int32([0]), int32([length])
        self._lines[0, :length] = tokens
        lacking = -(-own // _BLOCK) + 1 - manager.groups[0].pool.num_free
        clock = time.perf_counter_ns
        began = clock()
        if lacking > 0:  # Admission would evict, too. Here it is timed separately.
            manager.evict(0, lacking)
        evicted = clock()
        match = manager.match(_SPACE, tokens, length - 1)
        matched = clock()
        admitted = manager.admit(
            0, _SPACE, match, computed=match.length, chunk_end=length, known=length, spare=0
        )
        booked = clock()
        manager.insert(lane, self._lines, ends, ahead=True)
        inserted = clock()
        manager.take_appends()
        manager.take_copies()
        released = clock()
        manager.release(0, tokens, length)
        ended = clock()
        if not admitted or (self._prompts and length - match.length > own):
            raise RuntimeError("the benchmark's cache lost a prefix")
        return {
            "evict": (evicted - began) / 1e3,
            "match": (matched - evicted) / 1e3,
            "admit": (booked - matched) / 1e3,
            "insert": (inserted - booked) / 1e3,
            "release": (ended - released) / 1e3,
        }


def measure(case: CacheCase, *, num_blocks: int, requests: int, seed: int = 0) -> dict[str, float]:
    """Measures matching, sharing and copying for known requests, and inserting, evicting and
    releasing for new ones, in µs.

    Each time is the best mean over 20 requests, because the machine may be shared. Medians are over
    all requests."""
    bench = _CacheBench(case, num_blocks, seed)
    new, known = [], []
    for _ in range(requests):
        new.append(bench.new())
        known.append(bench.known())
    found: dict[str, float] = {
        "tokens": case.length,
        "cached_blocks": bench.manager.usage()[0].cached,
        "nodes": bench.manager.tree.num_nodes,
    }
    for name, times, part in (
        ("match", known, "match"),
        ("insert", new, "insert"),
        ("evict", new, "evict"),
        ("admit_known", known, "admit"),
        ("admit_new", new, "admit"),
        ("release", new, "release"),
    ):
        each = np.array([t[part] for t in times])
        batches = each[: requests // _BATCH * _BATCH].reshape(-1, _BATCH)
        found[f"{name}_us"] = float(batches.mean(axis=1).min())
        found[f"{name}_median_us"] = float(np.median(each))
    within = all(found[name] <= TARGET_US for name in ("match_us", "insert_us", "evict_us"))
    return {**found, "within_target": float(within)}


def run(
    cases: Sequence[CacheCase] = CASES, *, num_blocks: int = 1_000_000, requests: int = 200
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields each case's name and metrics as soon as they are measured."""
    for case in cases:
        # A garbage collection would count as time of the part during which it happens.
        gc.collect()
        gc.disable()
        try:
            yield case.name, measure(case, num_blocks=num_blocks, requests=requests)
        finally:
            gc.enable()


def table(records: Sequence[tuple[str, dict[str, float]]]) -> str:
    """Returns the records of `run` as text."""
    parts = ("match", "insert", "evict", "admit_known", "admit_new", "release")
    lines = ["µs per request".ljust(16) + "".join(part.rjust(12) for part in parts)]
    for name, found in records:
        lines.append(name.ljust(16) + "".join(f"{found[f'{p}_us']:12.1f}" for p in parts))
        met = "met" if found["within_target"] else "missed"
        lines.append(f"{'':16}target of match, insert and evict {TARGET_US:.0f} µs: {met}")
    return "\n".join(lines)
