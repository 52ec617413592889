"""The embedded model in bf16, through every kernel path, against fp32 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import OPTIMIZATIONS
from quire.ops.triton import launch

PROMPTS = [
    "Once upon a time",
    "The little dog was sad because",
    "Tom and Lily went to the park. " * 12,
    "One day, a girl named Mia found a big red ball in the garden. She",
    "There was",
    "The sun was bright and the birds were singing. " * 20 + "Then",
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2)
CLOSE = 0.15
"""Log-probabilities of bf16 and fp32 differ by less; so do tokens only where the two likeliest are
closer than that."""
OLD_CARD = launch.DeviceTraits((7, 5), 64, 64 * 1024, pdl=False, bf16=False)

Answers = list[tuple[list[int], list[dict[int, float]]]]


def answers(rounds: int = 1, **settings: Any) -> Answers:
    memory: dict[str, Any] = {} if "num_kv_blocks" in settings else {"kv_cache_gb": 1.0}
    llm = LLM(**memory, **settings)
    for _ in range(rounds):
        outputs = llm.generate(PROMPTS * 3, PARAMS, use_tqdm=False)
    llm.shutdown()
    found = []
    for output in outputs:
        best = output.outputs[0]
        assert best.logprobs is not None
        found.append(
            (best.token_ids, [{i: p.logprob for i, p in entry.items()} for entry in best.logprobs])
        )
    return found


@pytest.fixture(scope="module")
def exact() -> Answers:
    return answers(device="cpu", dtype="float32")


def agree(found: Answers, exact: Answers) -> int:
    """Compares each answer up to its first close choice; returns the number of compared tokens."""
    compared = 0
    for (tokens, logprobs), (want, expected) in zip(found, exact, strict=True):
        for token, entry, wanted, there in zip(tokens, logprobs, want, expected, strict=True):
            first, second = sorted(there.values(), reverse=True)[:2]
            if token != wanted:
                assert first - second < CLOSE
                break
            assert abs(entry[token] - there[token]) < CLOSE
            compared += 1
    return compared


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 48, "max_num_seqs": 20},
        {"max_num_batched_tokens": 64},
        {"rounds": 2, "enable_prefix_caching": True},
        {"num_kv_blocks": 40, "max_model_len": 512, "enable_prefix_caching": False},
        {"enforce_eager": True},
        {"deterministic": True},
        {"dtype": "float16"},
        {"disable": OPTIMIZATIONS},
    ],
    ids=[
        "plain",
        "chunked",
        "more lanes than tokens",
        "prefix hits",
        "preempted",
        "eager",
        "fixed",
        "fp16",
        "nothing on",
    ],
)
def test_paths_agree_with_fp32(exact: Answers, settings: dict[str, Any]) -> None:
    found = answers(**{"device": "cuda", "dtype": "bfloat16", **settings})
    assert agree(found, exact) > 0.6 * 32 * len(exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fallbacks_of_older_cards(
    exact: Answers, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_cuda_traits", lambda index, pdl: OLD_CARD)
    assert launch.traits(torch.device("cuda")) == OLD_CARD
    found = answers(device="cuda", dtype=dtype)
    assert agree(found, exact) > 0.6 * 32 * len(exact)
