"""The quantization of a model: what the user asked for, or what the checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.models.spec import ModelSpec
from quire.quantization import Quantization, quantization_of

_KEYS = ("quantization_config", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Keys of config.json, and files beside it, by which checkpoints say that they are quantized."""


def model_quantization(
    folder: str | Path, config: Mapping[str, Any], spec: ModelSpec, wanted: str | None = None
) -> Quantization:
    """Returns the quantization `wanted` by `EngineArgs`, or the checkpoint's own.

    config: the folder's config.json. Files are opened only for their headers.

    Raises:
        ModelError: the checkpoint is quantized in a way that is not known.
        ConfigError: a quantization is wanted of what is quantized already.
    """
    folder, config = Path(folder), {**(config.get("text_config") or {}), **config}
    if any(map(config.get, _KEYS)) or any((folder / name).exists() for name in _FILES):
        # Imported here: most models are not quantized.
        from quire.models.quantized_checkpoint import checkpoint_quantization

        found = checkpoint_quantization(folder, config, spec, wanted)
        if found is not None:
            return found
    return quantization_of(wanted)
