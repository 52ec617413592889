"""Families with experts: published shapes, and refused options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.layers.experts import ExpertsSpec
from quire.models import build_model, spec_from_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 100, "num_experts": 8,
}  # fmt: skip
GLM = {**QWEN3, "architectures": ["Glm4MoeForCausalLM"], "head_dim": 16}
MINIMAX = {**QWEN3, "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16}
GPT_OSS = {**QWEN3, "architectures": ["GptOssForCausalLM"]}


@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV2", "DeepseekV3", "Glm4Moe", "Glm4MoeLite", "GptOss", "MiniMaxM2", "Mixtral",
        "Qwen3Moe",
    ],
)  # fmt: skip
def test_parameters_as_transformers_counts_them(name: str) -> None:
    """The default configs have the shapes of published models."""
    import transformers

    more = {"Glm4Moe": {"head_dim": 128}, "DeepseekV2": {"num_experts_per_tok": 6}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4, **more)
    with torch.device("meta"):
        oracle = transformers.AutoModelForCausalLM.from_config(config)
    published = {**config.to_dict(), "architectures": [type(oracle).__name__]}
    model = build_model(spec_from_config(published), device="meta")
    found = sum(parameter.numel() for parameter in model.parameters())
    corrections = sum(
        buffer.numel() for key, buffer in oracle.named_buffers() if key.endswith("correction_bias")
    )
    assert found == corrections + sum(parameter.numel() for parameter in oracle.parameters())


def test_keys_of_qwen3_coder() -> None:
    more = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    assert spec_from_config({**QWEN3, **more}) == spec_from_config(QWEN3)


def test_layers_without_experts() -> None:
    spec = spec_from_config({**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [isinstance(layer.ffn, ExpertsSpec) for layer in spec.layers] == [0, 1, 0, 0]
    spec = spec_from_config({**GLM, "first_k_dense_replace": 3})
    assert [isinstance(layer.ffn, ExpertsSpec) for layer in spec.layers] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**QWEN3, "num_local_experts": 9}, "different numbers of experts"),
        ({**QWEN3, "num_experts": 0}, "num_experts must be an integer >= 1"),
        ({**QWEN3, "num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8"),
        ({**QWEN3, "mlp_only_layers": "all"}, "mlp_only_layers must be a list"),
        ({**QWEN3, "use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ({**QWEN3, "shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8"),
        ({**GLM, "n_group": 3}, "8 of 8 experts cannot be in 1 of 3 groups"),
        ({**GLM, "n_group": 4, "topk_group": 5}, "topk_group must be at most 4"),
        ({**MINIMAX, "scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({**MINIMAX, "use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ({**MINIMAX, "shared_intermediate_size": 8}, "shared_intermediate_size=8"),
        ({**MINIMAX, "attn_type_list": [1, 0, 1, 1]}, "layers without full attention"),
        ({**GPT_OSS, "swiglu_limit": -1}, "swiglu_limit must be a positive number"),
        ({**QWEN3, "architectures": ["Qwen3ForCausalLM"]}, "num_experts=8 is not supported"),
    ],
)
def test_invalid_or_unsupported_options_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_from_config(config)
