"""The files of weights in a model's folder."""

from __future__ import annotations

from pathlib import Path


def stored_weights(folder: Path) -> list[Path]:
    """Returns the files of weights, by name; none if there are none."""
    return sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf")))
