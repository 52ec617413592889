"""Pixels and patches, compared with Pillow and with the processor of transformers on Pillow."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.features.images.preparation import prepare, resize
from quire.features.images.processor import ImageProcessor, ProcessorSettings

SETTINGS = ProcessorSettings(
    patch=14,
    merge=2,
    temporal=2,
    min_pixels=56 * 56,
    max_pixels=280 * 280,
    scale=1 / 255,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


def _sizes() -> list[tuple[int, int]]:
    """Returns 50 odd sizes (width, height)."""
    draw = random.Random(5)
    fixed = [(1, 1), (5000, 1), (1, 5000), (3, 600), (28, 28), (280, 280), (281, 279), (29, 27)]
    return fixed + [(draw.randint(1, 900), draw.randint(1, 700)) for _ in range(42)]


def _noise(width: int, height: int) -> np.ndarray:
    """Returns random pixels with hard edges, whose resize overshoots on both sides."""
    draw = np.random.default_rng(width * 10007 + height)
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[draw.random((height, width)) < 0.3] = 255
    pixels[draw.random((height, width)) < 0.2] = 0
    return pixels


@pytest.mark.parametrize(("width", "height"), _sizes())
def test_resized_bytes_equal_those_of_pillow(width: int, height: int) -> None:
    pixels = _noise(width, height)
    draw = random.Random(width + height)
    wanted = draw.choice([(56, 84), (280, 28), (width, 112), (28, height), (308, 196)])
    expected = Image.fromarray(pixels).resize(wanted, Image.Resampling.BICUBIC)
    found = resize(torch.from_numpy(pixels), wanted[1], wanted[0])
    assert np.array_equal(found.numpy(), np.asarray(expected))


@pytest.mark.parametrize("sizes", [(14, 2, 2), (4, 2, 3), (6, 1, 1), (3, 3, 2)])
def test_patches_equal_those_of_transformers(sizes: tuple[int, int, int]) -> None:
    patch, merge, temporal = sizes
    settings = replace(SETTINGS, patch=patch, merge=merge, temporal=temporal)
    processor = ImageProcessor(settings, tower=b"", token_id=1)
    oracle = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=temporal,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    )
    for width, height in [(300, 200), (31, 640), (200, 1), (57, 57), (900, 877)]:
        pixels = _noise(width, height)
        grid = processor.size(width, height)
        found = prepare(torch.from_numpy(pixels), grid, settings)
        expected = oracle(images=[Image.fromarray(pixels)], return_tensors="pt")
        assert expected["image_grid_thw"].tolist() == [[1, grid.h, grid.w]]
        assert grid.tokens == grid.patches // merge**2
        assert torch.equal(found, expected["pixel_values"])


def test_grids_equal_those_of_transformers() -> None:
    draw = random.Random(3)
    oracle = Qwen2VLImageProcessorPil(size={"shortest_edge": 5000, "longest_edge": 70000})
    settings = replace(SETTINGS, min_pixels=5000, max_pixels=70000)
    processor = ImageProcessor(settings, tower=b"", token_id=1)
    for _ in range(2000):
        width, height = draw.randint(1, 1500), draw.randint(1, 1500)
        if max(width, height) > 200 * min(width, height):
            continue
        expected = oracle.get_number_of_image_patches(height, width)
        assert processor.size(width, height).patches == expected
