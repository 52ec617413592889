"""The encoder's buckets and parts, with runs that compute when a graph would be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.features.images import encoder_steps, image_encoder
from quire.features.images.encoder_steps import EncodeEntry, layer_ranges, patch_bucket
from quire.features.images.image_encoder import ImageEncoder
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageProcessor
from quire.features.images.shared_pixels import SharedPixels
from quire.models.config import load_config
from quire.models.vision.tower import TowerRun, VisionTower, load_tower
from tests.features.images.checkpoints import save_checkpoint


class Replay:
    """Computes layers where a captured run replays its graphs."""

    def __init__(self, tower: VisionTower, run: TowerRun, pool: Any) -> None:
        self.run = run
        self._tower = tower
        self.replayed: list[tuple[int, int]] = []

    def replay(self, first: int, end: int) -> None:
        self.replayed.append((first, end))
        self._tower.run_layers(self.run, first, end)

    def seconds(self) -> float:
        return 0.001


@pytest.mark.parametrize("case", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize("most", [8192, 100])
@torch.inference_mode()
def test_any_image_gives_what_the_tower_gives(
    case: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of captured buckets, and larger ones, in parts of a layer."""
    monkeypatch.setattr(image_encoder, "CapturedRun", Replay)
    monkeypatch.setattr(image_encoder, "_MOST_CAPTURED", most)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(encoder_steps, "PART", 64)
    save_checkpoint(case, tmp_path)
    config = load_config(tmp_path)
    tower = load_tower(tmp_path, config, device=torch.device("cpu"), dtype=torch.float32)
    processor = ImageProcessor.from_folder(tmp_path, config)
    table = torch.zeros(1000, tower.width)
    encoder = ImageEncoder(tower, processor.settings, table, serial=False)
    assert encoder.capture() == 0.001
    draw, row, expected = np.random.default_rng(3), 5, []
    for width, height in ((48, 60), (17, 33), (160, 16), (96, 96), (90, 90), (48, 60)):
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shared, grid = SharedPixels(pixels), processor.size(width, height)
        shape = (grid.frames, grid.h, grid.w, grid.merge)
        for first, end in layer_ranges(tower.depth, patch_bucket(grid.patches)):
            encoder.encode(
                EncodeEntry(row, *shared.place, width, height, *shape, grid.tokens, first, end)
            )
        patches = prepare(torch.from_numpy(pixels), grid, processor.settings)
        expected.append((row, tower.encode([patches], [grid])[0]))
        row += grid.tokens
        shared.close()
    encoder.wait()
    for start, values in expected:
        found = table[start : start + len(values)]
        torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-5)
    assert not table[row:].any()
    runs = encoder._captured
    assert max(runs) == (640 if most == 8192 else 128)
    if most == 8192:
        assert sum(len(run.replayed) for run in runs.values()) == 6 * tower.depth  # type: ignore[attr-defined]
