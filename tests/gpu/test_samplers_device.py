"""Requests with samplers that graphs do not support, together with requests that run as graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.tiny_engine import TINY

PROMPTS = [[7, 8, 9] * 6, [10, 11] * 5, [12] * 9]


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    engine = LLM(
        str(folder),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        device=request.param,
        num_kv_blocks=200,
    )
    yield engine
    engine.shutdown()


def run(llm: LLM, **fields: Any) -> list[list[int]]:
    params = [
        SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, detokenize=False, **fields)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_neutral_ones_change_nothing(llm: LLM) -> None:
    for fields in ({}, {"top_k": 9, "top_p": 0.8, "min_p": 0.02}, {"temperature": 0.0}):
        plain = run(llm, **fields)
        assert run(llm, **fields, dry_multiplier=1e-30) == plain
        assert run(llm, **fields, logits_processors=(lambda said, logits: logits,)) == plain


def test_functions_decide(llm: LLM) -> None:
    def count(said: list[int], logits: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(logits, -torch.inf)
        out[20 + len(said)] = 0.0
        return out

    assert run(llm, logits_processors=(count,)) == [list(range(20, 32))] * len(PROMPTS)


def test_each_one_draws(llm: LLM) -> None:
    plain = run(llm)
    for fields in (
        {"dry_multiplier": 50.0, "dry_allowed_length": 1, "temperature": 0.0},
        {"typical_p": 0.3},
        {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    ):
        assert run(llm, **fields) == run(llm, **fields)
        assert run(llm, **fields) != plain
