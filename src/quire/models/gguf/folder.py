"""Makes a model's folder for a GGUF file: config.json, tokenizer, and a link to the file."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.gguf.file import GgufFile, parts_of
from quire.models.gguf.layouts import Layout, layers, layout_of
from quire.models.gguf.rope import rope_scaling
from quire.models.gguf.settings import Settings
from quire.system import cache_folder
from quire.text.gguf_tokenizer import tokenizer_files

_LINK = "model.gguf"
"""Name of the link to the file in the folder."""
_VERSION = 3
"""Increase it when the content of folders changes, so that cached folders are made again."""


def folder_of(path: Path) -> Path:
    """Returns a folder, in the user's cache, for a GGUF file's model. Weights stay in the file.

    Raises:
        ModelError: the file is invalid, or its architecture or tokenizer is not supported.
        ConfigError: the `gguf` library is not installed.
    """
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file; a model is a folder with a config.json, or a .gguf")
    path = path.resolve()
    stats = [(part, part.stat()) for part in parts_of(path)]
    told = f"{_VERSION} " + " ".join(f"{p} {at.st_size} {at.st_mtime_ns}" for p, at in stats)
    name = f"{path.stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    base = cache_folder() / "gguf"
    folder = base / name
    if (folder / "config.json").is_file():
        return folder
    file = GgufFile(path)
    config = _config(file)
    index = {"weight_map": dict.fromkeys(file.keys(), _LINK)}
    files = {
        "config.json": config,
        "model.safetensors.index.json": index,
        **tokenizer_files(file.fields),
    }
    base.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=base))
    try:
        for file_name, content in files.items():
            (made / file_name).write_text(json.dumps(content, indent=1), "utf-8")
        (made / _LINK).symlink_to(path)
        made.chmod(0o755)
        if not folder.exists():
            made.rename(folder)
    except OSError:
        # Another process may have made the folder in the meantime.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def open_model(path: Path) -> GgufFile:
    """Returns the GGUF file, with tensors named as the model's parameters.

    Args:
        path: the link to the file in a folder made by `folder_of`.

    Raises:
        ModelError: as in `folder_of`.
    """
    file = GgufFile(path)
    _config(file)
    return file


def _settings(file: GgufFile) -> Settings:
    kind = str(file.fields.get("general.architecture"))
    return Settings(file.fields, kind, file.tensors, file.floats)


def _config(file: GgufFile) -> dict[str, Any]:
    """Returns the config.json for a file, and gives the file's tensors their parameters' names."""
    settings = _settings(file)
    layout = layout_of(settings)
    if "token_embd.weight" not in file.tensors:
        raise ModelError("the file has no token_embd.weight, so it does not hold a whole model")
    # In merged files the count is 0.
    count = file.fields.get("split.count")
    if count not in (None, 0, 1) and "split.tensors.count" not in file.fields:
        raise ModelError(
            f"the file is one of {count} parts of its model; merge them (llama.cpp: "
            "llama-gguf-split --merge)"
        )
    config = {**_common(file, settings, layout)}
    config |= {name: read(settings) for name, read in layout.config.items()}
    if settings.get("attention.sliding_window") and not config.get("sliding_window"):
        raise ModelError(f"GGUF files of {settings.kind} with a sliding window are not supported")
    if settings.get("expert_count") and not any(name.endswith("per_tok") for name in config):
        raise ModelError(f"GGUF files of {settings.kind} with experts are not supported")
    file.lay_out(layout, config, layers(settings))
    if types := file.types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _common(file: GgufFile, settings: Settings, layout: Layout) -> dict[str, Any]:
    """Returns the keys of config.json that all architectures have."""
    heads, hidden = settings.integer("attention.head_count"), settings.integer("embedding_length")
    head_dim = settings.integer("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type or layout.architecture,
        "hidden_size": hidden,
        "intermediate_size": settings.integer(
            "feed_forward_length", settings.get("expert_feed_forward_length")
        ),
        "num_hidden_layers": layers(settings),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.integer("context_length"),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(settings),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
    }
    rotated = settings.integer("rope.dimension_count", head_dim)
    if layout.partial:
        config["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim and "kv_lora_rank" not in layout.config:
        raise ModelError(
            f"GGUF files of {settings.kind} with partly rotated heads are not supported"
        )
    if not any(name.endswith("_eps") or name.endswith("_epsilon") for name in layout.config):
        config["rms_norm_eps"] = settings.number("attention.layer_norm_rms_epsilon")
    return config
