"""`quire info`: what a model needs, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ModelError
from quire.models import files

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


def info(model: str, *flags: str) -> dict[str, Any]:
    """Returns what the command prints."""
    settings = ["--device", "cpu", "--dtype", "bfloat16", "--json"]
    done = CliRunner().invoke(app, ["info", model, *settings, *flags], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def model_of(model: str, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = info(model, *flags)["model"]
    return found


def test_sizes_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = model_of(str(tmp_path))
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
    assert found["kv_groups"] == ["full, 1 layer", "window of 100 tokens, 5 layers"]


def test_a_head_in_8_bits_is_counted(tmp_path: Path) -> None:
    """The head is tied: its copy adds to the embeddings' weights and bytes."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plain = model_of(str(tmp_path))
    own = model_of(str(tmp_path), "--quantization", "head=int8")
    assert own["weight_bytes"] - plain["weight_bytes"] == 1000 * (64 + 4)
    assert own["parameters"] - plain["parameters"] == 1000 * 64


def test_a_model_of_the_hub_is_described_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    asked: list[list[str]] = []

    def fetch(model: str, **settings: Any) -> str:
        asked.append(settings["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found = model_of("google/gemma-3-tiny")
    assert found["name"] == "google/gemma-3-tiny"
    assert asked == [["*.json", "*.jinja", "tiktoken.model", "tokenizer.model"]]


def test_a_download_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the hub's HTTP client become one line."""

    class ProxyError(Exception):
        pass

    def fetch(model: str, **settings: Any) -> str:
        raise ProxyError("403 Forbidden")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelError, match=r"could not be fetched from the hub \(ProxyError\)"):
        files.download("google/gemma-3-tiny", None)


def test_experts_in_four_bits_count_as_the_weights_they_stand_for(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    few = model_of(str(tmp_path))
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = model_of(str(tmp_path))
    assert few["parameters"] == plain["parameters"]
    experts = 6 * 4 * 3 * 64 * 128
    assert plain["weight_bytes"] - few["weight_bytes"] == experts * 2 - experts * 17 // 32


def test_info_lists_weights_and_kv_per_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 500_000}))
    found = info(str(tmp_path))["ranks"]
    assert found["1 rank"] == "0.06 GB of weights, 1.5 KB of KV a token"
    # Each KV head is held twice.
    assert found["2 ranks"] == "0.03 GB of weights, 0.8 KB of KV a token"
    assert found["4 ranks"] == "0.02 GB of weights, 0.8 KB of KV a token"
    assert found["8 ranks"] == "no: 4 attention heads cannot be split over 8 ranks"
    # Both stages have the embeddings, as the head is tied to them; the first has five of six
    # layers, as the head takes so long.
    assert found["2 stages of 1 rank"] == "0.06 GB of weights, 1.3 KB of KV a token"
    assert found["2 stages of 2 ranks"] == "0.03 GB of weights, 0.6 KB of KV a token"
    assert not any("whole experts" in name for name in found)


def test_encoders_keep_no_kv(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "vocab_size": 100, "hidden_size": 64,
              "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = info(str(tmp_path), "--kv-cache-gb", "1")
    assert found["model"]["attention"] == "4 heads of 16, in both directions"
    assert found["model"]["kv_groups"] == []
    assert found["model"]["kv_tokens_estimate"] is None
    assert found["ranks"]["4 ranks"] == "0.00 GB of weights"
    assert [*found["ranks"]] == ["1 rank", "2 ranks", "4 ranks", "8 ranks"]
