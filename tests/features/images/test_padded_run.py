"""A run that is padded to a bucket, in parts, gives an image's embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire.features.images.encoder_steps import PART, layer_ranges, patch_bucket, patch_buckets
from quire.features.images.padded_run import fill, padded_run
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageProcessor
from quire.models.config import load_config
from quire.models.vision.grids import tower_inputs
from quire.models.vision.tower import load_tower
from tests.features.images.checkpoints import save_checkpoint


@pytest.mark.parametrize("case", ["qwen2.5-vl", "qwen3-vl"])
@torch.inference_mode()
def test_padding_changes_no_embedding(case: str, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    config = load_config(tmp_path)
    tower = load_tower(tmp_path, config, device=torch.device("cpu"), dtype=torch.float32)
    processor = ImageProcessor.from_folder(tmp_path, config)
    largest = padded_run(tower, 256, None)
    run = padded_run(tower, 192, largest)
    for state in (largest.hidden, largest.angles, largest.outputs):
        state.fill_(torch.nan)
    draw = np.random.default_rng(3)
    for width, height in ((48, 60), (17, 33), (160, 16)):
        pixels = torch.from_numpy(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        grid = processor.size(width, height)
        patches = prepare(pixels, grid, processor.settings)
        fill(run, patches, tower_inputs(tower.spec, [grid], tower.device))
        for first in range(tower.depth):
            tower.run_layers(run, first, first + 1)
        expected = tower.encode([patches], [grid])[0]
        torch.testing.assert_close(run.outputs[: grid.tokens], expected, rtol=1e-5, atol=1e-5)


def test_buckets() -> None:
    sizes = patch_buckets(8192)
    assert sizes[:6] == [64, 128, 192, 256, 320, 384]
    assert sizes[-1] == 8192
    for patches in (1, 64, 65, 1000, 4096, 4097, 8192):
        size = patch_bucket(patches)
        assert size in sizes
        assert patches <= size <= max(64, 1.26 * patches + 64)


def test_parts_have_about_the_same_work() -> None:
    for patches in (64, 1000, 4096, 65536):
        ranges = layer_ranges(27, patches)
        assert [first for first, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
        assert (ranges[0][0], ranges[-1][1]) == (0, 27)
        most = max(end - first for first, end in ranges)
        assert most == 1 or most * patches <= PART
