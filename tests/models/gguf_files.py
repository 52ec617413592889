"""GGUF files made from tiny checkpoints, with tensors changed as by llama.cpp's converters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Fields = dict[str, Any]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe", "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "Cohere2ForCausalLM": "cohere2",
    "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2", "Exaone4ForCausalLM": "exaone4",
    "Glm4ForCausalLM": "glm4", "GlmForCausalLM": "chatglm", "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss", "MiniMaxM2ForCausalLM": "minimax-m2",
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek2",
    "GraniteForCausalLM": "granite", "SmolLM3ForCausalLM": "smollm3",
    "Ministral3ForCausalLM": "mistral3", "SeedOssForCausalLM": "seed_oss",
    "GPT2LMHeadModel": "gpt2",
}  # fmt: skip
_TURNED = "llama", "mistral3", "smollm3", "granite"
_ADDED = "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_KEYS = {
    "max_position_embeddings": "context_length", "n_positions": "context_length",
    "hidden_size": "embedding_length", "n_embd": "embedding_length",
    "num_hidden_layers": "block_count", "n_layer": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale", "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}  # fmt: skip
"""Settings of files by those of config.json."""


def write_twin(folder: Path, path: Path, kind: str = "F32", parts: int = 1, **more: Any) -> None:
    """Writes the checkpoint of a folder to a GGUF file, as one type where rows allow it.

    Args:
        parts: Files to split it into.
        more: Settings to add.
    """
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    stored = load_file(folder / "model.safetensors")
    tensors = dict(_tensors(stored, name, config))
    fields = {**_fields(config, name), **more}
    keys = list(tensors)
    for part in range(parts):
        own = path
        if parts > 1:
            own = path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(own, name)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(keys))
        for key, value in fields.items() if part == 0 else ():
            _add(writer, key, value)
        for key in keys[part::parts]:
            array = tensors[key]
            type = gguf.GGMLQuantizationType[kind]
            each = gguf.GGML_QUANT_SIZES[type][0]
            if array.ndim < 2 or array.shape[-1] % each or key.endswith("bias") or kind == "F32":
                writer.add_tensor(key, array)
            else:
                writer.add_tensor(key, gguf.quantize(array, type), raw_dtype=type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _fields(config: Any, name: str) -> Fields:  # noqa: C901
    found: Fields = {}
    for key, own in _KEYS.items():
        if config.get(key) is not None:
            found[own] = config[key]
    rope = config.get("rope_parameters") or {}
    near = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    if rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    if name == "gemma3":
        found["rope.freq_base_swa"] = float(near["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
        if "original_max_position_embeddings" in rope:
            original = rope["original_max_position_embeddings"]
            found["rope.scaling.original_context_length"] = original
    if rope.get("mscale_all_dim"):
        # The converter of DeepSeek writes a tenth, others do not.
        times = 0.1 if name == "deepseek2" else 1.0
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"] * times
    if rope.get("llama_4_scaling_beta"):
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if rope.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
    share = rope.get("partial_rotary_factor", 1.0)
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (heads and config["hidden_size"] // heads)
    if head_dim:
        found["rope.dimension_count"] = int(head_dim * share)
    if "layer_types" in config and name in ("gemma3", "olmo2", "gpt-oss", "cohere2", "exaone4"):
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        found["attention.sliding_window_pattern"] = kinds
    if name in ("gpt-oss", "minimax-m2"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if name == "deepseek2":
        rotary = config["qk_rope_head_dim"]
        found |= {
            "rope.dimension_count": rotary,
            "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rotary,
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": config["v_head_dim"],
        }
    if name in ("deepseek2", "glm4moe", "minimax-m2"):
        found["expert_gating_func"] = 1 if "V2" in config["architectures"][0] else 2
    if "linear_value_head_dim" in config:
        value, count = config["linear_value_head_dim"], config["linear_num_value_heads"]
        found["ssm.inner_size"] = value * count
    if name == "gpt2":
        found["feed_forward_length"] = config.get("n_inner") or 4 * config["n_embd"]
    if not config.get("num_experts") and name == "qwen3next":
        found |= {"expert_count": 8, "expert_used_count": 1}
    return {f"{name}.{key}": value for key, value in found.items()}


def _tensors(
    stored: dict[str, Tensor], name: str, config: Any
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    arch = next(a for a, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(arch, layers)
    experts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in stored.items():
        if found := _EXPERT.fullmatch(key):
            group = experts.setdefault(f"{found[1]}.{found[3]}.weight", {})
            group[int(found[2])] = tensor
    stacked = {key: torch.stack([own[i] for i in sorted(own)]) for key, own in experts.items()}
    single = {key: tensor for key, tensor in stored.items() if not _EXPERT.fullmatch(key)}
    for key, tensor in {**single, **stacked}.items():
        for own, changed in _changed(key, tensor.float(), name, config):
            stem, dot, kind = own.rpartition(".")
            mapped = names.get_name(own, try_suffixes=(".weight", ".bias"))
            if own.endswith(("e_score_correction_bias", "e_score_correction.bias")):
                layer = re.search(r"layers\.(\d+)", own)
                assert layer is not None
                mapped = f"blk.{layer[1]}.exp_probs_b.bias"
            assert mapped is not None, (own, stem, dot, kind)
            yield mapped, np.ascontiguousarray(changed.numpy())
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            yield f"rope_factors_{kind}.weight", factors
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3(rope, config)


def _llama3(rope: Any, config: Any) -> np.ndarray[Any, Any]:
    """Returns what llama.cpp's converter writes for the scaling of Llama 3."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in frequencies.tolist():
        wavelength = 2 * np.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def _interleaved(tensor: Tensor, heads: int) -> Tensor:
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


