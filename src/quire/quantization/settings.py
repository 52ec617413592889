"""The settings of a checkpoint's quantization, as its files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.weight_files import read_bounded

_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""The files of settings outside of config.json, and the methods whose they are."""


def settings_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the settings of a checkpoint's quantization with its `quant_method`, None if its
    weights are not quantized.

    Raises:
        ModelError: the settings cannot be read, or name no method.
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
        return None  # only scales for fp8 KV
    return found


def is_fp8_cache(scheme: object) -> bool:
    """Whether a `kv_cache_scheme` is floats of 8 bits."""
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
