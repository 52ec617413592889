"""Vision towers and the models that read their outputs, compared with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.features.images.preparation import prepare
from quire.features.images.processor import DecodedImage, ImageGrid, ImageProcessor
from quire.features.images.rope_positions import ImageSpan, rope_positions
from quire.layers.batch import ForwardBatch, GivenRows
from quire.models import Decoder, build_model, load_config, load_weights, spec_from_config
from quire.models.vision.tower import VisionTower, has_tower, load_tower, tower_spec
from tests.features.images.checkpoints import CASES, TOKENS, save_checkpoint
from tests.models import quantized_checkpoints
from tests.models.harness import Harness, Row
from tests.models.test_quantized_checkpoints import ROUNDS_INPUTS, logits
from tests.models.test_quantized_checkpoints import loaded as loaded_quantized

IMAGE = TOKENS["image_token_id"]
SIZES = [(41, 29), (8, 90), (64, 64), (17, 16), (97, 33)]
"""Sizes (width, height) of images, which the processor rounds to multiples of 8."""
TOKENS_OUT = 32
WORDS = 99
"""Number of tokens that texts may have. Those of images follow."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that makes a case's checkpoint once, and returns folder and model."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(case: str) -> tuple[Path, Any]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            made[case] = folder, save_checkpoint(case, folder)
        return made[case]

    return make


