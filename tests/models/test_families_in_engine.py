"""Every family in the real engine: tokens do not depend on chunks of the prompt, cache hits, other
requests or preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from tests.models.checkpoints import CASES, make
from tests.models.harness import Harness
from tests.models.test_families import load, prompts_of
from tests.slow import slow, some

QUICK = "deepseek-v3", "gemma2", "qwen3.5"
"""Latents, windows beside full attention, recurrent states."""

PARAMS = [slow(case) if case not in QUICK else case for case in CASES]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def engine(folder: Path, **settings: Any) -> LLM:
    sizes = {"block_size": 8, "max_model_len": 128, "num_kv_blocks": 200, **settings}
    return LLM(str(folder), device="cpu", skip_tokenizer_init=True, **sizes)


@pytest.mark.parametrize("case", PARAMS)
def test_tokens_depend_on_the_prompt_alone(case: str, tmp_path: Path) -> None:
    make(tmp_path, case)
    longest = prompts_of(5)[2]
    prompts = [*prompts_of(4), longest, longest[:20] + prompts_of(6)[1]]
    beginnings = [[*longest[:end], 11, 12] for end in some(range(1, len(longest)))]
    forks = SamplingParams(temperature=1.0, max_tokens=10, n=3, seed=1, ignore_eos=True)

    alone = engine(tmp_path, enable_prefix_caching=False)
    expected = [tokens_of(alone, [prompt], greedy(16))[0] for prompt in prompts]
    expected_beginnings = [tokens_of(alone, [prompt], greedy(3))[0] for prompt in beginnings]
    expected_forks = tokens_of(alone, [longest], forks)
    assert len({tuple(tokens) for tokens in expected_forks}) == 3
    alone.shutdown()

    shared = engine(tmp_path, max_num_batched_tokens=7, max_num_seqs=4)
    assert tokens_of(shared, prompts, greedy(16)) == expected
    for prompt, tokens in zip(beginnings, expected_beginnings, strict=True):
        assert tokens_of(shared, [prompt], greedy(3)) == [tokens], len(prompt)
    assert shared.stats().prefix_hit_tokens > 10 * len(beginnings)
    assert tokens_of(shared, [longest], forks) == expected_forks
    shared.shutdown()

    small = engine(tmp_path, num_kv_blocks=16, max_num_seqs=5)
    assert tokens_of(small, prompts * 2, greedy(16)) == expected * 2
    # Where all layers have windows, few blocks are enough.
    assert small.stats().preemptions > 0 or case in ("mistral-window", "mixtral-window", "phi3")
    small.shutdown()


@pytest.mark.parametrize("case", PARAMS)
def test_a_prompt_may_be_cut_anywhere(case: str, tmp_path: Path) -> None:
    make(tmp_path, case)
    model, prompt = load(tmp_path), prompts_of(7)[2]
    whole = Harness(model)
    (expected,) = whole.step([(whole.add(prompt), len(prompt))])
    for cut in range(1, len(prompt)):
        harness = Harness(model)
        row = harness.add(prompt)
        parts = harness.step([(row, cut)]) + harness.step([(row, len(prompt) - cut)])
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0.0)
