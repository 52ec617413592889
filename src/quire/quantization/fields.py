"""Typed fields of a checkpoint's quantization settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.errors import ModelError

Settings = Mapping[str, Any]


class TensorInfo(NamedTuple):
    """What a file's header says of a tensor. dtype: None where PyTorch has none like it."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]


Tensors = Mapping[str, TensorInfo]
"""The checkpoint's tensors by name; empty where a folder holds no weights."""


def refused(what: str) -> ModelError:
    return ModelError(f"the checkpoint's quantization is not supported: {what}")


def integer(settings: Settings, name: str, default: int | None = None) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(f"{name} must be an integer, got {value!r}")
    return value


def flag(settings: Settings, name: str, default: bool | None = None) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise refused(f"{name} must be true or false, got {value!r}")
    return value


def one_of(settings: Settings, name: str, known: Sequence[Any], default: Any = None) -> Any:
    value = settings.get(name, default)
    if value not in known:
        names = ", ".join(str(item) for item in known)
        raise refused(f"{name} {value!r}; known are: {names}")
    return value


def group_size(settings: Settings, name: str = "group_size") -> int:
    """Returns the inputs of a group, 0 for all (-1 in files)."""
    value = integer(settings, name, 128)
    if value != -1 and (value < 8 or value % 8):
        raise refused(f"{name} {value} is neither -1 nor a multiple of 8")
    return max(value, 0)


def names(settings: Settings, name: str) -> tuple[str, ...]:
    value = settings.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise refused(f"{name} must be a list of names, got {value!r}")
    return tuple(value)


def scale_dtype(tensors: Tensors, name: str) -> torch.dtype:
    """Returns the dtype to keep the scales `name` in, such that none changes."""
    info = tensors.get(name)
    kept = (torch.float16, torch.bfloat16)
    return info.dtype if info is not None and info.dtype in kept else torch.float32


_FUSED = (
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj$"), ".gate_up_proj"),
)


def aliases(module: str) -> tuple[str, ...]:
    """Returns the names under which a list of exceptions may mean a module: its own, and that of
    the fused projection it is part of."""
    return (module, *(p.sub(fused, module) for p, fused in _FUSED if p.search(module)))
