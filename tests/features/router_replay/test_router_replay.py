"""Experts that requests return, against the routers of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.arrays import int32
from quire.engine.loop.output import completion_readers
from quire.errors import ConfigError, RequestError
from quire.plan import ChosenExperts
from tests.models.checkpoints import make
from tests.slow import slow

PROMPTS = [list(range(20, 45)), list(range(20, 32)), [7, 3, 150, 7, 3, 150, 7, 3, 150, 7]]


@pytest.fixture(scope="module", params=["mixtral", slow("qwen3-moe")])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("experts")
    return folder, make(folder, request.param)


@pytest.fixture
def opened() -> Iterator[list[LLM]]:
    llms: list[LLM] = []
    yield llms
    for llm in llms:
        llm.shutdown()


def open_llm(folder: Path, opened: list[LLM], **settings: Any) -> LLM:
    settings = {"max_model_len": 128, "block_size": 4, "num_kv_blocks": 300, **settings}
    opened.append(
        LLM(str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **settings)
    )
    return opened[-1]


@torch.inference_mode()
def routers(oracle: Any, tokens: list[int], top_k: int) -> np.ndarray[Any, Any]:
    """Returns the sorted ids of each token's experts, [tokens, layers, top_k]."""
    logits = oracle(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [each.reshape(len(tokens), -1).topk(top_k).indices.sort(-1).values for each in logits]
    return torch.stack(chosen, 1).numpy()


def check(oracle: Any, llm: LLM, prompts: list[list[int]], **fields: Any) -> None:
    params = SamplingParams(
        **{"temperature": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True, **fields},
        return_routed_experts=True,
    )
    for output in llm.generate(prompts, params, False):
        for completion in output.outputs:
            text = output.prompt_token_ids + completion.token_ids
            found = completion.routed_experts
            assert found is not None
            assert found.dtype == np.int16
            assert len(found) == len(text) - 1
            np.testing.assert_array_equal(
                np.sort(found, -1), routers(oracle, text, found.shape[2])[:-1]
            )


@pytest.mark.parametrize("settings", [
    {"max_num_batched_tokens": 16},
    {"num_kv_blocks": 24, "max_num_seqs": 3},
    {"speculative": {"method": "suffix"}, "steps_in_flight": 2},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True},
], ids=["chunks", "preemption", "drafts", "expert-parallel"])  # fmt: skip
def test_experts(model: tuple[Path, Any], opened: list[LLM], settings: dict[str, Any]) -> None:
    folder, oracle = model
    llm = open_llm(folder, opened, **settings)
    check(oracle, llm, PROMPTS)
    if settings.get("num_kv_blocks"):
        assert llm.stats().preemptions > 0


def test_prefix_hits_and_siblings(model: tuple[Path, Any], opened: list[LLM]) -> None:
    """A request that returns experts computes its prompt, and its siblings share its experts."""
    folder, oracle = model
    llm = open_llm(folder, opened)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4, ignore_eos=True), False)
    check(oracle, llm, PROMPTS[:2], n=3)
    (output,) = llm.generate(
        PROMPTS[:1], SamplingParams(max_tokens=4, return_routed_experts=True), False
    )
    assert output.num_cached_tokens == 0
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4), False)
    assert output.num_cached_tokens > 0
    assert output.outputs[0].routed_experts is None


def test_siblings_after_a_change_of_weights(model: tuple[Path, Any], opened: list[LLM]) -> None:
    """Experts that a prompt had under earlier weights are not those of the new weights."""
    core = open_llm(model[0], opened)._core
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=3, return_routed_experts=True)
    requests = core.add("a", int32(PROMPTS[0]), params, max_total=len(PROMPTS[0]) + 8)
    other = SamplingParams(max_tokens=2, ignore_eos=True)
    while min(request.num_output_tokens for request in requests) < 2:
        core.step()
    core.scheduler.change_weights("1" * 32, retract=True)
    core.add("b", int32(PROMPTS[0]), other, max_total=len(PROMPTS[0]) + 2)
    seen: dict[str, set[int]] = {request.request_id: set() for request in requests}
    while core.has_work():
        for item in core.step() or ():
            if item.experts is not None:
                seen[item.request.request_id] |= set(item.experts.positions.tolist())
    assert all(set(range(len(PROMPTS[0]))) <= positions for positions in seen.values())


def test_aborted_in_the_prompt() -> None:
    """The array has a line for each token, also for tokens that no step has computed."""
    params = SamplingParams(return_routed_experts=True)
    (reader,) = completion_readers(PROMPTS[0], params, None)
    reader.feed_experts(
        ChosenExperts(int32([0, 0]), int32([0, 1]), np.ones((2, 3, 2), dtype=np.int16))
    )
    experts = reader.feed([], finish_reason="abort").routed_experts
    assert experts is not None
    assert experts.shape == (len(PROMPTS[0]) - 1, 3, 2)
    assert (experts[:2] == 1).all()
    assert (experts[2:] == -1).all()


def test_refusals(model: tuple[Path, Any], opened: list[LLM], tmp_path: Path) -> None:
    llm = LLM(str(model[0]), skip_tokenizer_init=True, max_model_len=64)
    opened.append(llm)
    with pytest.raises(RequestError, match="--enable-return-routed-experts"):
        llm.generate(PROMPTS[:1], SamplingParams(return_routed_experts=True), False)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        open_llm(model[0], opened, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="needs a model with experts"):
        LLM(enable_return_routed_experts=True)
