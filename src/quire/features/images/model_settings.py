"""Whether an engine takes images, and why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quire.config import EngineArgs, EngineConfig
from quire.features.images.args import ImageArgs


def image_settings(args: EngineArgs, folder: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Returns `EngineConfig.images`: whether the engine takes images.

    Args:
        args: the engine's settings.
        folder: the model's folder.
        hf_config: the model's config.json.
    """
    # Imported here because it imports torch, and API processes read this module.
    from quire.models.vision.tower import has_tower

    return {"images": has_tower(hf_config) and _ruled_out(args) is None}


def refusal(config: EngineConfig) -> str | None:
    """Returns why an engine takes no images, or None if it takes them."""
    if config.images:
        return None
    return _ruled_out(config.args) or f"the model '{config.model_name}' does not see images"


def _ruled_out(args: EngineArgs) -> str | None:
    """Returns the setting that rules out images, for an error; None: no setting does."""
    if ImageArgs.of(args).language_model_only:
        return "the server runs with --language-model-only"
    if args.pipeline_parallel_size > 1:
        return "images are not supported with --pipeline-parallel-size"
    if args.nnodes > 1:
        return "images are not supported with --nnodes: ranks share their pixels"
    if args.async_tp == "on":
        return "images are not supported with --async-tp on"
    if not hasattr(os, "memfd_create"):
        return "images need Linux, whose processes share anonymous memory"
    return None
