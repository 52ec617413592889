"""Tiny vision models in the engine: their tokens must be those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quire import LLM, SamplingParams
from quire.features.images.processor import ImageProcessor
from quire.models.config import load_config
from tests.features.images.checkpoints import CASES, TOKENS, save_checkpoint

IMAGE = TOKENS["image_token_id"]
WORDS = 99
"""Ids below are text."""
COUNT = 12
GREEDY = SamplingParams(
    max_tokens=COUNT, temperature=0.0, ignore_eos=True, allowed_token_ids=tuple(range(WORDS))
)


def picture(seed: int, width: int, height: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def prompt(*parts: list[int] | Image.Image) -> dict[str, Any]:
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else [99, IMAGE, 100]
    images = [part for part in parts if not isinstance(part, list)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}


TEXT = list(range(10, 30))
SMALL, WIDE, TALL = picture(1, 37, 29), picture(2, 90, 20), picture(3, 18, 61)
PROMPTS = [
    prompt(TEXT, SMALL, TEXT[:7]),
    prompt(TEXT[:3], WIDE, [40, 41], TALL, TEXT, SMALL, TEXT[:2]),
    prompt(TEXT, WIDE, TALL, [50]),
    {"prompt_token_ids": TEXT},
]


class Checkpoint:
    """A tiny model, and its greedy tokens by transformers."""

    def __init__(self, case: str, folder: Path) -> None:
        self.folder = folder
        self.model = save_checkpoint(case, folder)
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self._own = ImageProcessor.from_folder(folder, load_config(folder))
        self._known: dict[int, list[int]] = {}

    def tokens(self, place: int) -> list[int]:
        """Returns the continuation of `PROMPTS[place]`."""
        if place not in self._known:
            self._known[place] = self._generate(PROMPTS[place])
        return self._known[place]

    @torch.inference_mode()
    def _generate(self, asked: dict[str, Any]) -> list[int]:
        images = asked.get("multi_modal_data", {}).get("image", [])
        grids = [self._own.size(image.width, image.height) for image in images]
        ids: list[int] = []
        left = iter(grids)
        for token in asked["prompt_token_ids"]:
            ids += [IMAGE] * next(left).tokens if token == IMAGE else [token]
        found = self._processor(images=images, return_tensors="pt") if images else {}
        inputs = {name: found[name] for name in found if name in ("pixel_values", "image_grid_thw")}
        length = len(ids)
        while len(ids) < length + COUNT:
            given = torch.tensor([ids])
            kinds = (given == IMAGE).int()
            logits = self.model(input_ids=given, mm_token_type_ids=kinds, **inputs).logits
            ids.append(int(logits[0, -1, :WORDS].argmax()))
        return ids[length:]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Checkpoint] = {}

    def get(case: str) -> Checkpoint:
        if case not in made:
            made[case] = Checkpoint(case, tmp_path_factory.mktemp(case.replace(".", "_")))
        return made[case]

    return get


@pytest.fixture
def llms() -> Iterator[Any]:
    made: list[LLM] = []

    def make(folder: Path, **settings: Any) -> LLM:
        usual = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "image_cache_gb": 0.01}
        made.append(LLM(str(folder), **(usual | settings)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def out(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = llm.generate(prompts, params, use_tqdm=False)
    return [each.token_ids for output in found for each in output.outputs]


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_transformers(case: str, checkpoints: Any, llms: Any) -> None:
    checkpoint = checkpoints(case)
    llm = llms(checkpoint.folder)
    expected = [checkpoint.tokens(place) for place in range(len(PROMPTS))]
    assert out(llm) == expected
    assert out(llm) == expected  # from the prefix cache
    assert llm.stats().images.images == 12
