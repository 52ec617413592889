"""The host and disk tiers in a whole engine: tokens are the same with and without tiers, although
blocks are evicted, restored, damaged and dropped."""

from __future__ import annotations

import functools
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

import stress_cache
from quire import LLM, SamplingParams
from quire.engine.loop.stats import EngineStats
from quire.errors import ConfigError
from quire.features.kv_offload.stats import TierStats
from quire.server.telemetry.engine_metrics import EngineMetrics
from quire.server.telemetry.metrics import ServerMetrics
from tests.slow import slow
from tests.tiny_engine import TINY, TINY_WINDOW, model_folder, random_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
STEMS = [prompt[:56] for prompt in random_prompts(40, 300, seed=7) if len(prompt) >= 56][:6]
BLOCK_GB = 3 * 2 * 2 * 8 * 16 * 4 / 1e9
"""Gigabytes of a block of `TINY`: layers, K and V, heads, tokens, head size, bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("tiers") / "model", TINY)


def engine(folder: Path, **settings: Any) -> LLM:
    given: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "block_size": 8,
        "max_model_len": 96,
        "max_num_seqs": 2,
        "num_kv_blocks": 24,
        "skip_tokenizer_init": True,
    }
    return LLM(str(folder), **given | settings)


def patch_costs(patch: pytest.MonkeyPatch) -> None:
    """Replaces measured rates, because those of a tiny model on a busy machine mean nothing."""
    patch.setattr("quire.features.kv_offload.costs.CostModel.fetch_pays", lambda self, *_: True)
    patch.setattr("quire.features.kv_offload.costs.CostModel.swap_pays", lambda self, *_: True)
    patch.setattr("quire.features.kv_offload.costs.CostModel.worth_keeping", True)


@pytest.fixture(autouse=True)
def copying_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_costs(monkeypatch)


def answers(llm: LLM, tail: int = 0) -> list[list[int]]:
    """Runs one request after another; the pool has evicted each prefix since the last round."""
    found = []
    for stem in STEMS:
        prompt = {"prompt_token_ids": [*stem, 6 + tail]}
        found.append(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    return found


@functools.cache
def plain(folder: Path, tail: int) -> list[list[int]]:
    """Returns the answers of an engine without any cache."""
    llm = engine(folder, enable_prefix_caching=False)
    found = answers(llm, tail)
    llm.shutdown()
    return found


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the disk cache of an ended engine, which tests copy."""
    kv = tmp_path_factory.mktemp("files") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        patch_costs(patch)
        first = engine(folder, host_cache_gb=16 * BLOCK_GB, disk_cache=str(kv))
        for tail in range(3):
            answers(first, tail)
        first.shutdown()
    return kv


def test_blocks_evicted_from_the_device_come_back_from_the_host(folder: Path) -> None:
    llm = engine(folder, host_cache_gb=100 * BLOCK_GB)
    found = [answers(llm, tail) for tail in range(2)]
    stats = llm.stats()
    assert stats.tiers is not None
    assert stats.tiers.host_hit_tokens >= 4 * 48
    assert stats.tiers.swapped_in_bytes == stats.tiers.swapped_in * round(BLOCK_GB * 1e9)
    assert stats.tiers.disk_hit_tokens == stats.tiers.transfer_failures == 0
    assert stats.prefix_hit_tokens >= stats.tiers.host_hit_tokens
    assert stats.blocks_used == [0]
    llm.shutdown()
    assert found == [plain(folder, 0), plain(folder, 1)]


def test_ranks_keep_their_heads_on_the_host(folder: Path) -> None:
    """Ranks divide the host's memory, and their blocks are smaller in proportion."""
    llm = engine(folder, host_cache_gb=100 * BLOCK_GB, tensor_parallel_size=2)
    found = [answers(llm, tail) for tail in range(2)]
    stats = llm.stats()
    llm.shutdown()
    assert stats.tiers is not None
    assert stats.tiers.host_blocks_total == 100
    assert stats.tiers.host_hit_tokens >= 4 * 48
    assert stats.tiers.swapped_in_bytes == stats.tiers.swapped_in * round(BLOCK_GB * 1e9)
    assert found == [plain(folder, 0), plain(folder, 1)]


