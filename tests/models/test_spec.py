"""config.json in all its forms gives the right architecture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.layers.rotary import LinearScaling, Llama3Scaling, YarnScaling
from quire.models import build_model, load_config, load_weights, spec_from_config
from tests.models.harness import Harness

DATA = Path(os.environ.get("QUIRE_DATA", "/nonexistent"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="QUIRE_DATA names no folder")

PARAMETERS = {
    "gemma2-2b": 2_614_341_888,
    "gemma3-12b": 11_766_034_176,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "tinyllama-1.1b": 1_100_048_384,
}
"""Parameters, as published or counted by transformers."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


@needs_data
@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes(name: str) -> None:
    spec = spec_from_config(load_config(DATA / "configs" / name))
    model = build_model(spec, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@needs_data
def test_the_stories_checkpoint_generates_its_text() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = DATA / "models" / "stories260K"
    model = build_model(spec_from_config(load_config(folder)), device="cpu")
    load_weights(model, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time").ids
    bos = model.spec.bos_token_id
    prompt = prompt if prompt[0] == bos else [bos, *prompt]
    tokens = Harness(model).generate([prompt], 40)[0]
    text = tokenizer.decode(prompt + tokens)
    assert text.startswith("Once upon a time, there was a little girl named Lily")


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ModelError, match=r"FooForCausalLM.*GPT2LMHeadModel.*Qwen3ForCausalLM"):
        spec_from_config({"architectures": ["FooForCausalLM"]})
    with pytest.raises(ModelError, match="unknown architecture: none"):
        spec_from_config({})


def test_model_type_stands_in_for_the_architecture() -> None:
    config = {**LLAMA, "model_type": "llama", "architectures": None}
    assert spec_from_config(config).family == "llama"


def test_old_and_new_rope_settings_agree() -> None:
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    old = {"rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 2.0}}
    a = spec_from_config({**LLAMA, "rope_parameters": new, "dtype": "bfloat16"})
    b = spec_from_config({**LLAMA, **old, "torch_dtype": "bfloat16"})
    assert a == b
    assert a.attention[0].rope is not None
    assert a.attention[0].rope.theta == 5000.0
    assert a.attention[0].rope.scaling == LinearScaling(2.0)
    assert a.dtype == torch.bfloat16
    assert a.max_positions == 256


def test_rope_scalings() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    spec = spec_from_config({**LLAMA, "rope_scaling": llama3})
    assert spec.attention[0].rope is not None
    assert spec.attention[0].rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)
    assert spec.max_positions == 128
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    spec = spec_from_config({**LLAMA, "rope_scaling": yarn})
    assert spec.attention[0].rope is not None
    assert isinstance(spec.attention[0].rope.scaling, YarnScaling)
    assert spec.attention[0].rope.scaling.attention_factor == pytest.approx(1.1386294)
    assert spec.max_positions == 256


BAD = {
    "hidden_size": ("abc", "hidden_size must be an integer"),
    "vocab_size": (None, "has no 'vocab_size'"),
    "num_key_value_heads": (3, "cannot share 3 key/value heads"),
    "num_attention_heads": (5, "not a multiple of 5 heads"),
    "architectures": (1.5, "unknown architecture: 1.5"),
    "hidden_act": ("relu", "hidden_act 'relu' is not supported"),
    "rms_norm_eps": (-1.0, "rms_norm_eps must be a positive number"),
    "rope_theta": (10**400, "rope_theta must be a positive number"),
    "rope_scaling": ({"type": "dynamic", "factor": 2.0}, "rope type 'dynamic'"),
    "dtype": ("int8", "dtype 'int8' is not supported"),
    "attention_bias": ("yes", "attention_bias must be true or false"),
    "eos_token_id": ("</s>", "eos_token_id must be token ids"),
}


@pytest.mark.parametrize(
    "name", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [10**9, 10**12, 10**400])
def test_implausibly_large_sizes_are_refused(name: str, value: int) -> None:
    with pytest.raises(ModelError, match=f"{name} must be at most") as caught:
        spec_from_config({**LLAMA, name: value})
    assert len(str(caught.value)) < 200


def test_implausibly_large_token_ids_are_refused() -> None:
    with pytest.raises(ModelError, match="eos_token_id must be token ids"):
        spec_from_config({**LLAMA, "eos_token_id": [2, 10**12]})


@pytest.mark.parametrize("name", BAD)
def test_invalid_settings_are_refused(name: str) -> None:
    value, message = BAD[name]
    with pytest.raises(ModelError, match=message):
        spec_from_config({**LLAMA, name: value})


def test_a_config_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="cannot read"):
        load_config(tmp_path)


