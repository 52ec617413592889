"""Reads how a model's embeddings are pooled and truncated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from quire.config import EngineArgs
from quire.features.pooling.args import PoolingArgs
from quire.models.config import load_config


def embedding_settings(args: EngineArgs, folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of `EngineConfig.pooling` and `EngineConfig.matryoshka`.

    Args:
        args: the engine's settings.
        folder: the model's folder.
        hf_config: the model's config.json.
    """
    wanted = PoolingArgs.of(args).pooling
    pooling = _pooling(folder) if wanted == "auto" else wanted
    return {"pooling": pooling, "matryoshka": _matryoshka(hf_config)}


def _pooling(folder: Path) -> Literal["last", "mean"]:
    """Returns the pooling from the model's sentence-transformers configuration, or else "last"."""
    if not (folder / "1_Pooling" / "config.json").exists():
        return "last"
    return "mean" if load_config(folder / "1_Pooling").get("pooling_mode_mean_tokens") else "last"


def _matryoshka(hf_config: dict[str, Any]) -> tuple[int, ...] | None:
    sizes = hf_config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        return tuple(sorted(sizes))
    return () if hf_config.get("is_matryoshka") is True else None