class Seen:
    """An image, processed for a checkpoint."""

    def __init__(self, processor: ImageProcessor, width: int, height: int) -> None:
        draw = np.random.default_rng(width * 1000 + height)
        noise = draw.integers(0, 256, (-(-height // 7), -(-width // 7), 3), dtype=np.uint8)
        pixels = np.asarray(Image.fromarray(noise).resize((width, height)))
        self.image = DecodedImage(pixels.copy(), width, height)
        self.grid: ImageGrid = processor.size(width, height)
        pixels_on = torch.from_numpy(self.image.pixels)
        self.patches = prepare(pixels_on, self.grid, processor.settings)


def tower_of(folder: Path) -> VisionTower:
    return load_tower(folder, load_config(folder), device=torch.device("cpu"), dtype=torch.float32)


def seen_in(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Seen]:
    processor = ImageProcessor.from_folder(folder, load_config(folder))
    return [Seen(processor, *size) for size in sizes]


def oracle_inputs(seen: Sequence[Seen]) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.cat([each.patches for each in seen]),
        "image_grid_thw": torch.tensor([[1, each.grid.h, each.grid.w] for each in seen]),
    }


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_transformers(folders: Any, case: str) -> None:
    folder, oracle = folders(case)
    tower, seen = tower_of(folder), seen_in(folder, SIZES)
    found = tower.encode([each.patches for each in seen], [each.grid for each in seen])
    with torch.inference_mode():
        expected = oracle.model.get_image_features(**oracle_inputs(seen))
    deep = getattr(expected, "deepstack_features", None) or []
    deep = [each if isinstance(each, Tensor) else torch.cat(list(each)) for each in deep]
    whole = torch.cat([torch.cat(list(expected.pooler_output)), *deep], dim=1)
    assert [len(each) for each in found] == [each.grid.tokens for each in seen]
    assert tower.width == whole.shape[1]
    assert whole.std() > 0.1
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-4, atol=1e-4)
    # An image has the same outputs alone.
    alone = tower.encode([seen[1].patches], [seen[1].grid])[0]
    torch.testing.assert_close(alone, found[1], rtol=1e-5, atol=1e-5)


class SeeingHarness(Harness):
    """A harness whose sequences contain images."""

    images: dict[int, list[tuple[ImageSpan, Tensor]]]

    def see(self, row: Row, seen: Sequence[tuple[Seen, Tensor]]) -> None:
        """Says which images the sequence has, in order, and what the tower makes of them."""
        self.images = getattr(self, "images", {})
        tokens = np.array(row.tokens)
        starts = [
            at for at in np.flatnonzero(tokens == IMAGE) if at == 0 or tokens[at - 1] != IMAGE
        ]
        self.images[id(row)] = [
            (ImageSpan(int(start), own.grid.tokens, own.grid.columns), values)
            for start, (own, values) in zip(starts, seen, strict=True)
        ]

    def _batch(self, rows: Sequence[tuple[Row, int]]) -> ForwardBatch:
        batch = super()._batch(rows)
        values: list[Tensor] = []
        source: list[int] = []
        rotary = []
        for row, count in rows:
            images = self.images.get(id(row), [])
            spans = [span for span, _ in images]
            end = row.computed + count
            rotary.append(rope_positions(len(row.tokens), spans)[0][:, row.computed : end])
            for position in range(row.computed, end):
                found = -1
                for span, own in images:
                    if 0 <= position - span.start < span.tokens:
                        found = len(values)
                        values.append(own[position - span.start])
                source.append(found)
        # Ids of images are outside of the vocabulary.
        where = torch.tensor(source, dtype=torch.int32)
        batch.input_ids[: len(source)][where >= 0] = 2**30
        batch.rotary = torch.from_numpy(np.concatenate(rotary, axis=1))
        if values:
            parts = values[0].shape[0] // self.model.spec.hidden_size
            batch.given = GivenRows(where, torch.stack(values), parts)
        if rows[0][0].computed % 2:
            # Some steps have embeddings of the vocabulary already.
            batch.embedded = self.model.embedding(batch.input_ids)
        return batch


def prompt_of(seen: Sequence[Seen], seed: int) -> list[int]:
    """Returns a prompt with text before, between and behind images."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(3, 99, 5).tolist()
    for each in seen:
        image = [TOKENS["vision_start_token_id"], *[IMAGE] * each.grid.tokens]
        tokens += [*image, TOKENS["vision_end_token_id"], *draw.integers(3, 99, 7).tolist()]
    return tokens


def oracle_logits(oracle: Any, tokens: list[int], seen: Sequence[Seen]) -> Tensor:
    """Returns the logits of all positions."""
    ids = torch.tensor([tokens])
    images = oracle_inputs(seen) if seen else {}
    kinds = (ids == IMAGE).int()
    with torch.inference_mode():
        found: Tensor = oracle(input_ids=ids, mm_token_type_ids=kinds, **images).logits[0]
    return found


def loaded(folder: Path) -> Decoder:
    model = build_model(spec_from_config(load_config(folder)), device="cpu")
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_texts_about_images_equal_those_of_transformers(folders: Any, case: str) -> None:
    folder, oracle = folders(case)
    tower, model = tower_of(folder), loaded(folder)
    pictures = seen_in(folder, SIZES)
    outputs = tower.encode([each.patches for each in pictures], [each.grid for each in pictures])
    prompts = [[0], [], [1, 2], [3, 0, 4]]
    harness = SeeingHarness(model)
    rows, seen = [], []
    for seed, chosen in enumerate(prompts):
        seen.append([pictures[index] for index in chosen])
        rows.append(harness.add(prompt_of(seen[-1], seed)))
        harness.see(rows[-1], [(pictures[index], outputs[index]) for index in chosen])
    lengths = [len(row.tokens) for row in rows]
    logits: list[list[Tensor]] = [[] for _ in rows]
    # Chunks end within images.
    while any(
        len(row.tokens) < length + TOKENS_OUT for row, length in zip(rows, lengths, strict=True)
    ):
        step = [(row, min(23, len(row.tokens) - row.computed)) for row in rows]
        for row, own, found in zip(rows, logits, harness.step(step), strict=True):
            own.append(found)
            if row.computed == len(row.tokens):
                row.tokens.append(int(found[-1, :WORDS].argmax()))
    for row, own, images, length in zip(rows, logits, seen, lengths, strict=True):
        expected = oracle_logits(oracle, row.tokens[: row.computed], images)
        torch.testing.assert_close(torch.cat(own), expected, rtol=1e-4, atol=1e-4)
        greedy = expected[length - 1 :, :WORDS].argmax(-1).tolist()
        assert row.tokens[length:] == greedy
        assert len(greedy) >= TOKENS_OUT
        assert len(set(greedy)) > 4, "the text repeats itself; rename the case"


def _change(folder: Path, changed: Path, **tensors: Tensor | None) -> Path:
    """Copies a checkpoint, and replaces or removes tensors, whose dots are written as `__`."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, changed / "model.safetensors")
    shutil.copy(folder / "config.json", changed)
    return changed


def test_checkpoints_of_experts_may_be_transposed(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders("qwen3-vl-moe")
    stored = {
        name: tensor.transpose(1, 2).contiguous()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ".experts." in name
    }
    assert len(stored) == 6
    renamed = {name.replace(".", "__"): tensor for name, tensor in stored.items()}
    other = loaded(_change(folder, tmp_path, **renamed))
    for own, same in zip(loaded(folder).parameters(), other.parameters(), strict=True):
        assert torch.equal(own, same)


def test_towers_are_checked_as_models_are(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders("qwen3-vl")
    bias = "model__visual__blocks__1__attn__qkv__bias"
    with pytest.raises(ModelError, match=r"missing tensor visual\.blocks\.1\.attn\.qkv\.bias"):
        tower_of(_change(folder, tmp_path, **{bias: None}))
    with pytest.raises(ModelError, match=r"attn\.qkv\.bias has shape \(5,\), expected \(96,\)"):
        tower_of(_change(folder, tmp_path, **{bias: torch.zeros(5)}))
    with pytest.raises(ModelError, match=r"unexpected tensor model\.visual\.more"):
        tower_of(_change(folder, tmp_path, model__visual__more=torch.zeros(5)))
    kernel = "model__visual__patch_embed__proj__weight"
    with pytest.raises(ModelError, match=r"expected \(32, 3, 2, 4, 4\)"):
        tower_of(_change(folder, tmp_path, **{kernel: torch.zeros(32, 96)}))


def test_the_language_model_loads_without_a_tower(folders: Any, tmp_path: Path) -> None:
    for case in CASES:
        folder, _ = folders(case)
        names = load_file(folder / "model.safetensors")
        tower = {name.replace(".", "__"): None for name in names if "visual." in name}
        assert tower
        loaded(_change(folder, tmp_path, **tower))


def test_dummy_towers_have_no_checkpoint(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders("qwen2.5-vl")
    shutil.copy(folder / "config.json", tmp_path)
    tower = load_tower(
        tmp_path,
        load_config(tmp_path),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        load_format="dummy",
    )
    (seen,) = seen_in(folder, SIZES[:1])
    (found,) = tower.encode([seen.patches], [seen.grid])
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()


def test_names_of_older_checkpoints(folders: Any, tmp_path: Path) -> None:
    """Transformers 4 saved the tower as `visual`, and the language model as `model`."""
    folder, _ = folders("qwen3-vl")
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in weights.items()
    }
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    for own, same in zip(loaded(folder).parameters(), loaded(tmp_path).parameters(), strict=True):
        assert torch.equal(own, same)
    tower = tower_of(tmp_path)
    for own, same in zip(tower_of(folder).parameters(), tower.parameters(), strict=True):
        assert torch.equal(own, same)


def test_configs_without_a_tower(folders: Any) -> None:
    folder, _ = folders("qwen3-vl")
    config = load_config(folder)
    assert has_tower(config)
    del config["vision_config"]
    assert not has_tower(config)
    with pytest.raises(ModelError, match="no vision tower"):
        tower_spec(config)
    other = {**load_config(folder), "architectures": ["Qwen3ForCausalLM"]}
    assert not has_tower(other)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen3-vl", {"out_hidden_size": 50}, "out_hidden_size 50 differs from hidden_size 48"),
        ("qwen3-vl", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("qwen3-vl", {"num_position_embeddings": 35}, "35 is not a square"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 3]}, "different layers from 0 to 2"),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 1]}, "different layers from 0 to 2"),
        ("qwen3-vl", {"hidden_size": 36}, "36 is not a multiple of 4 times 2 heads"),
        ("qwen3-vl", {"in_channels": 4}, "in_channels=4 is not supported"),
        ("qwen3-vl", {"depth": 1 << 20}, "depth must be at most"),
        ("qwen2.5-vl", {"window_size": 7}, "window_size 7 is smaller than a token's 8 pixels"),
        ("qwen2.5-vl", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen2.5-vl", {"fullatt_block_indexes": 3}, "different layers from 0 to 2"),
    ],
)
def test_configs_that_are_refused(
    folders: Any, case: str, change: dict[str, Any], message: str
) -> None:
    config = load_config(folders(case)[0])
    config["vision_config"] = {**config["vision_config"], **change}
    with pytest.raises(ModelError, match=message):
        tower_spec(config)


