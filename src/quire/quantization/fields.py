"""Finds the settings of a checkpoint's quantization, and reads typed values from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.errors import ModelError
from quire.system import read_bounded

Settings = Mapping[str, Any]


class TensorInfo(NamedTuple):
    """A tensor's description in a file's header.

    Attributes:
        dtype: None if PyTorch does not have it.
        shape: shape of the whole tensor.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorInfo]
"""The checkpoint's tensors by canonical name; empty if the folder holds no weights."""


def unsupported(what: str) -> ModelError:
    return ModelError(f"the checkpoint's quantization is not supported: {what}")


def integer(settings: Settings, name: str, default: int | None = None) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise unsupported(f"{name} must be an integer, got {value!r}")
    return value


def flag(settings: Settings, name: str, default: bool | None = None) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise unsupported(f"{name} must be true or false, got {value!r}")
    return value


def one_of(settings: Settings, name: str, known: Sequence[Any], default: Any = None) -> Any:
    value = settings.get(name, default)
    if value not in known:
        names = ", ".join(str(item) for item in known)
        raise unsupported(f"{name} {value!r}; expected one of: {names}")
    return value


def group_size(settings: Settings, name: str = "group_size") -> int:
    """Returns the inputs that share a scale; 0 stands for all, -1 in files."""
    value = integer(settings, name, 128)
    if value != -1 and (value < 8 or value % 8):
        raise unsupported(f"{name} {value} is neither -1 nor a multiple of 8")
    return max(value, 0)


def names(settings: Settings, name: str) -> tuple[str, ...]:
    value = settings.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise unsupported(f"{name} must be a list of names, got {value!r}")
    return tuple(value)


def scale_dtype(tensors: Tensors, name: str) -> torch.dtype:
    """Returns a dtype that holds the scales in tensor `name` exactly."""
    info = tensors.get(name)
    kept = (torch.float16, torch.bfloat16)
    return info.dtype if info is not None and info.dtype in kept else torch.float32


_FUSED = (
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
)


def aliases(module: str) -> tuple[str, ...]:
    """Returns the names by which lists of exceptions may mention a module: its own name, and the
    name of the fused projection that contains it."""
    return (module, *(p.sub(fused, module) for p, fused in _FUSED if p.search(module)))


_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files with settings outside of config.json, and their methods."""


def settings_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the settings of a checkpoint's quantization, or None if weights are not quantized.

    Args:
        folder: folder of the model.
        config: its config.json.

    Raises:
        ModelError: the settings cannot be read.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        for name, method in _FILES.items():
            if (folder / name).exists():
                return {"quant_method": method, **_read(folder / name)}
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, got {found!r}")
    if not found.get("config_groups") and is_fp8_cache(found.get("kv_cache_scheme")):
        return None  # The settings describe only an FP8 KV cache.
    return found


def is_fp8_cache(scheme: object) -> bool:
    """Returns whether a `kv_cache_scheme` describes FP8."""
    if not isinstance(scheme, Mapping):
        return False
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bounded(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return found