YARN = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": ["silu"]}, r"hidden_act \"\['silu'\]\" is not supported"),
        ({"rope_scaling": {**YARN, "mscale": "x"}}, "mscale must be a positive number, got 'x'"),
        ({"rope_scaling": {**YARN, "factor": 2**70}}, "factor must be at most 65536"),
    ],
)
def test_values_of_the_wrong_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({**LLAMA, **change})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 4096),
        ({"sliding_window": None}, None),
        ({"sliding_window": 64}, 64),
        ({"sliding_window_size": 32}, 32),
    ],
)
def test_mistral_windows(settings: dict[str, Any], expected: int | None) -> None:
    config = {**LLAMA, "architectures": ["MistralForCausalLM"], **settings}
    config["max_position_embeddings"] = 8192
    spec = spec_from_config(config)
    assert [mixer.window for mixer in spec.attention] == [expected, expected]
    groups = build_model(spec, device="meta").kv_groups(16)
    assert [(group.kind, group.window) for group in groups] == [
        ("full", None) if expected is None else ("window", expected)
    ]


def test_window_groups() -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 2,
    }
    full, window = build_model(spec_from_config(config), device="meta").kv_groups(16)
    assert (full.kind, full.layers, full.window) == ("full", (0, 1), None)
    assert (window.kind, window.layers, window.window) == ("window", (2, 3, 4), 20)
    assert full.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
    config["sliding_window"] = 128
    (only,) = build_model(spec_from_config(config), device="meta").kv_groups(16)
    assert (only.kind, only.layers) == ("full", (0, 1, 2, 3, 4))


def test_layer_types_must_fit() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}
    with pytest.raises(ModelError, match="layer_types must give each of 2 layers"):
        spec_from_config(config)
    config["layer_types"] = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelError, match="need a sliding_window"):
        spec_from_config(config)


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
        {"no_rope_layers": [1, 0]},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "default", "mrope_section": [2, 2, 4]}},
        {"attention_chunk_size": 64},
        {"num_local_experts": 8},
        {"logits_scaling": 8.0},
        {"embedding_multiplier": 12.0},
        {"use_qk_norm": True},
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "GPT2"])
def test_unsupported_keys_are_refused_by_name(extra: dict[str, Any], family: str) -> None:
    name = next(iter(extra))
    if name == "layer_types" and family in ("Mistral", "Qwen2", "Qwen3"):
        pytest.skip("implemented")
    config = {**LLAMA, "architectures": [f"{family}ForCausalLM"], **extra}
    if family == "GPT2":
        gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}
        config = {**gpt2, "architectures": ["GPT2LMHeadModel"], **extra}
    with pytest.raises(ModelError, match=rf"config.json: {name}.*not supported"):
        spec_from_config(config)


@pytest.mark.parametrize("family", ["Gemma3", "Gemma4"])
def test_a_cap_that_published_code_does_not_apply_is_refused(family: str) -> None:
    config = {**LLAMA, "architectures": [f"{family}ForCausalLM"], "attn_logit_softcapping": 50.0}
    with pytest.raises(ModelError, match=r"attn_logit_softcapping=50\.0 is not supported"):
        spec_from_config(config)


def test_keys_that_change_nothing_are_accepted() -> None:
    harmless = {
        "layer_types": ["full_attention"] * 2,
        "no_rope_layers": [1, 1],
        "attn_logit_softcapping": None,
        "partial_rotary_factor": 1.0,
        "num_local_experts": 0,
        "logits_scaling": 1,
    }
    assert spec_from_config({**LLAMA, **harmless}) == spec_from_config(LLAMA)
