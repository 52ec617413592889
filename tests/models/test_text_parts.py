"""The text models of checkpoints that hold more than text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelError
from quire.models import build_model, load_config, load_weights, spec_from_config
from tests.models.checkpoints import GEMMA, GEMMA4, LATENT, MINISTRAL3, SIZES, redraw
from tests.models.harness import Harness
from tests.models.quantized_checkpoints import make_quantized
from tests.models.test_quantized_checkpoints import loaded, logits

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "siglip_vision_model", {**GEMMA, "model_type": "gemma3_text"}),
    "gemma4": (
        "Gemma4",
        "gemma4_vision",
        {**GEMMA4, "model_type": "gemma4_text", "pad_token_id": 0},
    ),
    "kimi-k2.5": (
        "Kimi_K25",
        "kimi_k25_vision",
        {**LATENT, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1},
    ),
    "mistral-small": ("Mistral3", "pixtral", {"model_type": "mistral", "head_dim": 16}),
    "ministral3": (
        "Mistral3",
        "pixtral",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL3},
    ),
}


def make(folder: Path, case: str) -> Any:
    """Saves a checkpoint with a vision tower and returns the transformers model."""
    import transformers

    name, vision, text = TEXTS[case]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, "tie_word_embeddings": name.startswith("Gemma"), **text},
        vision_config={**VISION, "model_type": vision},
        tie_word_embeddings=name.startswith("Gemma"),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    redraw(model, 0.15 if name.startswith("Gemma") else 1.0)
    model.save_pretrained(folder)
    if name == "Kimi_K25":
        # As published: transformers would save these under names of its vision model's layers.
        file = folder / "model.safetensors"
        tensors = load_file(file)
        names = {key: key.replace(".model.blocks.", ".model.layers.") for key in tensors}
        save_file({names[key]: tensor for key, tensor in tensors.items()}, file)
    return model


@pytest.mark.parametrize("case", TEXTS)
def test_the_text_model_is_read_and_the_rest_skipped(case: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, case)
    spec = spec_from_config(load_config(tmp_path))
    model = build_model(spec, device="cpu")
    load_weights(model, tmp_path)
    tokens = [5, 17, 99, 3, 42, 7, 7, 150, 23, 61, 12, 13, 88, 91, 4, 100, 77, 30, 20, 10]
    harness = Harness(model)
    row = harness.add(tokens)
    found = torch.cat([*harness.step([(row, 7)]), *harness.step([(row, 13)])])
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)


def test_quantization_that_the_text_config_names(tmp_path: Path) -> None:
    """Kimi-K2.5 has experts in 4 bits."""
    make_quantized(tmp_path, "w4a16", "deepseek-v3")
    expected = logits(loaded(tmp_path))
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    file.write_text(
        json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text})
    )
    assert torch.equal(logits(loaded(tmp_path)), expected)


def test_names_of_older_checkpoints() -> None:
    from quire.models.families.gemma3 import FAMILY

    names = {
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "model.norm.weight": "model.norm.weight",
    }
    assert {name: FAMILY.canonical(name) for name in names} == names
    assert FAMILY.ignored is not None
    assert FAMILY.ignored.search("vision_tower.vision_model.embeddings.weight")
    assert not FAMILY.ignored.search("model.embed_tokens.weight")


def test_end_tokens_and_refusals_come_from_the_outer_config(tmp_path: Path) -> None:
    make(tmp_path, "gemma3")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"].pop("eos_token_id")
    assert spec_from_config({**config, "eos_token_id": [1, 106]}).eos_token_ids == (1, 106)
    config["text_config"]["use_bidirectional_attention"] = True
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        spec_from_config(config)
    with pytest.raises(ModelError, match="text_config must be an object"):
        spec_from_config({**config, "text_config": 3})
