"""Tiny vision models in the engine: their tokens must be those of transformers."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.features.images.processor import ImageProcessor
from quire.models.config import load_config
from tests.features.images.checkpoints import CASES, TOKENS, save_checkpoint
from tests.slow import slow

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


def out(llm: LLM, prompts: Any = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = llm.generate(prompts, params, use_tqdm=False)
    return [each.token_ids for output in found for each in output.outputs]


@pytest.mark.parametrize(
    "case", [case if case in ("qwen3-vl", "qwen3.5") else slow(case) for case in CASES]
)
def test_the_tokens_of_transformers(case: str, checkpoints: Any, llms: Any) -> None:
    checkpoint = checkpoints(case)
    llm = llms(checkpoint.folder)
    expected = [checkpoint.tokens(place) for place in range(len(PROMPTS))]
    assert out(llm) == expected
    assert out(llm) == expected  # from the prefix cache
    assert llm.stats().images.images == 12


EXPECTED = range(len(PROMPTS))


FAMILIES = [case if case == "qwen3-vl" else slow(case) for case in CASES]
"""The other cases run with the slow tests."""


@pytest.mark.parametrize("case", FAMILIES)
def test_chunks_preemption_and_few_rows(case: str, checkpoints: Any, llms: Any) -> None:
    """Three-part positions and DeepStack hold at any border of a chunk, and after a preemption."""
    checkpoint = checkpoints(case)
    expected = [checkpoint.tokens(place) for place in EXPECTED]
    small = llms(checkpoint.folder, max_num_batched_tokens=13, image_step_tokens=20)
    assert out(small) == expected
    longer = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    tight = llms(checkpoint.folder, num_kv_blocks=14, max_model_len=192)
    assert out(tight, PROMPTS[:1] * 3, longer) == out(small, PROMPTS[:1] * 3, longer)
    if case == "qwen3-vl":
        assert tight.stats().preemptions > 0


@pytest.mark.parametrize("case", FAMILIES)
def test_drafts_and_a_disk_tier(case: str, checkpoints: Any, llms: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints(case)
    expected = [checkpoint.tokens(place) for place in EXPECTED]
    settings = {
        "speculative": {"method": "suffix", "lookup_min": 1},
        "host_cache_gb": 0.05,
        "disk_cache": str(tmp_path),
    }
    first = llms(checkpoint.folder, **settings)
    assert out(first) == expected
    assert out(first) == expected
    first.shutdown()
    second = llms(checkpoint.folder, **settings)
    assert out(second) == expected
    assert second.stats().tiers.disk_hit_tokens > 0


def test_a_second_question_costs_its_text(checkpoints: Any, llms: Any) -> None:
    checkpoint = checkpoints("qwen3-vl")
    llm = llms(checkpoint.folder)
    first = prompt(TEXT, WIDE, TEXT[:7])
    second = prompt(TEXT, WIDE, TEXT[5:9])
    out(llm, first)
    encoded = llm.stats().images.encoded
    (found,) = llm.generate(second, GREEDY, use_tqdm=False)
    image = found.prompt_token_ids.count(IMAGE)
    assert found.num_cached_tokens == len(TEXT) + 1 + image + 1
    assert llm.stats().images.encoded == encoded


def test_conversations(checkpoints: Any, llms: Any) -> None:
    """`LLM.chat` takes images as vLLM's does, and gives what `generate` gives."""
    folder = checkpoints("qwen3-vl").folder
    llm = llms(folder)
    stream = io.BytesIO()
    SMALL.save(stream, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    texts = []
    for part in (
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image_pil", "image_pil": SMALL},
    ):
        content = [{"type": "text", "text": "ab"}, part, {"type": "text", "text": "cd"}]
        (found,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        texts.append(found.outputs[0].token_ids)
    text = "<user>ab<|vision_start|><|image_pad|><|vision_end|>cd<assistant>"
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": SMALL}}
    texts += out(llm, asked)
    assert texts == [texts[0]] * 3
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].*'audio'"):
        llm.chat([{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "x"}}]}])


@pytest.mark.parametrize("case", FAMILIES)
def test_two_ranks(case: str, checkpoints: Any, llms: Any) -> None:
    """Every rank holds the tower, and reads the pixels from memory that all share."""
    checkpoint = checkpoints(case)
    llm = llms(checkpoint.folder, tensor_parallel_size=2)
    assert out(llm) == [checkpoint.tokens(place) for place in EXPECTED]


@pytest.mark.parametrize("case", FAMILIES)
def test_a_quantized_language_model(case: str, checkpoints: Any, llms: Any) -> None:
    """The tower stays as it is; pieces of a prompt and its whole give the same tokens."""
    folder = checkpoints(case).folder
    whole = llms(folder, quantization="int8", enable_prefix_caching=False)
    small = llms(folder, quantization="int8", max_num_batched_tokens=13)
    assert out(small) == out(whole)


def test_stages_and_settings_that_rule_images_out(checkpoints: Any, llms: Any) -> None:
    folder = checkpoints("qwen3-vl").folder
    for settings, message in (
        ({"language_model_only": True}, "--language-model-only"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ):
        llm = llms(folder, **settings)
        with pytest.raises(RequestError, match=message):
            out(llm, PROMPTS[0])
        assert len(out(llm, PROMPTS[3])[0]) == COUNT