def _tiled(tensor: Tensor, config: Any, size: int, dim: int = 0) -> Tensor:
    """Returns the value heads, ordered by their index within a key head's group."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return (
        tensor.unflatten(dim, (keys, values // keys, size))
        .transpose(dim, dim + 1)
        .flatten(dim, dim + 2)
    )


def _changed(  # noqa: C901
    key: str, tensor: Tensor, name: str, config: Any
) -> Iterator[tuple[str, Tensor]]:
    if name in _TURNED and "q_proj" in key:
        tensor = _interleaved(tensor, config["num_attention_heads"])
    if name in _TURNED and "k_proj" in key:
        tensor = _interleaved(tensor, config["num_key_value_heads"])
    if name in _ADDED and key.endswith("norm.weight") and "linear_attn.norm" not in key:
        tensor = tensor + 1
    if name == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        tensor = tensor.t()
    if name in ("qwen35", "qwen35moe") and "linear_attn." in key:
        tensor = _tiled_values(key, tensor, config)
    if key.endswith("A_log"):
        tensor = -tensor.exp()
    if key.endswith("dt_bias"):
        key = key.replace("dt_bias", "dt_proj.bias")
    if "conv1d" in key:
        tensor = tensor.squeeze(1)
    if "in_proj_qkvz" in key:
        yield from _of_heads(key, tensor, config)
    elif key.endswith("kv_b_proj.weight"):
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = tensor.unflatten(0, (-1, nope + value)).split([nope, value], 1)
        yield key.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield key.replace("kv_b_proj", "v_b_proj"), values
    elif "experts.gate_up_proj" in key:
        dim = 1 if name == "qwen35moe" else -1
        bias = key.endswith("_bias")
        if name == "gpt-oss":
            parts = [tensor[..., which::2] for which in (0, 1)]
            parts = parts if bias else [part.transpose(1, 2) for part in parts]
        else:
            parts = list(tensor.chunk(2, dim))
        for part, own in zip(parts, ("gate_proj", "up_proj"), strict=True):
            stem = key.replace("gate_up_proj", own).removesuffix("_bias")
            yield f"{stem}.{'bias' if bias else 'weight'}", part
    elif "experts.down_proj" in key and not key.endswith(".weight"):
        if name == "gpt-oss" and not key.endswith("_bias"):
            tensor = tensor.transpose(1, 2)
        kind = "bias" if key.endswith("_bias") else "weight"
        yield f"{key.removesuffix('_bias')}.{kind}", tensor
    elif key.endswith(".sinks"):
        yield f"{key}.weight", tensor
    else:
        yield key, tensor


def _tiled_values(key: str, tensor: Tensor, config: Any) -> Tensor:
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    size = config["linear_value_head_dim"]
    if "in_proj_qkv" in key or "conv1d" in key:
        return torch.cat([tensor[:keys], _tiled(tensor[keys:], config, size)])
    if "in_proj_z" in key:
        return _tiled(tensor, config, size)
    if "out_proj" in key:
        return _tiled(tensor, config, size, 1)
    return tensor if "norm" in key else _tiled(tensor, config, 1)


def _of_heads(key: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    heads, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = tensor.unflatten(0, (heads, -1)).split([dim, dim, value, value], 1)
    stacked = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield key.replace("in_proj_qkvz", "in_proj_qkv"), stacked
    yield key.replace("in_proj_qkvz", "in_proj_z"), z.flatten(0, 1)
