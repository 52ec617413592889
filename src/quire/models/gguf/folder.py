"""A model's folder, made of a GGUF file's settings: configuration, tokenizer, and a link to it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.errors import ModelError
from quire.layers.rope_scaling import scaled_frequencies
from quire.layers.rope_spec import Llama3Scaling, RopeSpec
from quire.models.gguf.file import GgufFile
from quire.models.gguf.tokenizer import tokenizer_files
from quire.quantization.gguf import BLOCKS

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LINK = "model.gguf"
"""The name in the folder of a link to the file."""
_EMBEDDING = "model.embed_tokens.weight"
_VERSION = 2
"""Changes when folders made of the same file do."""
_LLAMA3 = tuple(
    {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}
    for factor in (8.0, 32.0)
)
"""The scalings of Llama 3.1 and 3.2, which files have as the divisors that follow from them."""


def folder_of(path: Path) -> Path:
    """Returns a folder with the model of a GGUF file, in the user's cache. Weights stay in the
    file.

    Raises:
        ModelError: it is no such file, or its architecture or tokenizer is not known.
        ConfigError: the library that reads such files is not installed.
    """
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is a file; a model is a folder with a config.json, or a .gguf")
    path = path.resolve()
    about = path.stat()
    told = f"{path} {about.st_size} {about.st_mtime_ns} {_VERSION}"
    name = f"{path.stem}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    root = os.environ.get("QUIRE_CACHE_DIR")
    cache = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quire"
    base = cache.expanduser() / "gguf"
    folder = base / name
    if (folder / "config.json").is_file():
        return folder
    file = GgufFile(path)
    index = {"weight_map": dict.fromkeys(file.keys(), _LINK)}
    files = {
        "config.json": _config(file),
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
        # Another process was first.
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _config(file: GgufFile) -> dict[str, Any]:
    fields = file.fields
    kind = str(fields.get("general.architecture"))
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"GGUF files of the architecture {kind} are not supported; known: {known}")
    # Merged files have 0.
    if fields.get("split.count") not in (None, 0, 1):
        raise ModelError(
            f"the file is one of {fields['split.count']} of its model; merge them (llama.cpp: "
            "llama-gguf-split --merge)"
        )
    if fields.get(f"{kind}.expert_count"):
        raise ModelError(f"GGUF files of {kind} with experts are not supported")
    if fields.get(f"{kind}.attention.sliding_window"):
        raise ModelError("GGUF files with a sliding window are not supported")

    if _EMBEDDING not in file.types:
        raise ModelError("the file has no token_embd.weight: it holds no whole model")

    def integer(name: str, default: int | None = None) -> int:
        return _integer(fields, f"{kind}.{name}", default)

    def number(name: str, default: float | None = None) -> float:
        return _number(fields, f"{kind}.{name}", default)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", hidden // heads)
    if integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError("GGUF files with partly rotated heads are not supported")
    theta = number("rope.freq_base", 10000.0)
    positions = integer("context_length")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, kind, theta, head_dim, positions),
        "vocab_size": file.get_slice(_EMBEDDING).get_shape()[0],
        "tie_word_embeddings": "lm_head.weight" not in file.types,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    if kind == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in file.types
    types = {
        name.removesuffix(".weight"): type
        for name, type in file.types.items()
        if type in BLOCKS and name != _EMBEDDING
    }
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a positive integer of the file's settings. Raises ModelError for another value, and
    where there is none, nor a default."""
    value = fields.get(name, default)
    if value is not None and (type(value) is not int or value < 1):
        raise ModelError(f"the file's {name} must be an integer above 0, got {str(value)[:40]}")
    return int(_number(fields, name, default))


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Returns a positive number of the file's settings. Raises ModelError as `_integer` does."""
    value = fields.get(name, default)
    if value is None:
        raise ModelError(f"the file has no {name}")
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelError(f"the file's {name} must be a number above 0, got {str(value)[:40]}")
    return float(value)


def _rope_scaling(
    file: GgufFile, kind: str, theta: float, head_dim: int, positions: int
) -> dict[str, Any] | None:
    factors = file.rope_factors
    if factors is not None:
        return _llama3(factors, theta, head_dim)
    factor = f"{kind}.rope.scaling.factor"
    if factor not in file.fields and f"{kind}.rope.scale_linear" in file.fields:
        factor = f"{kind}.rope.scale_linear"  # its first name
    # llama.cpp takes a factor without a type for one of linear scaling.
    usual = "linear" if factor in file.fields else "none"
    name = file.fields.get(f"{kind}.rope.scaling.type", usual)
    if name == "none":
        return None
    if name not in ("linear", "yarn"):
        raise ModelError(f"GGUF files with rope scaling {name!r} are not supported")
    scaling = {"rope_type": name, "factor": _number(file.fields, factor)}
    original = f"{kind}.rope.scaling.original_context_length"
    if original in file.fields:
        scaling["original_max_position_embeddings"] = _integer(file.fields, original)
    return scaling


def _llama3(factors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the scaling whose divisors these are. Raises ModelError for none."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    for known in _LLAMA3:
        scaling = Llama3Scaling(*known.values())  # type: ignore[arg-type]
        found = scaled_frequencies(RopeSpec(theta, head_dim, scaling), scaling, 1.0 / plain)
        if len(factors) == len(plain) and torch.allclose(plain / found, factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                **{name: value for name, value in known.items() if name != "original"},
                "original_max_position_embeddings": known["original"],
            }
    raise ModelError("the file's rope_freqs are those of no scaling that is known")
