"""Snapshots show the engine, and stay small."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.arrays import int32
from quire.cache.block_tables import BlockTables
from quire.cache.inspect import CACHED, FREE, summarize_pool, summarize_tree
from quire.config import SchedulerConfig
from quire.engine.loop.calls import SNAPSHOT
from quire.engine.loop.core import EngineCore
from quire.engine.loop.snapshot import (
    MOST_CELLS,
    MOST_ROWS,
    MOST_RUNNING,
    MOST_RUNS,
    MOST_WAITING,
    take_snapshot,
)
from quire.features.call import decode_body, encode_body
from quire.plan import KVGroup
from quire.sampling_params import SamplingParams
from tests.fakes import FakeExecutor

GROUP = KVGroup(layers=(0,), tokens_per_block=4)


def engine(num_blocks: int = 64, groups: Any = (GROUP,), **config: Any) -> EngineCore:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, **config}
    executor = FakeExecutor(groups, [num_blocks] * len(groups), salt_of=lambda _: "")
    args = SimpleNamespace(seed=0, trace_dir=None, logprobs_mode="raw_logprobs")
    resolved = SimpleNamespace(args=args, scheduler=SchedulerConfig(**settings))
    return EngineCore(resolved, executor)  # type: ignore[arg-type]


def add(core: EngineCore, name: str, tokens: list[int], **params: Any) -> None:
    params = {"max_tokens": 20, "ignore_eos": True, **params}
    core.add(name, int32(tokens), SamplingParams(**params), max_total=len(tokens) + 20)


def finish(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def test_cells_are_free_cached_or_a_lanes() -> None:
    tables = BlockTables(GROUP, 10, 3, 64)
    tables.append(int32([0, 2]), int32([2, 1]), 3)
    tables.pool.hold(int32([1]))
    kept = tables.pool.take(1)
    found = summarize_pool(tables, 100)
    assert found.per_cell == 1
    assert found.owner.tolist() == [0, 0, 2, CACHED] + [FREE] * 6
    assert found.holders.tolist() == [1, 2, 1, 1] + [0] * 6
    assert found.filled.tolist() == [1] * 4 + [0] * 6
    tables.pool.drop(kept)
    assert summarize_pool(tables, 100).owner[3] == FREE


@pytest.mark.parametrize(
    ("used", "cells", "per_cell"), [(0, 256, 1), (256, 256, 1), (257, 512, 1), (1500, 1024, 2)]
)
def test_only_the_used_part_has_cells(used: int, cells: int, per_cell: int) -> None:
    tables = BlockTables(GROUP, 9000, 2, 36000)
    tables.pool.take(used)
    found = summarize_pool(tables, 1024)
    assert (found.num_blocks, len(found.owner), found.per_cell) == (9000, cells, per_cell)
    assert found.filled.sum() == used


def test_a_large_pool_is_summarized_in_larger_cells() -> None:
    tables = BlockTables(GROUP, 1001, 2, 4004)
    tables.append(int32([1]), int32([5]), 5)
    tables.pool.free(tables.pool.take(996)[:-1])  # only the last one stays
    found = summarize_pool(tables, 100)
    assert found.per_cell == 11
    assert len(found.owner) == 91
    assert found.owner.tolist() == [1] + [FREE] * 89 + [CACHED]
    assert found.filled[:2].tolist() == [5, 0]
    assert found.holders[0] == 1


def test_an_idle_engine() -> None:
    snapshot = take_snapshot(engine(), True)
    assert (snapshot.running, snapshot.waiting, snapshot.step) == ([], [], None)
    assert snapshot.tree_nodes == 0
    assert (snapshot.pools[0].owner == FREE).all()


def test_requests_step_blocks_and_tree_are_shown() -> None:
    core = engine()
    prefix = list(range(8))
    add(core, "1", [*prefix, 20, 21])
    add(core, "2", [*prefix, 30, 31, 32, 33])
    for _ in range(5):
        add(core, "w" + str(_), [9, 9])
    core.step()
    core.step()
    snapshot = take_snapshot(core, True)
    first, second = snapshot.running[:2]
    assert (first.id, first.prompt, first.known, first.cached) == ("1", 10, 12, 0)
    assert first.first is not None
    assert (second.known, second.cached) == (14, 8)
    assert [each.id for each in snapshot.waiting] == ["w2", "w3", "w4"]
    assert snapshot.stats.waiting == 3
    assert snapshot.step is not None
    assert snapshot.step.generating == 4
    assert snapshot.step.prompt_tokens == 0
    assert {row.id for row in snapshot.step.rows} == {"1", "2", "w0", "w1"}
    assert snapshot.prompt_step is not None
    assert snapshot.prompt_step.number == 0
    assert [row.tokens for row in snapshot.prompt_step.rows if row.prompt] == [10, 4, 2, 2]
    assert [number for number, _ in snapshot.firsts] == [1, 2, 3, 4]
    (pool,) = snapshot.pools
    owned = np.bincount(pool.owner[pool.owner >= 0], minlength=4)
    assert owned.sum() == snapshot.stats.blocks_used[0]
    assert owned[second.lane] == second.blocks
    tops = [branch for branch in snapshot.tree if branch.parent == 0]
    assert {tuple(top.tokens.tolist())[:8] for top in tops if top.tokens is not None} == {
        tuple(prefix)
    }
    decoded = decode_body(encode_body(snapshot), SNAPSHOT.answer)
    assert decoded.pools[0].owner.tolist() == pool.owner.tolist()
    finish(core)
    after = take_snapshot(core, False)
    assert after.running == []
    assert all(branch.users == 0 for branch in after.tree)
    assert (after.pools[0].owner == CACHED).any()


def test_tokens_are_left_out_unless_asked_for() -> None:
    core = engine()
    add(core, "1", list(range(12)))
    finish(core)
    assert all(branch.tokens is None for branch in take_snapshot(core, False).tree)
    assert any(branch.tokens is not None for branch in take_snapshot(core, True).tree)


def test_a_run_without_a_fork_is_one_branch_and_forks_are_apart() -> None:
    core = engine()
    add(core, "1", [*range(16), 20, 20, 20, 20], max_tokens=1)
    finish(core)
    add(core, "2", [*range(16), 30, 30, 30, 30], max_tokens=1)
    finish(core)
    root, trunk, *leaves = summarize_tree(core.scheduler.blocks.tree, 100, 24)
    assert (root.parent, root.length) == (-1, 0)
    assert (trunk.parent, trunk.tokens.tolist()) == (0, list(range(16)))
    assert [leaf.parent for leaf in leaves] == [1, 1]
    assert sorted(leaf.tokens.tolist()[0] for leaf in leaves) == [20, 30]


def test_snapshots_are_bounded() -> None:
    core = engine(
        num_blocks=40_000, max_num_seqs=512, max_num_batched_tokens=4096, max_model_len=256
    )
    for i in range(3000):
        add(core, str(i), [i % 50, i // 50, *range(10)])
    for _ in range(6):
        core.step()
    snapshot = take_snapshot(core, True)
    assert snapshot.stats.running == 512
    assert len(snapshot.running) == MOST_RUNNING
    assert len(snapshot.waiting) == MOST_WAITING
    assert snapshot.step is not None
    assert len(snapshot.step.rows) == MOST_ROWS
    assert snapshot.step.generating + snapshot.step.prompt_tokens > MOST_ROWS
    assert len(snapshot.tree) <= MOST_RUNS
    assert sum(branch.hidden for branch in snapshot.tree) > 0
    assert len(snapshot.pools[0].owner) <= MOST_CELLS
    assert len(bytes(encode_body(snapshot))) < 150_000


def test_every_group_has_its_pool() -> None:
    window = KVGroup(layers=(1,), kind="window", tokens_per_block=4, window=8)
    core = engine(groups=(GROUP, window))
    add(core, "1", list(range(20)))
    core.step()
    pools = take_snapshot(core, False).pools
    assert [pool.window for pool in pools] == [None, 8]
    assert all((pool.owner >= 0).any() for pool in pools)
