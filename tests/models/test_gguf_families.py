"""GGUF files of every family compute what the safetensors of the same weights compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelError
from quire.models import load_config, resolve_model_path
from tests.models.checkpoints import CASES, DEEPSEEK_YARN, make
from tests.models.test_quantized_checkpoints import loaded, logits

pytest.importorskip("gguf")
from tests.models.gguf_files import write_twin  # noqa: E402 (needs what may not be installed)

_UNSAID = {
    "qwen2-window", "qwen3-window", "llama-head-dim", "smollm3-window", "ministral",
    "deepseek-v3-halves", "glm4-moe-lite", "gpt2-exact-gelu", "mistral-window", "mixtral-window",
    "gemma4", "gemma4-moe", "qwen3.5-order", "qwen3-moe", "qwen3-next",
}  # fmt: skip
"""Cases whose configurations say what GGUF has no setting for."""
_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3-linear"), {"query_pre_attn_scalar": 16}),
    **dict.fromkeys(("qwen3-moe-normed", "qwen3-next-moe"), {"mlp_only_layers": []}),
    **dict.fromkeys(
        ("deepseek-v2", "deepseek-v3"),
        {"rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
}
"""What GGUF takes as given in the others."""
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
