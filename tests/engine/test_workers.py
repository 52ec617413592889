"""One worker for each rank: the same plans, the same tokens, the same masks."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.arrays import int32
from quire.engine.ranks.workers import Ranks
from quire.errors import ConfigError, EngineDeadError
from quire.executor import Capacity
from quire.plan import RowFlag
from quire.sampling_params import SamplingParams
from tests.tiny_engine import TINY, VOCAB, Job, TinyEngine, model_folder, random_prompts

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12, n=2),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, max_tokens=12, min_tokens=3),
]
JOBS = [
    Job(prompt, PARAMS[i % 3], seed=i) for i, prompt in enumerate(random_prompts(6, 40, seed=7))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", TINY)


@pytest.fixture
def pair(folder: Path) -> Iterator[TinyEngine]:
    engine = TinyEngine(folder, depth=2, budget=64, world=2)
    yield engine
    engine.executor.shutdown()


def test_two_ranks_give_the_tokens_of_one(folder: Path, pair: TinyEngine) -> None:
    assert pair.runner.group.world == 2
    # Each rank holds half of the heads, and so of every block.
    lone = TinyEngine(folder, depth=2, budget=64)
    halves, whole = (e.runner.cache.block_tensors(0)[0].numel() for e in (pair, lone))
    assert 2 * halves == whole
    assert pair.run(JOBS) == lone.run(JOBS)


def test_too_little_shared_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write beyond a file system's room would end the process."""
    found = list(os.statvfs("/"))
    found[4] = 0  # blocks that are free
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(found))
    with pytest.raises(ConfigError, match=r"has room for 0\.0 MB"):
        TinyEngine(folder, depth=2, budget=64, world=2)


def test_two_ranks_draft_the_same(folder: Path, tmp_path: Path) -> None:
    """Each rank has the whole draft model and its part of the target."""
    shape = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 1}
    speculative = {"model": str(model_folder(tmp_path / "draft", shape)), "lookup_min": 1}
    expected = TinyEngine(folder, depth=2, budget=64).run(JOBS)
    pair = TinyEngine(folder, depth=2, budget=64, world=2, speculative=speculative)
    assert pair.run(JOBS) == expected
    assert any((plan.q_len[(plan.flags & RowFlag.PROMPT) == 0] > 1).any() for plan in pair.plans)
    pair.executor.shutdown()


def test_masks_reach_all_ranks(pair: TinyEngine) -> None:
    pair.add("a", Job([6, 7, 8], SamplingParams(temperature=0.0, max_tokens=4)))
    plan = pair.scheduler.plan()
    assert plan is not None
    plan.flags = plan.flags | int32([RowFlag.GATED])
    pair.executor.submit(plan)
    inputs = pair.executor.host_inputs()
    assert inputs.buffer().shape == (pair.lanes * inputs.shape.sets, VOCAB // 32)
    assert inputs.shape.sets > 1
    mask = np.zeros((1, VOCAB // 32), dtype=np.int32)
    mask[0, 2] = 1 << 3  # token 67 alone
    pair.submit_masks(plan.step_id, {int(plan.lanes[0]): mask})
    result = pair.executor.collect()
    assert result.tokens[0, 0] == 67
    # The other rank has drawn the same, or the steps to come would differ.
    assert np.array_equal(pair.scheduler.update(result).tokens, [[67]])
    pair.drain()


@pytest.mark.parametrize("world", [1, 2])
def test_drafts_of_gated_rows_are_reported_before_the_masks(
    folder: Path, tmp_path: Path, world: int
) -> None:
    """Drafts are reported before the step's masks arrive, by any thread, and only for that step."""
    shape = {**TINY, "num_hidden_layers": 1, "num_key_value_heads": 1}
    speculative = {"method": "draft", "model": str(model_folder(tmp_path / "draft", shape))}
    engine = TinyEngine(folder, world=world, speculative=speculative)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    (request,) = engine.add("a", Job([6, 7, 8], params))
    told = 0
    while engine.scheduler.has_work():
        plan = engine.scheduler.plan()
        assert plan is not None
        drafts = int(plan.q_len[0]) - 1 if not plan.flags[0] & RowFlag.PROMPT else 0
        if drafts:
            plan.flags = plan.flags | int32([RowFlag.GATED])
        inputs, lane = engine.executor.host_inputs(), int(plan.lanes[0])
        assert inputs.claim(plan.step_id, lane) is None
        engine.executor.submit(plan)
        found = inputs.claim(plan.step_id, lane)
        assert (found is not None) == bool(drafts)
        if found is not None:
            ids, start = found
            assert start == request.known
            assert (ids[:drafts] >= 0).all()
            assert (ids[drafts:] < 0).all()
            mask = np.full((1 + drafts, VOCAB // 32), -1, dtype=np.int32)
            engine.submit_masks(plan.step_id, {lane: mask})
            told += 1
        engine.scheduler.update(engine.executor.collect())
    assert told > 0
    engine.executor.shutdown()


def test_a_rank_that_dies_is_an_error(pair: TinyEngine) -> None:
    """The loop learns of it immediately, even while it is idle."""
    ranks = Ranks(pair.executor.local.config)
    ranks.start(pair.executor, Capacity((), ()))
    assert ranks.poll(0.0) == ((), ())
    os.kill(pair.executor.workers[0].process.pid, signal.SIGKILL)
    assert select.select(ranks.fds(), [], [], 60.0)[0]
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        ranks.poll(0.0)
    pair.add("a", JOBS[0])
    with pytest.raises(EngineDeadError, match="rank 1"):
        pair.drain()
