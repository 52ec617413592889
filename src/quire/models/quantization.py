"""Chooses a model's quantization: the checkpoint's own, or the one that the user asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelError
from quire.models.config import family_named
from quire.models.families.family import Family
from quire.models.files import DTYPES, open_file, weight_files
from quire.models.gguf.file import stored_family
from quire.models.spec import ModelSpec
from quire.quantization import Quantization, quantization_of
from quire.quantization.checkpoint import Checkpoint, method_of
from quire.quantization.fields import TensorInfo, Tensors, settings_of
from quire.quantization.rounding import FLOAT, QuantizedHead, split_name
from quire.system import stored_weights


def checkpoint_quantization(
    folder: Path,
    config: Mapping[str, Any],
    spec: ModelSpec,
    wanted: str | None,
    family: Family | None = None,
) -> Quantization | None:
    """Returns the checkpoint's own quantization, or None if its weights are not quantized.

    Args:
        folder: folder of the model.
        config: its config.json.
        spec: the model.
        wanted: see `model_quantization`.
        family: names the checkpoint's tensors, by default the model's family.

    Raises:
        ModelError: the method is not supported.
        ConfigError: `wanted` quantizes layers that are already quantized.
    """
    settings = settings_of(folder, config)
    if settings is None:
        return None
    layers, head = (None, None) if wanted is None else split_name(wanted)
    if layers == FLOAT and settings.get("quant_method") == "gguf":
        settings, layers = {**settings, "dequantized": True}, None
    method = method_of(settings)
    if layers is not None:
        raise ConfigError(
            f"quantization={layers}: the checkpoint is quantized already, by "
            f"{settings['quant_method']}; leave it out",
            "quantization",
        )
    # A folder may have no weights if they are random or only sizes matter.
    files = weight_files(folder) if stored_weights(folder) else []
    family = family or _family(spec)
    if any(file.suffix == ".gguf" for file in files):
        family = stored_family(family)
    # The settings of a GGUF file already list its tensors.
    headers = [file for file in files if file.suffix != ".gguf"]
    tensors: dict[str, TensorInfo] = {}
    with contextlib.ExitStack() as stack:
        for file in headers:
            opened = open_file(stack, file)
            for name in sorted(opened.keys()):
                view = opened.get_slice(name)
                info = TensorInfo(DTYPES.get(view.get_dtype()), tuple(view.get_shape()))
                tensors[family.canonical(name)] = info
    found = Checkpoint(method, _module_of(spec, family), tensors)
    return found if head is None else QuantizedHead(found, head)


def read_quantization(
    settings: Mapping[str, Any], spec: ModelSpec, tensors: Tensors
) -> Quantization:
    """Returns the quantization that a checkpoint's settings describe.

    Args:
        settings: settings with `quant_method`.
        spec: the model.
        tensors: tensors of the checkpoint, by canonical name.
    """
    return Checkpoint(method_of(settings), _module_of(spec, _family(spec)), tensors)


def _family(spec: ModelSpec) -> Family:
    family = family_named(spec.family)
    if family is None:
        raise ModelError(f"there is no family {spec.family!r}")
    return family


def _module_of(spec: ModelSpec, family: Family) -> Callable[[str], str]:
    """Returns a function from a projection's name to the checkpoint's name of its module."""

    def module_of(projection: str) -> str:
        source = family.source(spec, f"{projection}.weight")
        if source.transposed or source.span is not None:
            raise ModelError(f"quantized checkpoints of {spec.architecture} are not supported")
        return source.name.removesuffix(".weight")

    return module_of


_KEYS = ("quantization_config", "compression_config")
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Keys of config.json, and files next to it, that mark a quantized checkpoint."""


def model_quantization(
    folder: str | Path, config: Mapping[str, Any], spec: ModelSpec, wanted: str | None = None
) -> Quantization:
    """Returns the model's quantization. Reads only the headers of weight files.

    Args:
        folder: folder of the model.
        config: the folder's config.json.
        spec: the model.
        wanted: `EngineArgs.quantization`; None for the checkpoint's own.

    Raises:
        ModelError: the checkpoint's method is not supported.
        ConfigError: `wanted` quantizes layers that are already quantized.
    """
    folder, config = Path(folder), {**(config.get("text_config") or {}), **config}
    if any(map(config.get, _KEYS)) or any((folder / name).exists() for name in _FILES):
        found = checkpoint_quantization(folder, config, spec, wanted)
        if found is not None:
            return found
    return quantization_of(wanted)
