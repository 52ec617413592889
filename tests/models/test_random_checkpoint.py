"""Random checkpoints for timing starts pass the strict loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import random_checkpoint
from quire.models import build_model, load_config, load_weights, spec_from_config

LLAMA = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["qwen3", "gpt2"])
def test_the_loader_accepts_the_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    source, target = tmp_path / "config", tmp_path / "checkpoint"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    total = random_checkpoint.write(source, target, shard_bytes=10_000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    stored = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored += sum(
                t.numel() * t.dtype.itemsize for t in map(tensors.get_tensor, tensors.keys())
            )
    assert stored == total
    spec = spec_from_config(load_config(target))
    model = build_model(spec, device="cpu", dtype=torch.float32)
    load_weights(model, target)
    assert torch.equal(model.norm.weight, torch.ones(32))
    assert 0.01 < model.embedding.weight.std() < 0.03


def test_shards() -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1}
    assert list(random_checkpoint.shards(sizes, 6)) == [["a", "b"], ["c"], ["d"]]
    assert list(random_checkpoint.shards({}, 6)) == []
