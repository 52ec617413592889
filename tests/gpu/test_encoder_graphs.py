"""The encoder of images: graphs in parts, on a stream of its own, give what the tower gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.features.images import encoder_steps
from quire.features.images.encoder_steps import EncodeEntry, layer_ranges, patch_bucket
from quire.features.images.image_encoder import ImageEncoder
from quire.features.images.preparation import prepare
from quire.features.images.processor import ImageProcessor
from quire.features.images.shared_pixels import SharedPixels
from quire.models.config import load_config
from quire.models.vision.tower import load_tower
from tests.features.images.checkpoints import save_checkpoint
from tests.features.images.test_vision_engine import TEXT, picture, prompt

SIZES = ((48, 60), (17, 33), (160, 16), (90, 90), (48, 60))


@pytest.mark.parametrize("case", ["qwen2.5-vl", "qwen3-vl"])
@torch.inference_mode()
def test_graphs_give_what_the_tower_gives(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_steps, "PART", 64)  # Every layer is a part.
    save_checkpoint(case, tmp_path)
    config, device = load_config(tmp_path), torch.device("cuda")
    tower = load_tower(tmp_path, config, device=device, dtype=torch.bfloat16)
    processor = ImageProcessor.from_folder(tmp_path, config)
    table = torch.zeros(1000, tower.width, dtype=tower.dtype, device=device)
    encoder = ImageEncoder(tower, processor.settings, table, serial=False)
    assert 0 < encoder.capture() < 1
    draw, row, expected = np.random.default_rng(3), 5, []
    for width, height in SIZES:
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shared, grid = SharedPixels(pixels), processor.size(width, height)
        shape = (grid.frames, grid.h, grid.w, grid.merge)
        for first, end in layer_ranges(tower.depth, patch_bucket(grid.patches)):
            encoder.encode(
                EncodeEntry(row, *shared.place, width, height, *shape, grid.tokens, first, end)
            )
        patches = prepare(torch.from_numpy(pixels).to(device), grid, processor.settings)
        expected.append((row, tower.encode([patches], [grid])[0]))
        row += grid.tokens
        shared.close()
    encoder.wait()
    for start, values in expected:
        error = (table[start : start + len(values)] - values).float().abs().max()
        assert error < 0.02 * values.float().abs().max()
    assert not table[row:].any()
    assert encoder.clock.seconds() > 0


def test_an_engine_with_streams_and_images(tmp_path: Path) -> None:
    """Answers about images are the same with streams beside them and without, in fp32."""
    save_checkpoint("qwen3-vl", tmp_path)
    settings = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 200}
    llm = LLM(str(tmp_path), image_cache_gb=0.01, enable_prefix_caching=False, **settings)
    prompts = [prompt(TEXT, picture(seed, 40 + seed, 50), TEXT[:5]) for seed in range(6)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    alone = [llm.generate(each, params, use_tqdm=False)[0].outputs[0].token_ids for each in prompts]
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    found = llm.generate(
        [{"prompt_token_ids": TEXT}, *prompts], [long, *[params] * 6], use_tqdm=False
    )
    assert [each.outputs[0].token_ids for each in found[1:]] == alone
    llm.shutdown()
