"""`disable` as a setting; what it does on a GPU is tested there."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.config import OPTIMIZATIONS, EngineArgs
from quire.engine.builder import resolve
from quire.errors import ConfigError


def test_unknown_optimizations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"disable must be one of graphs, .*, got 'speed'"):
        EngineArgs(disable=("graphs", "speed"))


def test_overlap_off_means_one_step_in_flight() -> None:
    config = resolve(EngineArgs(disable=("overlap",), steps_in_flight=3, device="cpu"))
    assert config.scheduler.steps_in_flight == 1
    assert resolve(EngineArgs(disable=("graphs",), device="cpu")).eager


def test_everything_off_gives_the_same_tokens() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for disable in ((), OPTIMIZATIONS):
        llm = LLM(device="cpu", num_kv_blocks=40, disable=disable)
        found.append(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0])
        llm.shutdown()
    assert found[0].token_ids == found[1].token_ids
