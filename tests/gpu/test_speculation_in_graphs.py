"""A draft model in graphs: the same tokens to the bit where results are deterministic, and drafts
that are accepted as often as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams

ASKED = [
    "Tell me a story about a fox and a river.",
    "Tell me a story about a cat and a red ball.",
    "What is the capital of France?",
    "one, two, three, one, two, three, one, two, three, one,",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_tokens=96, seed=5),
    SamplingParams(temperature=0.7, max_tokens=64, seed=6, repetition_penalty=1.1, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=64, n=2),
]


def generated(**settings: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(device="cuda", deterministic=True, max_model_len=512, max_num_seqs=32, **settings)
    tokenizer = llm.get_tokenizer()
    prompts = []
    for asked in ASKED:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True
        )
        prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
    outputs = llm.generate(prompts * 4, PARAMS * 4, use_tqdm=False)
    return [list(c.token_ids) for output in outputs for c in output.outputs], llm


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": {"method": "draft"}},
        {"speculative": {"method": "auto"}},
        {"speculative": {"method": "suffix"}, "steps_in_flight": 3},
        {"speculative": {"method": "draft"}, "enforce_eager": True},
        {"speculative": {"method": "draft"}, "kv_cache_dtype": "fp8_dynamic"},
    ],
    ids=["draft", "auto", "suffix", "eager", "kv8"],
)
def test_nothing_but_speed_changes(settings: dict[str, Any]) -> None:
    kv = {key: settings[key] for key in ("kv_cache_dtype",) if key in settings}
    expected, plain = generated(**kv)
    plain.shutdown()
    found, llm = generated(**settings)
    assert found == expected
    stats = llm.stats().speculation
    assert stats is not None
    source = stats.sources.get("draft")
    if source is not None and "enforce_eager" not in settings:
        assert source.accepted > 0.4 * source.drafted
    llm.shutdown()
