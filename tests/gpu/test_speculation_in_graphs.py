"""A draft model in graphs: with `deterministic`, the same results to the bit, and drafts accepted
as often as on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.features.speculation.test_speculation import free_of_charge

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
    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "kv_cache_gb": 2.0}
    llm = LLM(device="cuda", deterministic=True, **sizes, **settings)
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
def test_drafts_change_only_the_speed(settings: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative": {"method": "draft"}},
        {"speculative": {"method": "eagle3"}, "steps_in_flight": 3},
        {"speculative": {"method": "draft"}, "enforce_eager": True},
    ],
    ids=["draft", "eagle3", "eager"],
)
def test_grammars_have_drafts(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host builds masks for the device's drafts while the body runs."""
    text = {"regex": r"[A-Za-z ,.!?'\n]{1,200}"}
    asked = {"max_tokens": 64, "structured_outputs": text}
    params = [
        SamplingParams(temperature=0.0, **asked),
        SamplingParams(temperature=0.7, seed=5, **asked),
        PARAMS[0],
        SamplingParams(temperature=0.0, max_tokens=64, structured_outputs={"json_object": True}),
    ]
    monkeypatch.setattr("tests.gpu.test_speculation_in_graphs.PARAMS", params)
    expected, plain = generated()
    plain.shutdown()
    found, llm = generated(**settings)
    assert found == expected
    if "enforce_eager" not in settings:  # without graphs, measured costs may rule drafts out
        stats = llm.stats().speculation
        assert stats is not None
        (source,) = stats.sources.values()
        assert source.accepted > 0
    llm.shutdown()


SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "vocab_size": 1024,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TARGETS = {
    "glm": {
        **SMALL, "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 3,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "num_nextn_predict_layers": 1,
    },
    "hybrid": {
        **SMALL, "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "mtp_num_hidden_layers": 1,
    },
    "eagle": {**SMALL, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 6},
}  # fmt: skip
HEAD = {
    **SMALL, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
    "draft_vocab_size": 500,
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_draft_heads_in_graphs(tmp_path: Path, name: str) -> None:
    """Weights are random, so most drafts are wrong, and near ties are the remaining differences.
    Recurrent layers are not deterministic, so few tokens are compared."""
    for folder, config in (("model", TARGETS[name]), ("head", HEAD)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    speculative: dict[str, Any] = {"method": "mtp"}
    if name == "eagle":
        speculative = {"method": "eagle3", "model": str(tmp_path / "head")}
    prompts = [{"prompt_token_ids": [(7 * i + k) % 1000 for k in range(20 + i)]} for i in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for settings in ({}, {"speculative": speculative}):
        llm = LLM(
            str(tmp_path / "model"), device="cuda", load_format="dummy", dtype="float32",
            skip_tokenizer_init=True, max_model_len=512, max_num_seqs=16, kv_cache_gb=1.0,
            **settings,
        )  # fmt: skip
        free_of_charge(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        stats = llm.stats().speculation
        llm.shutdown()
    assert stats is not None
    assert sum(source.drafted for source in stats.sources.values()) > 0
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= len(prompts) - 2
