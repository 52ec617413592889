"""A stand-in for vision models: an image's pixels are token ids, and its embeddings are theirs.

So a prompt with an image must give what the prompt with these tokens gives, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.features.images import hook, image_encoder, image_reader
from quire.features.images.processor import (
    ImageGrid,
    ImageProcessor,
    Pixels,
    ProcessorSettings,
)
from quire.models.vision import tower

TOKEN_ID = 300
"""The token that stands for an image."""


class PixelTokens:
    """A tower whose patches are token ids."""

    levels = 0
    depth = 3
    dtype = torch.float32

    def __init__(self, folder: Path) -> None:
        self._embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        self.width = self._embeddings.shape[1]
        self.encoded: list[int] = []
        self.parts: list[tuple[int, int]] = []

    def open(self, patches: Tensor, grids: Sequence[ImageGrid]) -> SimpleNamespace:
        self.encoded += [grid.tokens for grid in grids]
        return SimpleNamespace(patches=patches, layer=0)

    def run_layers(self, run: SimpleNamespace, first: int, end: int) -> None:
        assert run.layer == first
        run.layer = end
        self.parts.append((first, end))
        if end == self.depth:
            run.outputs = self._embeddings[run.patches.long()].float()

    def workspace_bytes(self, patches: int) -> int:
        return 0


class PixelProcessor(ImageProcessor):
    """Gives each pixel a position of the prompt."""

    def size(self, width: int, height: int, detail: str = "auto") -> ImageGrid:
        return ImageGrid(1, height, width, height * width, 1)


def picture(tokens: Sequence[int], columns: int = 1) -> Pixels:
    """Returns the image of these tokens, uint8 [rows, columns, 3]."""
    ids = np.array(tokens, dtype=np.int64).reshape(-1, columns)
    return np.stack([ids % 256, ids // 256, np.zeros_like(ids)], axis=-1).astype(np.uint8)


def _prepare(pixels: Tensor, grid: ImageGrid, settings: ProcessorSettings) -> Tensor:
    return (pixels[..., 0].int() + 256 * pixels[..., 1].int()).flatten()


def install(patch: pytest.MonkeyPatch) -> list[PixelTokens]:
    """Makes models see images. Returns the towers that engines load, once they have."""
    towers: list[PixelTokens] = []

    def load(folder: Path, config: Any, **options: Any) -> PixelTokens:
        towers.append(PixelTokens(folder))
        return towers[-1]

    settings = ProcessorSettings(1, 1, 1, 1, 1 << 20, 1.0, (0.0,) * 3, (1.0,) * 3)
    processor = PixelProcessor(settings, tower=b"pixels", token_id=TOKEN_ID)
    patch.setattr(tower, "has_tower", lambda config: True)
    patch.setattr(hook, "load_tower", load)
    patch.setattr(image_encoder, "prepare", _prepare)
    patch.setattr(ImageProcessor, "from_folder", lambda *given: processor)
    patch.setattr(image_reader, "ImageProcessor", ImageProcessor)
    return towers
