"""`quire info`: what a model needs, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.info import info
from quire.config import EngineArgs
from quire.models import hub

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model_of(capsys: pytest.CaptureFixture[str], model: str, **settings: Any) -> dict[str, Any]:
    info(EngineArgs(model=model, device="cpu", dtype="bfloat16", **settings), as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["model"]
    return found


def test_sizes_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = model_of(capsys, str(tmp_path))
    # Two norms for each part of a layer, and those of q and k; the head is tied.
    attention = 64 * (4 + 2 + 2 + 4) * 32
    norms = 4 * 64 + 2 * 32
    assert found["parameters"] == 1000 * 64 + 64 + 6 * (attention + 3 * 64 * 128 + norms)
    # Norms are held in fp32.
    assert found["weight_bytes"] == 2 * found["parameters"] + 2 * (64 + 6 * norms)
    token = 2 * 2 * 32 * 2
    assert found["kv_bytes_per_token"] == token
    assert found["window_bytes_per_request"] == 5 * 100 * token
    assert found["state_bytes_per_request"] == 0
    assert found["kv_groups"] == ["full, 1 layers", "window of 100 tokens, 5 layers"]


def test_a_model_of_the_hub_is_described_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked: list[list[str]] = []

    def fetch(model: str, **settings: Any) -> str:
        asked.append(settings["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    found = model_of(capsys, "google/gemma-3-tiny")
    assert found["name"] == "google/gemma-3-tiny"
    assert asked == [["*.json", "*.jinja"]]
