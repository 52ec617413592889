"""The interface of a vision tower, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class PatchGrid(Protocol):
    """The grid of an image, see `features.images.processor.ImageGrid`."""

    @property
    def t(self) -> int: ...
    @property
    def h(self) -> int: ...
    @property
    def w(self) -> int: ...


class VisionTower(Protocol):
    """Encodes images.

    Attributes:
        width: numbers of a token's output: hidden_size * (1 + levels).
        levels: parts of an output that are added to the stream after the first layers (DeepStack).
        dtype: dtype of weights and outputs.
    """

    width: int
    levels: int
    dtype: torch.dtype

    def encode(self, patches: Sequence[Tensor], grids: Sequence[PatchGrid]) -> list[Tensor]:
        """Returns the output of each image, [tokens, width] in `dtype`.

        Args:
            patches: float32 [patches, numbers of a patch] of each image, from `prepare`.
            grids: the grid of each image.
        """
        ...

    def workspace_bytes(self, patches: int) -> int:
        """Returns an upper bound of the bytes that `encode` takes for `patches` patches."""
        ...


def has_tower(config: Mapping[str, Any]) -> bool:
    """Returns whether config.json describes a model with a tower that is supported."""
    raise NotImplementedError


def load_tower(
    folder: Path,
    config: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
) -> VisionTower:
    """Returns the tower of a checkpoint, with its weights. Every rank holds it whole.

    Args:
        folder: the checkpoint.
        config: its config.json.
        device: where the tower computes.
        dtype: dtype of the language model's activations.
        load_format: see `load_weights`.
        seed: see `load_weights`.

    Raises:
        ModelError: the model has no supported tower, or a tensor is missing, unexpected or
            misshapen.
    """
    raise NotImplementedError
