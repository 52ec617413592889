"""Tiny random checkpoints of vision models, made by transformers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.checkpoints import redraw
from tests.models.small_tokenizer import CHARACTERS, save_tokenizer

TOKENS = {
    "vision_start_token_id": 99,
    "vision_end_token_id": 100,
    "image_token_id": 101,
    "video_token_id": 102,
}
SPECIAL = {
    99: "<|vision_start|>",
    100: "<|vision_end|>",
    101: "<|image_pad|>",
    102: "<|video_pad|>",
}
TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 24,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 48,
}
QWEN3_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
DEEP = {**QWEN3_TOWER, "deepstack_visual_indexes": [0, 2]}
STACKED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
WOVEN = {**STACKED, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "rope_parameters": {**WOVEN, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": STACKED, "head_dim": 8}, QWEN2_TOWER),
    "qwen3-vl": ("Qwen3VL", {"rope_parameters": WOVEN}, DEEP),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"rope_parameters": WOVEN, **EXPERTS}, DEEP),
    "qwen3.5": ("Qwen3_5", HYBRID, QWEN3_TOWER),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 48},
        QWEN3_TOWER,
    ),
}
"""By name: the class's prefix in transformers, changes of `TEXT`, and the tower."""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 96},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.25, 0.3],
}
VIDEO_PROCESSOR = {"size": {"shortest_edge": 16 * 16 * 4, "longest_edge": 40 * 40 * 4}}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that renders images as Qwen's do."""


def vision_model(case: str) -> Any:
    """Returns the random transformers model of a case. The case's name is its seed."""
    prefix, text, tower = CASES[case]
    config_type = getattr(transformers, f"{prefix}Config")
    config = config_type(
        text_config={**TEXT, **text}, vision_config=tower, tie_word_embeddings=False, **TOKENS
    )
    torch.manual_seed(zlib.crc32(case.encode()))
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    redraw(model)
    return model


def save_checkpoint(case: str, folder: Path) -> Any:
    """Writes a checkpoint with its tokenizer, processor and chat template. Returns the model."""
    model = vision_model(case)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")
    videos = json.dumps(VIDEO_PROCESSOR)
    (folder / "video_preprocessor_config.json").write_text(videos, "utf-8")
    tokenizer = save_tokenizer(folder, CHARACTERS)
    assert tokenizer.get_vocab_size() <= min(SPECIAL)
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    raw["added_tokens"] += [
        {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for number, text in SPECIAL.items()
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return model
