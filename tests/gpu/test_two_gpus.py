"""Two GPUs give the tokens of one; a rank that is killed ends the engine with an error."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.ranks.workers import WorkerExecutor
from quire.errors import EngineDeadError
from quire.features.expert_balance import feature
from tests.features.speculation.test_speculation import generated
from tests.gpu.test_graphs import COSTLY, PARAMS, run
from tests.tiny_engine import TINY, TINY_EXPERTS, TINY_WINDOW

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW], ids=["full", "window"])
def test_tokens_of_one_gpu(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = run(tmp_path, PARAMS + COSTLY)
    for settings in ({}, {"disable": ("symmetric",)}, {"enforce_eager": True}):
        two = run(tmp_path, PARAMS + COSTLY, tensor_parallel_size=2, **settings)
        same = sum(a == b for a, b in zip(one, two, strict=True))
        # Sums over ranks round differently, and that may turn a close choice.
        assert same >= 0.9 * len(one), settings


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (TINY, {"num_kv_blocks": 60}),
        (TINY, {"quantization": "int8"}),
        (TINY, {"kv_cache_dtype": "fp8_dynamic"}),
        (TINY_WINDOW, {"steps_in_flight": 3}),
        ({**TINY, "vocab_size": 131}, {}),
    ],
    ids=["few blocks", "int8", "8-bit KV", "three steps", "odd vocabulary"],
)
def test_settings_on_two_gpus(
    tmp_path: Path, config: dict[str, object], settings: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = run(tmp_path, PARAMS + COSTLY, **settings)
    two = run(tmp_path, PARAMS + COSTLY, tensor_parallel_size=2, **settings)
    assert sum(a == b for a, b in zip(one, two, strict=True)) >= 0.9 * len(one)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_a_grammar_on_two_gpus(way: str) -> None:
    """The embedded model writes a number under a grammar as on one GPU."""
    params = SamplingParams(
        temperature=0.8, seed=9, max_tokens=40, structured_outputs={"regex": r"\d{3}-\d{4}"}
    )
    found = []
    for ranks in (1, 2):
        llm = LLM(device="cuda", dtype="float32", **{f"{way}_parallel_size": ranks})
        outputs = llm.generate(["The number is "] * 3, params, use_tqdm=False)
        llm.shutdown()
        found.append([output.outputs[0].text for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW, TINY_EXPERTS], ids=["full", "window", "moe"])
def test_the_bits_of_one_gpu(tmp_path: Path, config: dict[str, object]) -> None:
    """Sums over ranks round as the sums of one rank do."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = run(tmp_path, PARAMS + COSTLY, deterministic=True)
    for settings in ({}, {"enforce_eager": True}):
        two = run(tmp_path, PARAMS + COSTLY, deterministic=True, tensor_parallel_size=2, **settings)
        assert one == two, settings


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW], ids=["full", "window"])
def test_two_stages(tmp_path: Path, config: dict[str, object]) -> None:
    """Hidden states are sent within captured bodies, or between launches in eager mode."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = run(tmp_path, PARAMS + COSTLY)
    for settings in ({}, {"num_kv_blocks": 60}, {"enforce_eager": True}):
        two = run(tmp_path, PARAMS + COSTLY, pipeline_parallel_size=2, **settings)
        same = sum(a == b for a, b in zip(one, two, strict=True))
        # Steps of fewer rows round differently.
        assert same >= 0.9 * len(one), settings


def test_drafts_in_stages() -> None:
    """The last stage's drafts are accepted, and do not change the texts of the embedded model."""
    plain, *_ = generated(device="cuda", deterministic=True)
    for source in ("eagle3", "draft"):
        found, stats, steps = generated(
            device="cuda", deterministic=True, pipeline_parallel_size=2,
            speculative={"method": source},
        )  # fmt: skip
        assert found == plain, source
        assert stats is not None
        counts = stats.sources[source]
        logging.info("%s: %d steps, %d of %d", source, steps, counts.accepted, counts.drafted)
        assert counts.accepted > 0.1 * counts.drafted > 0


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW, TINY_EXPERTS], ids=["full", "window", "moe"])
def test_long_steps_as_halves(tmp_path: Path, config: dict[str, object]) -> None:
    """With copies, with NCCL, without graphs, as measured, and with `deterministic`."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))

    def tokens(**settings: object) -> list[list[int]]:
        settings = {"max_num_batched_tokens": 3000, "num_kv_blocks": 2500, **settings}
        return run(tmp_path, PARAMS + COSTLY, 1800, tensor_parallel_size=2, **settings)

    whole = tokens()
    for more in ({}, {"disable": ("symmetric",)}, {"enforce_eager": True}, {"async_tp": "auto"}):
        halves = tokens(**{"async_tp": "on", **more})
        # Products of fewer rows round differently.
        assert sum(a == b for a, b in zip(whole, halves, strict=True)) >= 0.9 * len(whole), more
    assert tokens(deterministic=True, async_tp="on") == tokens(deterministic=True)


def test_whole_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of experts move while captured graphs stay."""
    monkeypatch.setattr(feature, "FIRST_STEPS", 8)
    monkeypatch.setattr(feature, "STEPS", 16)
    (tmp_path / "config.json").write_text(json.dumps(TINY_EXPERTS))
    one = run(tmp_path, PARAMS + COSTLY)
    for copies in (0, 3):
        two = run(
            tmp_path, PARAMS + COSTLY, tensor_parallel_size=2, enable_expert_parallel=True,
            redundant_experts=copies,
        )  # fmt: skip
        assert sum(a == b for a, b in zip(one, two, strict=True)) >= 0.9 * len(one), copies


def test_blocks_on_the_host(tmp_path: Path) -> None:
    """Each rank moves its heads' part of a block."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    one = run(tmp_path, PARAMS)
    two = run(tmp_path, PARAMS, tensor_parallel_size=2, num_kv_blocks=40, host_cache_gb=0.01)
    assert sum(a == b for a, b in zip(one, two, strict=True)) >= 0.9 * len(one)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_a_killed_rank(tmp_path: Path, way: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    llm = LLM(
        str(tmp_path), device="cuda", load_format="dummy", skip_tokenizer_init=True,
        num_kv_blocks=100, max_num_seqs=8, max_num_batched_tokens=256,
        **{f"{way}_parallel_size": 2},
    )  # fmt: skip
    executor = llm._core._executor
    assert isinstance(executor, WorkerExecutor)
    lost = executor.workers[0].process
    timer = threading.Timer(1.0, os.kill, (lost.pid, signal.SIGKILL))
    timer.start()
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    def go_on() -> None:
        for _ in range(10_000):
            llm.generate([[5, 6, 7]], params, use_tqdm=False)

    with pytest.raises(EngineDeadError, match="rank 1"):
        go_on()
    llm.shutdown()
    assert lost.returncode == -signal.SIGKILL