@pytest.mark.parametrize("sections", [[1, 1], [1, 1, 3], [2, -1, 3], "112", [True, 1, 2]])
def test_sections_that_are_refused(folders: Any, sections: Any) -> None:
    config = load_config(folders("qwen2.5-vl")[0])
    config["text_config"]["rope_parameters"]["mrope_section"] = sections
    with pytest.raises(ModelError, match="mrope_section must be three numbers whose sum is 4"):
        spec_from_config(config)


@pytest.mark.parametrize("form", ["awq", "fp8-per-output", "w8a16"])
def test_quantized_checkpoints_have_16_bit_towers(folders: Any, tmp_path: Path, form: str) -> None:
    folder, _ = folders("qwen3-vl")
    settings, maker = quantized_checkpoints.CASES[form]
    exact = load_file(folder / "model.safetensors")
    stored = dict(exact)
    draw = np.random.default_rng(0)
    for name, tensor in exact.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            made, rounded = maker(draw, tensor.double().numpy())
            module = name.removesuffix(".weight")
            del stored[name]
            stored |= {f"{module}.{key}": value.contiguous() for key, value in made.items()}
            exact[name] = torch.from_numpy(rounded).float()
    config = load_config(folder)
    for where, tensors, more in (
        ("quantized", stored, {"quantization_config": settings}),
        ("exact", exact, {}),
    ):
        (tmp_path / where).mkdir()
        save_file(tensors, tmp_path / where / "model.safetensors")
        (tmp_path / where / "config.json").write_text(json.dumps(config | more))
    found, expected = (
        logits(loaded_quantized(tmp_path / "quantized")),
        logits(loaded(tmp_path / "exact")),
    )
    error = (found - expected).norm() / expected.norm()
    assert error < (0.25 if form in ROUNDS_INPUTS else 1e-5)
    for own, same in zip(
        tower_of(tmp_path / "quantized").parameters(), tower_of(folder).parameters(), strict=True
    ):
        assert torch.equal(own, same)
