"""Vectors pooled from bodies that are graphs equal those of bodies launched kernel by kernel."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from quire import LLM, PoolingParams
from tests.tiny_engine import TINY, TINY_WINDOW, VOCAB


def run(folder: Path, **settings: object) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    draw = random.Random(0)
    prompts = [[draw.randint(6, VOCAB - 1) for _ in range(draw.randint(1, 200))] for _ in range(40)]
    params = [PoolingParams(pooling="mean" if i % 2 else "last") for i in range(40)]
    llm = LLM(
        str(folder),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=20,
        max_num_batched_tokens=300,
        **{"device": "cuda", "num_kv_blocks": 400, **settings},
    )
    outputs = llm.embed(prompts, use_tqdm=False, pooling_params=params)
    llm.shutdown()
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("config", [TINY, TINY_WINDOW], ids=["full", "window"])
def test_graphs_equal_eager(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    eager = run(tmp_path, enforce_eager=True)
    assert np.abs(np.linalg.norm(eager, axis=1) - 1.0).max() < 1e-5
    for settings in ({}, {"steps_in_flight": 3}, {"num_kv_blocks": 60}):
        # Sums of other lengths round differently.
        assert np.abs(run(tmp_path, **settings) - eager).max() < 1e-2, settings
