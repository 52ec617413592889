"""Tiny random checkpoints, made and evaluated by transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": 10000.0, "factor": factor}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 256,
}
MINISTRAL3 = {
    **YARN,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FOUR = {"num_hidden_layers": 4}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}

GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "sliding_window": 9,
}

EMBEDDINGS = {"Gemma2": 0.15, "Gemma3Text": 0.15, "Gemma4Text": 0.15, "Granite": 0.3}
"""Scales of embeddings that the models multiply by more."""

HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
}

LATENT: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.9, "mscale_all_dim": 1.2}

SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": _linear(3.0)}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 13}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    ),
    "qwen3-moe-normed": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 11},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
    ),
    "glm4-moe-normed": (
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "intermediate_size": 40,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 12,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "rope_interleave": False,
            "norm_topk_prob": False,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "cohere2": ("Cohere2", {"sliding_window": 9, "logit_scale": 0.25, **FOUR}),
    "cohere2-bias": ("Cohere2", {"sliding_window": 20, "attention_bias": True, **FOUR}),
    "exaone4": ("Exaone4", {"sliding_window": 9, **FOUR}),
    "exaone4-full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3},
    ),
    "gemma2": ("Gemma2", {"sliding_window": 11, **GEMMA}),
    "gemma3": ("Gemma3Text", {"sliding_window": 7, "num_hidden_layers": 7, **GEMMA}),
    "gemma3-linear": (
        "Gemma3Text",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _linear(8.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            **GEMMA,
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "final_logit_softcapping": 20.0}),
    "gemma4-moe": (
        "Gemma4Text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL3}),
    "olmo2": ("Olmo2", {}),
    "olmo2-mqa": ("Olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "rope_parameters": YARN, **FOUR}),
    "phi3": ("Phi3", {"sliding_window": 20, "original_max_position_embeddings": 256}),
    "phi3-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "mlp_bias": True, "attention_out_bias": True}),
    "smollm3": ("SmolLM3", FOUR),
    "smollm3-window": (
        "SmolLM3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
        },
    ),
    "qwen3-next": ("Qwen3Next", {**HYBRID, "mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3-next-moe": ("Qwen3Next", {**HYBRID, **SHARED, "mlp_only_layers": [1]}),
    "qwen3.5": ("Qwen3_5", HYBRID),
    "qwen3.5-moe": ("Qwen3_5Moe", {**HYBRID, **SHARED}),
    "qwen3.5-order": (
        "Qwen3_5",
        {
            **HYBRID,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-exact-gelu": ("GPT2", {"activation_function": "gelu", "n_inner": 100}),
}


KINDS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
}


def make(folder: Path, case: str, **save: Any) -> Any:
    """Saves the checkpoint of a case and returns the transformers model."""
    import transformers

    # The library changes its arguments.
    name, changes = copy.deepcopy(CASES[case])
    sizes = GPT2_SIZES if name == "GPT2" else SIZES
    kind = KINDS.get(name, f"{name}ForCausalLM")
    config_name = {"Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"}.get(name, name)
    config = getattr(transformers, f"{config_name}Config")(**{**sizes, **changes})
    torch.manual_seed(sum(case.encode()))
    model = getattr(transformers, kind)(config).eval()
    redraw(model, EMBEDDINGS.get(name, 1.0))
    model.save_pretrained(folder, **save)
    return model


def redraw(model: Any, embeddings: float = 1.0) -> None:
    """Draws weights large enough that every layer changes the results and greedy text does not
    loop. embeddings: scale of the token embeddings, which must not dominate the layers' outputs."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                strength = 12.0 if "wpe" in key else 1.2
                if "conv1d" in key:
                    strength = 3.0  # normalizing small vectors would magnify rounding errors
                strength *= embeddings if "embed_tokens" in key else 1.0
                parameter.normal_(0.0, strength * parameter.shape[-1] ** -0.5)
            else:
                strength = 0.02 if key.endswith("ln_f.bias") else 0.2
                parameter.add_(torch.randn_like(parameter) * strength)
                if key.endswith("A_log"):
                    parameter.sub_(3.0)  # states that decay slowly
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Returns transformers' greedy continuation."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
