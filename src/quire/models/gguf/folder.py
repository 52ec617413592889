"""A model's folder, made of a GGUF file's settings: configuration, tokenizer, and a link to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
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
_VERSION = 1
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
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"GGUF files of the architecture {kind} are not supported; known: {known}")

    def own(name: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{name}", default)
        if value is None:
            raise ModelError(f"the file has no {kind}.{name}")
        return value

    if own("expert_count", 0):
        raise ModelError(f"GGUF files of {kind} with experts are not supported")
    if own("attention.sliding_window", 0):
        raise ModelError("GGUF files with a sliding window are not supported")
    heads, hidden = int(own("attention.head_count")), int(own("embedding_length"))
    head_dim = int(own("attention.key_length", hidden // heads))
    if int(own("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("GGUF files with partly rotated heads are not supported")
    theta = float(own("rope.freq_base", 10000.0))
    positions = int(own("context_length"))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": int(own("feed_forward_length")),
        "num_hidden_layers": int(own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(own("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, kind, theta, head_dim, positions),
        "vocab_size": file.get_slice("model.embed_tokens.weight").get_shape()[0],
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
        if type in BLOCKS and name != "model.embed_tokens.weight"
    }
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    return config


def _rope_scaling(
    file: GgufFile, kind: str, theta: float, head_dim: int, positions: int
) -> dict[str, Any] | None:
    factors = file.rope_factors
    if factors is not None:
        return _llama3(factors, theta, head_dim)
    name = file.fields.get(f"{kind}.rope.scaling.type", "none")
    if name == "none":
        return None
    if name not in ("linear", "yarn"):
        raise ModelError(f"GGUF files with rope scaling {name!r} are not supported")
    scaling = {"rope_type": name, "factor": float(file.fields[f"{kind}.rope.scaling.factor"])}
    original = file.fields.get(f"{kind}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
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
