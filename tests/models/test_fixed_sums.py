"""`--deterministic`: the same logits to the bit with 1, 2 and 4 ranks, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.models import (
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.ops import Policy, use_policy
from quire.parallel import ProcessGroup, SingleGroup
from tests.gloo_ranks import on_ranks
from tests.models.harness import Harness, Row

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 211,
    "torch_dtype": "float32",
}


def _like(name: str, **changes: Any) -> dict[str, Any]:
    kind = "".join(part.capitalize() for part in name.split("_"))
    return {**_QWEN3, "architectures": [f"{kind}ForCausalLM"], "model_type": name, **changes}


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default",
    },
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _like("llama", attention_bias=True, mlp_bias=True),
    "qwen3": {**_QWEN3, "tie_word_embeddings": True},
    "qwen3-moe": _like("qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **_EXPERTS),
    "qwen3.5": _like("qwen3_5_text", **_HYBRID),
    "deepseek-v3": _like("deepseek_v3", architectures=["DeepseekV3ForCausalLM"], **_LATENT),
    "wide": _like("llama", head_dim=128, intermediate_size=1024),
    "window": _like("mistral", sliding_window=9),
}
CASES: list[tuple[str, str | None, str]] = [
    ("llama", None, "float32"),
    ("qwen3", None, "bfloat16"),
    ("qwen3-moe", None, "float32"),
    ("qwen3.5", None, "float32"),
    ("deepseek-v3", None, "float32"),
    ("window", None, "float32"),
    ("wide", "int4", "float32"),
    ("qwen3", "w8a8", "float32"),
    ("qwen3-moe", "int8", "bfloat16"),
]
PROMPTS = [[5, 17, 99, 3, 42, 7, 7, 150, 23, 8, 1, 4, 210, 77], [11, 200], [30, 31, 32, 33, 34]]


def logits_of(
    folder: Path, quantization: str | None, dtype: str, group: ProcessGroup
) -> list[Tensor]:
    """Returns the logits [positions, vocabulary] of each prompt, computed in two mixes."""
    config = load_config(folder)
    spec = spec_from_config(config)
    model = build_model(
        spec, device="cpu", dtype=getattr(torch, dtype), group=group,
        quantization=model_quantization(folder, config, spec, quantization),
    )  # fmt: skip
    load_weights(model, folder, "dummy", 3)
    found = []
    with use_policy(Policy(deterministic=True)):
        together = Harness(model)
        rows = [together.add(prompt) for prompt in PROMPTS]
        parts = [together.step([(rows[0], 5)])]
        parts.append(together.step([(rows[1], 1), (rows[0], 1), (rows[2], 5)]))
        parts.append(together.step([(rows[0], 8), (rows[1], 1)]))
        (a,), (d, b, c), (e, f) = parts
        found += [torch.cat((a, b, e)), torch.cat((d, f)), c]
        alone = Harness(model, padding=3)
        for prompt in PROMPTS:
            row: Row = alone.add(prompt)
            found.append(alone.step([(row, len(prompt))])[0])
    return found


def all_logits(root: Path, group: ProcessGroup) -> list[list[Tensor]]:
    return [logits_of(root / name, form, dtype, group) for name, form, dtype in CASES]


def _arrays(root: Path, group: ProcessGroup) -> list[Any]:
    return [[logits.numpy() for logits in case] for case in all_logits(root, group)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_the_bits_of_one(tmp_path: Path, world: int) -> None:
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    expected = all_logits(tmp_path, SingleGroup())
    for case, logits in zip(CASES, expected, strict=True):
        for together, alone in zip(logits[:3], logits[3:], strict=True):
            assert torch.equal(together, alone), case
            assert together.isfinite().all()
            assert together.std() > 1e-3

    found = on_ranks(_arrays, tmp_path, tmp_path, world)
    for rank in range(world):
        for case, own, whole in zip(CASES, found[rank], expected, strict=True):
            for part, logits in zip(own, whole, strict=True):
                assert torch.equal(torch.from_numpy(part), logits), (rank, case)
