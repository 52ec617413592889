"""Copies of experts: their placement, and an engine that rearranges them between two steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.config import EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError
from quire.features.expert_balance import feature
from quire.features.expert_balance.placement import (
    Placement,
    imbalance,
    keep_slots,
    place,
    rooms_of,
)
from quire.layers.expert_weights import even_shard
from tests.tiny_engine import TINY_EXPERTS, model_folder, random_prompts


def rooms_for(experts: int, redundant: int, ranks: int) -> list[int]:
    cuts = [even_shard(experts, 1, rank, ranks) for rank in range(ranks)]
    return rooms_of([end - first for first, end in cuts], redundant)


def check(placement: Placement, experts: int, rooms: list[int]) -> None:
    """Checks that every expert is placed, and on no rank twice."""
    assert [len(own) for own in placement] == rooms
    held = [[expert for expert in own if expert >= 0] for own in placement]
    assert {expert for own in held for expert in own} == set(range(experts))
    assert all(len(own) == len(set(own)) for own in held)


@settings(max_examples=60)
@given(data=st.data(), ranks=st.integers(2, 8), experts=st.integers(8, 40))
def test_placements_are_whole(data: st.DataObject, ranks: int, experts: int) -> None:
    redundant = data.draw(st.integers(0, experts * (ranks - 1)))
    number = st.one_of(st.just(0.0), st.floats(0, 1e6), st.integers(0, 3).map(float))
    drawn = st.lists(number, min_size=experts, max_size=experts)
    rooms = rooms_for(experts, redundant, ranks)
    before, after = (place(data.draw(drawn), rooms) for _ in range(2))
    for placement in (before, after):
        check(placement, experts, rooms)
    kept = keep_slots(before, after)
    assert [sorted(own) for own in kept] == [sorted(own) for own in after]
    for old, new, wanted in zip(before, kept, after, strict=True):
        for was, now in zip(old, new, strict=True):
            assert was == now or was not in wanted or was < 0


@settings(max_examples=100)
@given(st.integers(2, 16), st.integers(8, 128), st.data())
def test_ranks_have_room_for_their_own_experts(
    ranks: int, experts: int, data: st.DataObject
) -> None:
    """60 experts and one copy on eight ranks, where an even split of 61 gives one rank fewer."""
    redundant = data.draw(st.integers(0, experts * (ranks - 1)))
    held, rooms = rooms_for(experts, 0, ranks), rooms_for(experts, redundant, ranks)
    assert all(own <= room for own, room in zip(held, rooms, strict=True))
    assert sum(rooms) == experts + redundant
    assert max(rooms) - min(rooms) <= 1


@settings(max_examples=30)
@given(
    shape=st.sampled_from([(60, 4, 4), (64, 8, 8), (128, 2, 4), (128, 8, 16), (256, 8, 32)]),
    skew=st.floats(0.0, 1.2),
    seed=st.integers(0, 2**16),
)
def test_skewed_loads_are_evened_out(shape: tuple[int, int, int], skew: float, seed: int) -> None:
    """Returns loads that follow a power law: with 1.2, one of 128 experts gets a quarter."""
    experts, ranks, redundant = shape
    draw = random.Random(seed)
    loads = [draw.uniform(0.8, 1.2) / (place + 1) ** skew for place in range(experts)]
    draw.shuffle(loads)
    rooms = rooms_for(experts, redundant, ranks)
    assert imbalance(loads, place(loads, rooms)) <= 1.05


def answers(folder: Path, **more: Any) -> tuple[list[list[int]], Any]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(6)]
    llm = LLM(
        str(folder), load_format="dummy", device="cpu", skip_tokenizer_init=True, block_size=8,
        max_num_seqs=3, max_num_batched_tokens=32, num_kv_blocks=60, **more,
    )  # fmt: skip
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], llm.stats()
    finally:
        llm.shutdown()


def test_an_engine_rearranges_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "FIRST_STEPS", 4)
    monkeypatch.setattr(feature, "STEPS", 6)
    folder = model_folder(tmp_path, TINY_EXPERTS)
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    found, stats = answers(folder, **parallel, redundant_experts=2)
    assert stats.experts.moves > 0
    assert stats.experts.most_work >= stats.experts.mean_work > 0
    assert found == answers(folder)[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"redundant_experts": -1}, "must not be negative"),
        ({"redundant_experts": 2}, "needs enable_expert_parallel"),
        (
            {"redundant_experts": 2, "enable_expert_parallel": True, "pipeline_parallel_size": 2},
            "not supported with pipeline_parallel_size=2",
        ),
        ({"redundant_experts": 8, "enable_expert_parallel": True}, "more than the 7 that fit"),
    ],
)
def test_impossible_numbers_of_copies_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    folder = str(model_folder(tmp_path, TINY_EXPERTS))
    args = EngineArgs(
        model=folder, device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2, **settings
    )
    with pytest.raises(ConfigError, match=reason):
        resolve(args)
