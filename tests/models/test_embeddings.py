"""Prompts as vectors, against the hidden states of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import PromptTooLongError, RequestError
from tests.models.checkpoints import make

BARE = {"device": "cpu", "skip_tokenizer_init": True, "dtype": "float32", "block_size": 8}


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 211) for _ in range(length)] for length in lengths]


def expected(oracle: Any, prompt: list[int], pooling: str) -> np.ndarray[Any, Any]:
    """Returns the states after the final norm, pooled and normalized."""
    with torch.inference_mode():
        states = oracle.base_model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(dim=0)
    return (vector / vector.norm()).numpy()


def check(oracle: Any, prompts: list[list[int]], outputs: Any, pooling: str) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        found = np.array(output.outputs.embedding)
        assert output.prompt_token_ids == prompt
        assert np.abs(found - expected(oracle, prompt, pooling)).max() < 2e-5
        assert abs(np.linalg.norm(found) - 1.0) < 1e-5


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "mistral-window"])
def test_families(case: str, pooling: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, case)
    llm = LLM(str(tmp_path), num_kv_blocks=64, pooling=pooling, **BARE)
    prompts = prompts_of([1, 2, 8, 9, 40, 100])
    check(oracle, prompts, llm.embed(prompts), pooling)


@pytest.mark.parametrize("steps", [1, 2])
def test_chunks_hits_preemption_and_company(steps: int, tmp_path: Path) -> None:
    """Prompts in small chunks, with few blocks, shared prefixes, and other requests generating at
    the same time."""
    oracle = make(tmp_path, "llama")
    llm = LLM(
        str(tmp_path),
        num_kv_blocks=26,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        steps_in_flight=steps,
        **BARE,
    )
    shared = prompts_of([48], seed=1)[0]
    prompts = [shared[: 8 * i] + tail for i, tail in enumerate(prompts_of([5, 70, 30, 33, 90, 2]))]
    modes = ["mean", "last", "mean", "last", "mean", "last"]
    params = [PoolingParams(pooling=mode) for mode in modes]
    for _ in range(2):  # the second time, prefixes are in the cache
        outputs = llm.embed(prompts, pooling_params=params)
        for prompt, output, mode in zip(prompts, outputs, modes, strict=True):
            check(oracle, [prompt], [output], mode)
            assert mode == "last" or output.num_cached_tokens == 0
    assert outputs[3].num_cached_tokens > 0
    assert llm.stats().blocks_used == [0]

    # Answers and vectors in the same steps, without room for all of them.
    answer = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone = [llm.generate([prompt], answer)[0].outputs[0].token_ids for prompt in prompts[:3]]
    core, before = llm._core, llm.stats().preemptions
    requests = [
        core.add(f"a{i}", np.array(p, dtype=np.int32), answer, max_total=len(p) + 60)[0]
        for i, p in enumerate(prompts[:3])
    ]
    for _ in range(4):
        core.step()
    found = {}
    for i, (prompt, mode) in enumerate(zip(prompts, modes, strict=True)):
        ids = np.array(prompt, dtype=np.int32)
        params_ = SamplingParams(max_tokens=1)
        core.add(f"v{i}", ids, params_, max_total=len(prompt) + 1, pooling=mode)  # type: ignore[arg-type]
    while core.has_work():
        progress = core.step()
        assert progress is not None
        for item in progress:
            if item.pooled is not None:
                assert len(item.new_tokens) == 0
                found[item.request.request_id] = item.pooled
    assert [request.output.tolist() for request in requests] == alone
    for i, (prompt, mode) in enumerate(zip(prompts, modes, strict=True)):
        vector = found[f"v{i}/0"] / np.linalg.norm(found[f"v{i}/0"])
        assert np.abs(vector - expected(oracle, prompt, mode)).max() < 2e-5
    assert llm.stats().preemptions > before


def test_steps_without_vectors_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    llm = LLM(str(tmp_path), num_kv_blocks=64, **BARE)
    plans: list[Any] = []
    submit = llm._core._executor.submit
    llm._core._executor.submit = lambda plan: (plans.append(plan), submit(plan))  # type: ignore[method-assign,assignment,func-returns-value]
    llm.generate(prompts_of([20]), SamplingParams(max_tokens=4))
    assert all(not plan.writes for plan in plans)
    plans.clear()
    llm.embed(prompts_of([20]))
    assert [list(plan.writes) for plan in plans] == [["pooled"]]
    plans.clear()
    llm.generate(prompts_of([20]), SamplingParams(max_tokens=4))
    assert all(not plan.writes for plan in plans)


def test_dimensions(tmp_path: Path) -> None:
    oracle = make(tmp_path, "llama")
    prompt = prompts_of([12])
    plain = LLM(str(tmp_path), num_kv_blocks=16, **BARE)
    whole = plain.embed(prompt, pooling_params=PoolingParams(dimensions=48, normalize=False))[0]
    assert len(whole.outputs.embedding) == 48
    with pytest.raises(RequestError, match="48 dimensions") as error:
        plain.embed(prompt, pooling_params=PoolingParams(dimensions=16))
    assert error.value.param == "dimensions"
    file = tmp_path / "config.json"
    text = file.read_text()
    file.write_text(text.replace("{", '{"is_matryoshka": true,', 1))
    nested = LLM(str(tmp_path), num_kv_blocks=16, **BARE)
    cut = np.array(
        nested.embed(prompt, pooling_params=PoolingParams(dimensions=16))[0].outputs.embedding
    )
    wanted = expected(oracle, prompt[0], "last")[:16]
    assert np.abs(cut - wanted / np.linalg.norm(wanted)).max() < 2e-5
    with pytest.raises(RequestError, match="48 dimensions at most"):
        nested.embed(prompt, pooling_params=PoolingParams(dimensions=49))
    file.write_text(text.replace("{", '{"matryoshka_dimensions": [8, 24],', 1))
    listed = LLM(str(tmp_path), num_kv_blocks=16, **BARE)
    with pytest.raises(RequestError, match="8, 24"):
        listed.embed(prompt, pooling_params=PoolingParams(dimensions=16))


def test_pooling_of_the_model(tmp_path: Path) -> None:
    oracle = make(tmp_path, "llama")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    prompts = prompts_of([30])
    llm = LLM(str(tmp_path), num_kv_blocks=16, **BARE)
    check(oracle, prompts, llm.embed(prompts), "mean")
    last = LLM(str(tmp_path), num_kv_blocks=16, pooling="last", **BARE)
    check(oracle, prompts, last.embed(prompts), "last")


def test_bad_requests(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    llm = LLM(str(tmp_path), num_kv_blocks=64, **BARE)
    with pytest.raises(RequestError, match="empty"):
        llm.embed([[]])
    with pytest.raises(PromptTooLongError):
        llm.embed(prompts_of([256]))
    with pytest.raises(RequestError, match="vocabulary"):
        llm.embed([[5, 211]])
    with pytest.raises(RequestError, match="1 pooling parameters"):
        llm.embed(prompts_of([3, 4]), pooling_params=[PoolingParams()])
    with pytest.raises(RequestError, match="one of last, mean"):
        PoolingParams(pooling="first")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="positive"):
        PoolingParams(dimensions=0)
    assert not llm._core.has_work()
