"""The weight files of a model's folder, and downloads from the Hugging Face hub."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import ModelError
from quire.models.gguf.folder import open_model
from quire.system import MOST_TABLE, open_regular, read_bounded

_SHOWN = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's dtypes by their names in safetensors files."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the folder's safetensors files, those in its index if it has one.

    Raises:
        ModelError: there are no such files, or the index is invalid.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(read_bounded(index, MOST_TABLE))["weight_map"].values()))
            # A name with a path could point to files outside of the folder.
            absent = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{index.name} is not a valid index of a sharded checkpoint: {error!r}"
            ) from error
        if absent:
            raise ModelError(f"{index.name} names files that do not exist: {first_few(absent)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        hint = "; --load-format dummy gives it random weights"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            hint = "; its pickled weights are not read, convert them to safetensors"
        raise ModelError(f"{folder} holds no *.safetensors file{hint}")
    return files


def open_file(stack: contextlib.ExitStack, file: Path) -> Any:
    """Opens a safetensors or GGUF file until `stack` ends.

    Raises:
        ModelError: the file cannot be read.
    """
    if file.suffix == ".gguf":
        return open_model(file)
    try:
        open_regular(file).close()
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {file.name}: {error}") from error


def first_few(items: list[str]) -> str:
    """Returns the first items and the number of the others, for an error message."""
    rest = len(items) - _SHOWN
    return "; ".join(items[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


_SETTINGS_FILES = ["*.json", "*.jinja", "tiktoken.model", "tokenizer.model"]
_MODEL_FILES = ["*.safetensors", *_SETTINGS_FILES]
_IGNORED_FILES = ["original/*", "consolidated*"]
_ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]


def download(model: str, revision: str | None, *, weights: bool = True) -> Path:
    """Returns the local folder of a model on the hub. Downloads it unless the cache has it.

    Args:
        model: id on the hub.
        revision: branch, tag or commit, or None for the default branch.
        weights: whether to download the weights too, not only configuration and tokenizer.

    Raises:
        ModelError: the download fails.
    """
    return _download(model, revision, _MODEL_FILES if weights else _SETTINGS_FILES)


def download_adapter(adapter: str) -> Path:
    """Returns the local folder of a LoRA adapter on the hub. Downloads it unless the cache has it.

    Raises:
        ModelError: the download fails.
    """
    return _download(adapter, None, _ADAPTER_FILES)


def _download(name: str, revision: str | None, wanted: list[str]) -> Path:
    # huggingface_hub is slow to import, and a model in a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=_IGNORED_FILES
        )
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name} is neither a local folder nor a model on the hub that you have access to"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} on the hub has no revision {revision!r}") from error
    except Exception as error:  # versions of huggingface_hub use different HTTP clients
        raise ModelError(
            f"{name} is not a local folder, and it could not be fetched from the hub "
            f"({type(error).__name__}). Without a network, give a folder, or download it first."
        ) from error
    return Path(folder)
