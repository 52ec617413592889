"""Reads typed values from a Hugging Face config.json, in all versions of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import ModelError

Config = Mapping[str, Any]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


MOST_LAYERS = 10_000
MOST_FEATURES = 1 << 22
MOST_TOKENS = 1 << 24
MOST_HEADS = MOST_HEAD_DIM = 1 << 14
MOST_POSITIONS = 1 << 25
MOST_CLASSES = 1 << 16


def integer(
    config: Config,
    name: str,
    default: int | None = None,
    low: int = 1,
    high: int = 2**31 - 1,
) -> int:
    """Returns an integer from `low` to `high`; null counts as absent. Raises ModelError."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ModelError(f"config.json: {name} must be an integer >= {low}, got {value!r}")
    if value > high:
        raise ModelError(f"config.json: {name} must be at most {high}, got {str(value)[:40]}")
    return value


def number(config: Config, name: str, default: float | None = None) -> float:
    """Returns a finite positive number; null counts as absent. Raises ModelError."""
    value = config.get(name)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e308:
        raise ModelError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def flag(config: Config, name: str, default: bool) -> bool:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def choice(config: Config, name: str, allowed: Mapping[str, Any], default: str) -> Any:
    value = str(config.get(name) or default)
    if value not in allowed:
        raise ModelError(
            f"config.json: {name} {value!r} is not supported; expected one of: {', '.join(allowed)}"
        )
    return allowed[value]


def dtype(config: Config) -> torch.dtype:
    """Returns the checkpoint's dtype, by default float32."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return choice({"dtype": name.removeprefix("torch.")}, "dtype", _DTYPES, "float32")  # type: ignore[no-any-return]


def several(config: Config, name: str) -> list[Any]:
    """Returns a key's value as a list: a single value becomes a list of one, null an empty one."""
    value = config.get(name)
    return value if isinstance(value, list) else [] if value is None else [value]


def token_ids(config: Config, name: str) -> tuple[int, ...]:
    """Returns the token ids under a key, which may hold one id, a list or nothing."""
    ids = several(config, name)
    if any(isinstance(i, bool) or not isinstance(i, int) or i >= 2**31 for i in ids):
        raise ModelError(f"config.json: {name} must be token ids, got {ids!r}")
    return tuple(ids)


def bos_token_id(config: Config) -> int | None:
    return next(iter(token_ids(config, "bos_token_id")), None)


def heads(config: Config, hidden_size: int) -> tuple[int, int, int]:
    """Returns the number of query heads, the number of KV heads, and the head size."""
    query = integer(config, "num_attention_heads", high=MOST_HEADS)
    kv = integer(config, "num_key_value_heads", query)
    if query % kv:
        raise ModelError(
            f"config.json: {query} attention heads cannot share {kv} key/value heads evenly"
        )
    if config.get("head_dim") is None and hidden_size % query:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of {query} heads, and "
            "head_dim is not given"
        )
    return query, kv, integer(config, "head_dim", hidden_size // query, high=MOST_HEAD_DIM)


def windows(config: Config, layers: int, width: int | None, first: int) -> tuple[int | None, ...]:
    """Returns each layer's window, by `layer_types`. Without that key, layers from `first` on have
    the window `width`."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(width if index >= first else None for index in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise ModelError(
            f"config.json: layer_types must give each of {layers} layers one of: {', '.join(known)}"
        )
    if width is None and "sliding_attention" in kinds:
        raise ModelError("config.json: layers with sliding_attention need a sliding_window")
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def architecture(config: Config) -> str:
    """Returns the first of `architectures`, or an empty string."""
    return str((several(config, "architectures") or [""])[0])
