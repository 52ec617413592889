"""Published shapes: models that families build from a real config.json, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.layers.rotary import FactorScaling, LinearScaling
from quire.models import build_model, load_config, spec_from_config
from quire.models.config import ARCHITECTURES, family_named

DEFAULTS = {
    "Cohere2": {},
    "Exaone4": {},
    "Gemma2": {},
    "Gemma3Text": {"architectures": ["Gemma3ForCausalLM"]},
    "Gemma4Text": {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size_per_layer_input": 0,
        "num_attention_heads": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "Glm": {},
    "Glm4": {},
    "Granite": {},
    "Llama": {},
    "Ministral": {"head_dim": 128},
    "Ministral3": {},
    "Mistral": {},
    "Olmo2": {},
    "Olmo3": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {},
    "SeedOss": {},
    "SmolLM3": {},
}
"""Configs whose defaults are the shape of a published model."""

GEMMA3_12B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
"""The published config, without what concerns pictures."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_parameters_as_transformers_counts_them(name: str) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(num_hidden_layers=4, **DEFAULTS[name])
    with torch.device("meta"):
        oracle = transformers.AutoModelForCausalLM.from_config(config)
    published = {"architectures": [type(oracle).__name__], **config.to_dict()}
    published["architectures"] = published["architectures"] or [type(oracle).__name__]
    spec = spec_from_config(published)
    model = build_model(spec, device="meta")
    found = sum(parameter.numel() for parameter in model.parameters())
    scalars = [key for key, _ in oracle.named_buffers() if key.endswith("layer_scalar")]
    assert found == sum(parameter.numel() for parameter in oracle.parameters()) + len(scalars)
    # The sliding window of a published config is used.
    assert {m.window for m in spec.attention} <= {None, config.to_dict().get("sliding_window")}


def test_the_shape_that_is_measured() -> None:
    folder = Path(__file__).parents[2] / "bench" / "configs" / "gemma2-2b"
    model = build_model(spec_from_config(load_config(folder)), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_614_341_888


def test_gemma3_in_the_words_of_transformers_4() -> None:
    spec = spec_from_config(GEMMA3_12B)
    assert spec.vocab_size == 262208
    assert spec.tied_head
    assert spec.eos_token_ids == (1, 106)
    assert spec.max_positions == 131072
    assert spec.dtype == torch.bfloat16
    assert [mixer.window for mixer in spec.attention[:7]] == [1024] * 5 + [None, 1024]
    near, far = spec.attention[0].rope, spec.attention[5].rope
    assert near is not None
    assert far is not None
    assert (near.theta, near.scaling) == (10000.0, None)
    assert (far.theta, far.scaling) == (1000000.0, LinearScaling(8.0))
    groups = build_model(spec, device="meta").kv_groups(16)
    assert [(group.kind, len(group.layers)) for group in groups] == [("full", 8), ("window", 40)]


PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}


def test_longrope_has_the_factors_of_the_longest_sequence() -> None:
    scaling = spec_from_config(PHI).attention[0].rope
    assert scaling is not None
    assert isinstance(scaling.scaling, FactorScaling)
    assert scaling.scaling.factors == (2.0,) * 8
    assert scaling.scaling.attention_factor == pytest.approx(1.1902380714238083)
    short = spec_from_config({**PHI, "max_position_embeddings": 4096}).attention[0].rope
    assert short is not None
    assert short.scaling == FactorScaling((1.0,) * 8, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_mscale": 1.1}, "short_mscale is not supported"),
        ({"long_factor": [1.0]}, "long_factor must be 8 numbers"),
        ({"long_factor": ["a"] * 8}, "long_factor must be a positive number"),
    ],
)
def test_invalid_longrope_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({**PHI, "rope_scaling": {**PHI["rope_scaling"], **change}})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Cohere2", {"use_qk_norm": True}, "use_qk_norm"),
    ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be an integer"),
    ("Gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
    ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma3", {"num_experts": 4}, "num_experts"),
    ("Gemma4", {}, "hidden_size_per_layer_input=256 is not supported: embeddings for each layer"),
    (
        "Gemma4",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1},
        "num_kv_shared_layers=1 is not supported: layers that share keys and values",
    ),
    (
        "Gemma4",
        {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "all"},
        "use_bidirectional_attention='all' is not supported",
    ),
    ("Glm4", {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ("Granite", {"num_local_experts": 8}, "num_local_experts"),
    ("Olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("Phi3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("SeedOss", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers must give each of 2 layers"),
    ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers must give each of 2 layers"),
    ("Mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "rope_parameters.llama_4"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_a_refused_option_is_named(family: str, change: dict[str, Any], message: str) -> None:
    config = {**PHI, "rope_scaling": None, "num_hidden_layers": 2, **change}
    config["architectures"] = [f"{family}ForCausalLM"]
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        spec_from_config(config)


def test_every_architecture_has_a_family() -> None:
    assert list(ARCHITECTURES) == sorted(ARCHITECTURES)
    for name in set(ARCHITECTURES.values()):
        family = family_named(name)
        assert family is not None
        assert family.name == name