def test_files_outlive_the_engine(folder: Path, files: Path, tmp_path: Path) -> None:
    disk = {"host_cache_gb": 16 * BLOCK_GB, "disk_cache": str(tmp_path / "kv")}
    shutil.copytree(files, tmp_path / "kv")
    again = engine(folder, **disk)
    found = answers(again, 3)
    stats = again.stats().tiers
    again.shutdown()
    assert stats is not None
    assert stats.disk_hit_tokens > 0
    assert found == plain(folder, 3)


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_damaged_files_are_computed_again(
    folder: Path, files: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"host_cache_gb": 16 * BLOCK_GB, "disk_cache": str(tmp_path / "kv")}
    shutil.copytree(files, tmp_path / "kv")
    again = engine(folder, **disk)
    found_files = [path for path in (tmp_path / "kv").rglob("*.0") if path.is_file()]
    assert found_files
    for file in found_files:
        data = bytearray(file.read_bytes())
        data[-5] ^= 0x40
        file.unlink() if damage == "delete" else file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = answers(again, 3)
    stats = again.stats().tiers
    again.shutdown()
    assert stats is not None
    assert stats.transfer_failures > 0
    assert stats.disk_hit_tokens == 0
    assert len([r for r in caplog.records if "disk cache" in r.message]) == (damage == "flip")
    assert found == plain(folder, 3)


def test_a_swapped_request_does_not_compute_again(folder: Path) -> None:
    """Together the requests outgrow the pool; the latest are preempted and resumed."""
    long = SamplingParams(temperature=0.0, max_tokens=38, ignore_eos=True)
    prompts = [{"prompt_token_ids": stem} for stem in STEMS[:4]]
    found = []
    for lanes in (1, 4):
        llm = engine(folder, host_cache_gb=100 * BLOCK_GB, max_num_seqs=lanes)
        found.append([o.outputs[0].token_ids for o in llm.generate(prompts, long, use_tqdm=False)])
        stats = llm.stats()
        llm.shutdown()
    assert stats.tiers is not None
    assert stats.preemptions == stats.swapped > 0
    assert stats.tiers.host_hit_tokens > 0
    assert found[0] == found[1]


def test_forgotten_prefixes_do_not_come_back(folder: Path) -> None:
    llm = engine(folder, host_cache_gb=100 * BLOCK_GB)
    answers(llm)
    assert llm._core.scheduler.reset_prefix_cache()
    before = llm.stats().prefix_hit_tokens
    assert answers(llm) == plain(folder, 0)
    stats = llm.stats()
    llm.shutdown()
    assert stats.prefix_hit_tokens == before
    assert stats.tiers is not None
    assert stats.tiers.host_hit_tokens == 0


def test_monitors_see_the_tiers() -> None:
    metrics = EngineMetrics(of_server := ServerMetrics(), "a-model")
    registry = of_server.registry
    metrics.update(EngineStats(swapped=3), replicas=[True])
    assert b"host_hit_tokens" not in generate_latest(registry)
    tiers = TierStats(host_blocks_used=7, host_hit_tokens=5, swapped_in_bytes=9)
    metrics.update(EngineStats(swapped=3, tiers=tiers), replicas=[True])
    text = generate_latest(registry).decode()
    for line in (
        "quire_swapped_total 3.0",
        'quire_tier_blocks{tier="host"} 7.0',
        "quire_host_hit_tokens_total 5.0",
        "quire_kv_bytes_in_total 9.0",
    ):
        assert line in text.splitlines()


def test_models_with_windows_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "window", TINY_WINDOW)
    with pytest.raises(ConfigError, match="sliding-window"):
        engine(folder, host_cache_gb=0.001)


_SMALL = ["--requests=30", "--longest=130", "--blocks=30", "--host-cache-gb=0.0003"]


@pytest.mark.parametrize("sizes", [_SMALL, slow(["--requests=150"])], ids=["30", "150"])
def test_no_leak_and_no_mismatch_under_stress(tmp_path: Path, sizes: list[str]) -> None:
    folder = model_folder(tmp_path / "model", stress_cache.TINY)
    found = stress_cache.stress(stress_cache.parse(sizes), str(folder))
    assert found["mismatches"] == 0
    assert found["leaked_blocks"] == 0
    assert found["with_tiers"]["preemptions"] > 0
    assert found["tiers"]["host_hit_tokens"] > 0
    assert found["tiers"]["disk_writes"] > 0
