"""The choice of a replica: prefix hits close to those of one cache, and even load."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from quire.arrays import Int32, int32
from quire.cache.block_hash import next_hash, root_hash
from quire.config import EngineArgs
from quire.engine.loop.stats import EngineStats, added
from quire.engine.loop.telemetry import Histogram
from quire.engine.process.placement import PIECE, Placement, ReplicaRouter, keys_of
from quire.engine.process.replicas import environments
from quire.errors import ConfigError

BLOCK = 16


class Cache:
    """The prefixes that an engine has computed, by block; nothing is ever evicted."""

    def __init__(self) -> None:
        self._held: set[bytes] = set()
        self.hits = 0

    def compute(self, tokens: Int32) -> None:
        key, found = root_hash((0, "")), True
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = next_hash(key, tokens[end - BLOCK : end].tobytes())
            found &= key in self._held
            self.hits += BLOCK * found
            self._held.add(key)


def dialogues(seed: int) -> list[Int32]:
    """Returns prompts of interleaved dialogues with a few system prompts."""
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(30_000) for _ in range(length)]

    systems = [text(300), text(500), text(900)]
    told = [list(draw.choice(systems)) for _ in range(60)]
    prompts = []
    turns = [index for index in range(60) for _ in range(draw.randint(2, 8))]
    draw.shuffle(turns)
    for index in turns:
        told[index] += text(draw.randint(20, 200))
        prompts.append(int32(told[index]))
        told[index] += text(draw.randint(20, 300))
    return prompts


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_hits_are_close_to_those_of_one_cache(replicas: int, seed: int) -> None:
    router, one = ReplicaRouter(replicas), Cache()
    caches = [Cache() for _ in range(replicas)]
    computed = [0] * replicas
    running: deque[Placement] = deque()
    for prompt in dialogues(seed):
        placement = router.place(prompt, "", range(replicas))
        running.append(placement)
        one.compute(prompt)
        before = caches[placement.index].hits
        caches[placement.index].compute(prompt)
        computed[placement.index] += len(prompt) - (caches[placement.index].hits - before)
        if len(running) > 6:
            running[3].answered()
            running.popleft().end()
    assert sum(cache.hits for cache in caches) >= 0.95 * one.hits
    assert max(computed) <= 1.7 * sum(computed) / replicas


def test_load_outweighs_a_prefix() -> None:
    router = ReplicaRouter(2)
    prompt = int32(range(4 * PIECE))
    places = [router.place(prompt, "", (0, 1)) for _ in range(12)]
    assert {place.index for place in places} == {0, 1}
    for place in places:
        place.end()
        place.end()
    assert [(each.running, each.waiting) for each in router.replicas] == [(0, 0), (0, 0)]


def test_tokens_held_by_a_replica_are_bounded_and_may_be_lost() -> None:
    router = ReplicaRouter(2)
    first, second = int32(range(3 * PIECE)), int32(range(1000, 1000 + 3 * PIECE))
    router.replicas[0].has_room(4 * PIECE)
    for prompt in (first, second):
        router.place(prompt, "", (0,)).end()
    held = [router.replicas[0].held(keys_of(prompt, "")) for prompt in (first, second)]
    assert held == [PIECE, 3 * PIECE]
    assert router.replicas[0].held(keys_of(second, "salt")) == 0
    router.replicas[0].forget()
    assert router.replicas[0].held(keys_of(second, "")) == 0


def test_empty_routers_place_prompts_alike() -> None:
    prompts = [int32(np.random.default_rng(seed).integers(0, 999, 100)) for seed in range(20)]
    chosen = [
        [ReplicaRouter(4).place(prompt, "", range(4)).index for prompt in prompts] for _ in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 1


def test_only_allowed_replicas_are_chosen() -> None:
    router = ReplicaRouter(3)
    for index in (2, 0, 2):
        assert router.place(int32(range(100)), "", (index,)).index == index


def test_stats_are_added_up() -> None:
    one = EngineStats(running=1, blocks_used=[2, 3], histograms={"a": Histogram((1.0,), [1, 2], 4)})
    total = added([one, EngineStats(running=4, blocks_used=[1, 1], histograms=one.histograms)])
    assert (total.running, total.blocks_used, total.tiers) == (5, [3, 4], None)
    assert total.histograms["a"] == Histogram((1.0,), [2, 4], 8.0)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_replicas_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments(EngineArgs(), 1) == [{}]
    assert environments(EngineArgs(device="cpu"), 2) == [{}, {}]
    pairs = [each["CUDA_VISIBLE_DEVICES"] for each in environments(EngineArgs(), 4)]
    assert pairs == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, GPU-a,5,4")
    pairs = [
        each["CUDA_VISIBLE_DEVICES"] for each in environments(EngineArgs(tensor_parallel_size=2), 2)
    ]
    assert pairs == ["7,GPU-a", "5,4"]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("count", "settings", "reason"),
    [
        (5, {}, "need 5, but 4 are visible"),
        (3, {"tensor_parallel_size": 2}, "on 2 GPUs each need 6"),
        (2, {"device": "cuda:1"}, "device='cuda:1' names only one"),
        (2, {"host_cache_gb": 1.0, "disk_cache": "/x"}, "disk_cache is for one engine"),
    ],
)
def test_impossible_replica_counts_are_refused(
    count: int, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        environments(EngineArgs(**settings), count)
