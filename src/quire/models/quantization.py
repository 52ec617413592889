"""The quantization of a model: what the user asked for, or what the checkpoint says."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelError
from quire.models.files import DTYPES, open_file, weight_files
from quire.models.registry import BY_NAME
from quire.models.spec import ModelSpec
from quire.quantization import Quantization, quantization_of
from quire.quantization.settings import settings_of


def model_quantization(
    folder: str | Path, config: Mapping[str, Any], spec: ModelSpec, wanted: str | None = None
) -> Quantization:
    """Returns the quantization `wanted` by `EngineArgs`, or the checkpoint's own.

    config: the folder's config.json. Files are opened only for their headers.

    Raises:
        ModelError: the checkpoint is quantized in a way that is not known.
        ConfigError: a quantization is wanted of what is quantized already.
    """
    settings = settings_of(Path(folder), config)
    if settings is None:
        return quantization_of(wanted)
    # Imported here: most models are not quantized.
    from quire.quantization.checkpoint import Checkpoint, method_of
    from quire.quantization.fields import TensorInfo

    method = method_of(settings)
    if wanted is not None:
        raise ConfigError(
            f"quantization={wanted}: the checkpoint is quantized already, by "
            f"{settings['quant_method']}; leave it out",
            "quantization",
        )
    family = BY_NAME[spec.family]

    def module_of(projection: str) -> str:
        source = family.source(spec, f"{projection}.weight")
        if source.transposed or source.span is not None:
            raise ModelError(f"quantized checkpoints of {spec.architecture} are not supported")
        return source.name.removesuffix(".weight")

    tensors: dict[str, TensorInfo] = {}
    # A folder without weights serves for random ones, and for sizes.
    files = weight_files(Path(folder)) if any(Path(folder).glob("*.safetensors")) else []
    with contextlib.ExitStack() as stack:
        for file in files:
            opened = open_file(stack, file)
            for name in sorted(opened.keys()):
                view = opened.get_slice(name)
                info = TensorInfo(DTYPES.get(view.get_dtype()), tuple(view.get_shape()))
                tensors[name.removeprefix(family.prefix)] = info
    return Checkpoint(method, module_of, tensors)
