"""Kernels against the twins on the same card, for every shape of a layer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.models import Decoder, build_model, spec_from_config
from tests.models.harness import Harness

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Cohere2": {"head_dim": 32, "logit_scale": 0.25},
    # Without experts: where two are close, rounding would choose.
    "DeepseekV3": {
        "kv_lora_rank": 128,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 99,
    },
    "Exaone4": {},
    "Gemma2": {"head_dim": 256, "query_pre_attn_scalar": 224},
    "Gemma3": {"head_dim": 128, "num_hidden_layers": 6},
    "Gemma4": {
        "head_dim": 128,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 6,
    },
    "Glm4": {"sliding_window": None},
    "Granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0},
    "Ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "Olmo2": {},
    "Phi3": {"head_dim": 96, "partial_rotary_factor": 0.75},
    "SmolLM3": {},
}
CLOSE = {torch.float32: 2e-3, torch.bfloat16: 0.15}
"""The largest relative error of logits, in root mean square."""


def fill(model: Decoder, queries: float) -> None:
    """Draws random weights. `queries` multiplies the gains of queries' norms."""
    make = torch.Generator(device="cuda").manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(generator=make)
        if parameter.dim() > 1:
            parameter.data.mul_(parameter.shape[-1] ** -0.5)
        else:
            parameter.data.mul_(0.2).add_(1.0)
        if "q_norm" in name:
            parameter.data.mul_(queries)


def logits(model: Decoder, backend: str, kv_cache_dtype: str) -> Tensor:
    """Returns logits of prompts in chunks, single tokens and drafts."""
    draw = random.Random(0)
    harness = Harness(model, block_size=16, kv_cache_dtype=kv_cache_dtype, padding=3)
    long, short = (harness.add([draw.randrange(512) for _ in range(n)]) for n in (140, 30))
    found = []
    with ops.use_policy(ops.Policy(backend=backend)):
        for steps in ((70, 1), (65, 9), (1, 1), (1, 1), (3, 4)):
            rows = list(zip((long, short), steps, strict=True))
            found += harness.step(rows)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_match_the_twins(family: str, dtype: torch.dtype) -> None:
    config = {**SIZES, **FAMILIES[family], "architectures": [f"{family}ForCausalLM"]}
    model = build_model(spec_from_config(config), device="cuda", dtype=dtype)
    # Gemma 4 does not scale scores: with gains near one, attention would choose a single position,
    # and rounding which.
    fill(model, queries=0.1 if family == "Gemma4" else 1.0)
    kinds = ["auto"]
    if dtype is torch.bfloat16 and model.spec.head_dims:
        kinds.append("int8")
    for kv_cache_dtype in kinds:
        want = logits(model, "reference", kv_cache_dtype)
        got = logits(model, "auto", kv_cache_dtype)
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < CLOSE[dtype], (kv_cache_dtype, float(error))
