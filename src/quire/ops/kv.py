"""Formats of stored keys and values: the model's dtype, or 8 bits with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ConfigError

Scales = Literal["none", "head", "token"]

LARGEST_VALUE = 57344.0
"""Bound of the magnitude of keys and values before they are stored in 8 bits. It is the largest
number for which scaling in fp16 does not overflow."""
SMALLEST_TOP = 1e-20
"""Lower bound on a token's absolute maximum when its scale is computed."""
_SCALE_BYTES = 4
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.uint8: 127.0}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The storage format of keys and values.

    Attributes:
        dtype: dtype of the stored values. 8-bit values are multiplied by a scale when they are
            read. uint8 stands for integers from -127 to 127, stored plus 128.
        scales: "none", "head" or "token". "head" is one fixed scale per KV head. "token" is one
            scale per token and KV head, which maps the largest value to the dtype's largest number.
    """

    dtype: torch.dtype
    scales: Scales = "none"

    @property
    def largest(self) -> float:
        """The largest magnitude that 8 bits store. Larger values are clipped to it."""
        return _LARGEST[self.dtype]

    @property
    def offset(self) -> int:
        """The number that is added to integers when they are stored."""
        return 128 if self.dtype == torch.uint8 else 0

    def bytes_per_head(self, head_dim: int) -> int:
        """Returns the bytes of one token's K, or V, of one head."""
        return head_dim * self.dtype.itemsize + (_SCALE_BYTES if self.scales == "token" else 0)


_FORMATS = {
    "fp8_e4m3": KVFormat(torch.float8_e4m3fn, "head"),
    "fp8_dynamic": KVFormat(torch.float8_e4m3fn, "token"),
    "int8": KVFormat(torch.uint8, "token"),
}


def kv_format(name: str, dtype: torch.dtype, *head_dims: int) -> KVFormat:
    """Returns the format that `EngineConfig.kv_cache_dtype` names.

    Args:
        name: the value of `kv_cache_dtype`.
        dtype: the dtype in which the model computes.
        head_dims: the sizes of the model's heads.

    Raises:
        ConfigError: the format does not fit the model's heads.
    """
    stored = _FORMATS.get(name)
    if stored is None:
        return KVFormat(dtype)
    for head_dim in head_dims:
        if head_dim % 2:
            raise ConfigError(
                f"kv_cache_dtype={name} needs an even head size, but this model has {head_dim}; "
                "use auto",
                "kv_cache_dtype",
            )
    return stored


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The attention of a layer on one rank, as far as its schedule depends on it.

    Attributes:
        heads: query heads.
        kv_heads: KV heads.
        head_dim: D.
        dtype: dtype of the queries.
        kv_format: format of stored keys and values.
        window: positions that a query sees, or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_format: KVFormat
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The stored keys and values of one layer.

    Attributes:
        k: [NB, Hkv, BS, D], a strided view; each head's BS * D values are contiguous.
        v: like `k`.
        k_scale: float32 factors of stored keys, or None. Fixed scales of heads are [Hkv]. Scales of
            tokens are a view [NB, Hkv, BS].
        v_scale: like `k_scale`, for stored values.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def format(self) -> KVFormat:
        if self.k_scale is None:
            return KVFormat(self.k.dtype)
        return KVFormat(self.k.dtype, "head" if self.k_scale.dim() == 1 else "token")
