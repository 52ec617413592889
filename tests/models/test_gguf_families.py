"""GGUF files of every family give the same logits as safetensors of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.models import load_config, resolve_model_path
from quire.tools.quantize.original import OriginalModel
from tests.models.checkpoints import CASES, DEEPSEEK_YARN, make
from tests.models.test_quantized_checkpoints import loaded, logits

pytest.importorskip("gguf")
from tests.models.gguf_files import write_twin

_UNSAID = {
    "qwen2-window", "qwen3-window", "llama-head-dim", "smollm3-window", "ministral",
    "deepseek-v3-halves", "glm4-moe-lite", "gpt2-exact-gelu", "mistral-window", "mixtral-window",
    "gemma4", "gemma4-moe", "qwen3.5-order", "qwen3-moe", "qwen3-next",
}  # fmt: skip
"""Cases whose configurations say what GGUF has no setting for."""
_SHARP = {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gemma3-linear": {"query_pre_attn_scalar": 16},
    "qwen3-moe-normed": {"mlp_only_layers": []},
    "qwen3-next-moe": {"mlp_only_layers": []},
    "deepseek-v2": {"rope_parameters": _SHARP},
    "deepseek-v3": {"rope_parameters": _SHARP},
}
"""Settings of the other cases for which GGUF has but one value."""
FAMILIES = [case for case in CASES if case not in _UNSAID]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes = CASES[case]
    monkeypatch.setitem(CASES, case, (name, {**changes, **_CHANGES.get(case, {})}))
    make(tmp_path, case)
    write_twin(tmp_path, tmp_path / "twin.gguf")
    twin = loaded(resolve_model_path(str(tmp_path / "twin.gguf")))
    expected = logits(loaded(tmp_path))
    found = logits(twin)
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


_EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
"""Sizes that blocks of 32 weights divide."""
_WIDE: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": 16},
    "gemma3": {"query_pre_attn_scalar": 32},
    "qwen3-moe-normed": {"mlp_only_layers": []},
    "gpt-oss": {},
    "minimax-m2": {},
    "glm4": {},
    "qwen3.5-moe": {},
}


@pytest.mark.parametrize("case", _WIDE)
@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_blocks(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in few bits, including stacked ones, against the same weights dequantized."""
    name, changes = CASES[case]
    monkeypatch.setitem(CASES, case, (name, {**changes, **_EVEN, **_WIDE[case]}))
    make(tmp_path, case)
    write_twin(tmp_path, tmp_path / "twin.gguf", kind)
    folder = resolve_model_path(str(tmp_path / "twin.gguf"))
    types = load_config(folder)["quantization_config"]["types"]
    assert set(types.values()) == {kind}
    found = logits(loaded(folder))
    expected = logits(loaded(folder, wanted="float"))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_model_of_several_files(tmp_path: Path) -> None:
    """Any part of a split file may be loaded, and finds the others."""
    make(tmp_path, "llama")
    write_twin(tmp_path, tmp_path / "twin.gguf", parts=3)
    write_twin(tmp_path, tmp_path / "whole.gguf")
    expected = logits(loaded(resolve_model_path(str(tmp_path / "whole.gguf"))))
    for part in (1, 3):
        folder = resolve_model_path(str(tmp_path / f"twin-0000{part}-of-00003.gguf"))
        assert torch.equal(logits(loaded(folder)), expected)
    (tmp_path / "twin-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"one of 3 files.*missing: twin-00002-of-00003\.gguf"):
        resolve_model_path(str(tmp_path / "twin-00001-of-00003.gguf"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"llama.rope.dimension_count": 4}, "partly rotated heads"),
        ({"llama.attention.sliding_window": 9}, "llama with a sliding window are not supported"),
        ({"llama.block_count": 2}, None),
        ({"llama.attention.head_count": 5}, "does not divide|do not fit"),
    ],
)
def test_settings_that_do_not_fit(
    settings: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    make(tmp_path, "llama")
    write_twin(tmp_path, tmp_path / "twin.gguf", **settings)
    if message is None:
        # Layers after the last one are draft layers.
        loaded(resolve_model_path(str(tmp_path / "twin.gguf")))
        return
    with pytest.raises(ModelError, match=message):
        resolve_model_path(str(tmp_path / "twin.gguf"))


def test_files_of_floats_are_quantized_again(tmp_path: Path) -> None:
    """The original has the names of published checkpoints, as far as files contain the same
    tensors."""
    make(tmp_path, "llama")
    write_twin(tmp_path, tmp_path / "twin.gguf")
    folder = resolve_model_path(str(tmp_path / "twin.gguf"))
    model = OriginalModel(folder, torch.device("cpu"), None)
    twin = OriginalModel(tmp_path, torch.device("cpu"), None)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(model.tensor(name), twin.tensor(name))
        assert model.stored_name(name) == name
    make(tmp_path / "phi3", "phi3")
    write_twin(tmp_path / "phi3", tmp_path / "phi3.gguf")
    with pytest.raises(ModelError, match="GGUF files of Phi3ForCausalLM cannot be quantized again"):
        OriginalModel(resolve_model_path(str(tmp_path / "phi3.gguf")), torch.device("cpu"), None)
