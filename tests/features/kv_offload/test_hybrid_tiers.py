"""Recurrent states in the host and disk tiers of a whole engine: tokens are the same with and
without tiers, and prefixes evicted from the device are reused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stress_cache
from quire import LLM, SamplingParams
from tests.engine.test_hybrid_engine import HYBRID
from tests.features.kv_offload import test_tiers
from tests.features.kv_offload.test_tiers import STEMS, answers, engine, plain
from tests.slow import slow
from tests.tiny_engine import model_folder

_GB = 0.01

copying_always_pays = test_tiers.copying_always_pays


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("hybrid-tiers") / "model", HYBRID)


@pytest.fixture(autouse=True)
def states_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quire.features.kv_offload.costs.CostModel.state_worth_keeping", lambda self, saves: True
    )


def used(llm: LLM) -> Any:
    """Checks that every block is free again; returns the tiers' statistics."""
    stats = llm.stats()
    assert stats.blocks_used == [0, 0]
    assert stats.tiers is not None
    return stats.tiers


def test_prefixes_that_the_device_lost_come_back_with_their_states(folder: Path) -> None:
    llm = engine(folder, host_cache_gb=_GB)
    found = [answers(llm, tail) for tail in range(2)]
    tiers = used(llm)
    llm.shutdown()
    assert 0 < tiers.host_states_used <= tiers.host_states_total
    assert tiers.host_hit_tokens >= 4 * 48
    assert tiers.disk_hit_tokens == tiers.transfer_failures == 0
    assert found == [plain(folder, 0), plain(folder, 1)]


def test_conversations_go_on_from_the_end_of_a_turn(folder: Path) -> None:
    """The state after an answer ends within a block, which is copied to the host as well."""
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    asked = [stem[:40] for stem in STEMS]
    for host_cache_gb in (_GB, 0.0):
        llm = engine(folder, host_cache_gb=host_cache_gb, enable_prefix_caching=host_cache_gb > 0)
        texts = [list(prompt) for prompt in asked]
        lengths, hits = 0, 0
        for turn in range(3):
            for i, text in enumerate(texts):
                before = llm.stats().prefix_hit_tokens
                prompt = {"prompt_token_ids": text}
                text += llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
                text += [6 + i, 7, 8 + turn]
                if turn:
                    lengths += len(prompt["prompt_token_ids"]) - 7 - 3 - 4
                    hits += llm.stats().prefix_hit_tokens - before
        if host_cache_gb:
            found = texts
            assert used(llm).host_hit_tokens > 0
            assert hits >= 0.95 * lengths
        llm.shutdown()
    assert found == texts


def test_files_hold_states_beyond_the_engine(folder: Path, tmp_path: Path) -> None:
    disk = {"host_cache_gb": _GB, "disk_cache": str(tmp_path / "kv")}
    first = engine(folder, **disk)
    answers(first)
    first.shutdown()
    again = engine(folder, **disk)
    found = answers(again, 3)
    tiers = used(again)
    again.shutdown()
    assert tiers.disk_hit_tokens >= 6 * 48
    assert tiers.transfer_failures == 0
    assert found == plain(folder, 3)


@pytest.mark.parametrize("requests", [slow(60)])
def test_no_leak_and_no_mismatch_under_stress(tmp_path: Path, requests: int) -> None:
    config = {**HYBRID, "max_position_embeddings": 512}
    folder = model_folder(tmp_path / "model", config)
    args = stress_cache.parse(["--requests", str(requests), "--host-cache-gb", str(_GB)])
    found = stress_cache.stress(args, str(folder))
    assert found["mismatches"] == 0
    assert found["leaked_blocks"] == 0
    assert found["with_tiers"]["preemptions"] > 0
    assert found["tiers"]["host_hit_tokens"] > 0
