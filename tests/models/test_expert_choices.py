"""Checks the tiles of experts in `quire info`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from quire.cli.choices import _expert_tiles
from quire.ops.triton.experts import plan
from quire.ops.triton.experts.plan import ExpertsPlan, Tile

CONFIGS = Path(__file__).parents[2] / "bench/configs"


def config(model: str, *, deterministic: bool = False, eager: bool = False) -> Any:
    return SimpleNamespace(
        model_path=str(CONFIGS / model), device="cuda", eager=eager,
        args=SimpleNamespace(deterministic=deterministic),
    )  # fmt: skip


def test_the_origin_of_tiles_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card X")
    model = "qwen3-30b-a3b"
    assert "deterministic" in str(_expert_tiles(config(model, deterministic=True)))
    assert "rules" in str(_expert_tiles(config(model, eager=True)))
    assert "Card X: 0 in" in str(_expert_tiles(config(model)))
    path = plan.PLANS.keep("Card X", {"key": ExpertsPlan("gemv", Tile(1, 4, 64), Tile(1, 4, 64))})
    assert list(json.loads(path.read_text())["entries"]) == ["key"]
    assert f"Card X: 1 in {path}" in str(_expert_tiles(config(model)))
    dense = next(p.name for p in sorted(CONFIGS.iterdir()) if p.name.startswith("qwen3-8b"))
    assert _expert_tiles(config(dense)) is None
