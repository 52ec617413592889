"""Formats of stored keys and values: as they are, or in 8 bits with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ConfigError

Scales = Literal["none", "head", "token"]

LARGEST_VALUE = 57344.0
"""Keys and values are cut to this before they are stored in 8 bits: it is what fp16 can scale."""
SMALLEST_TOP = 1e-20
"""A token's scale is what it were if its largest value were this, if that is smaller."""
_SCALE_BYTES = 4
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.uint8: 127.0}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """dtype: of the stored values; in 8 bits they are multiplied by a scale. uint8 stands for
    integers from -127 to 127, stored plus 128. scales: none; one per KV head, fixed; or one per
    token and KV head, such that the largest value there is the largest number of the dtype."""

    dtype: torch.dtype
    scales: Scales = "none"

    @property
    def largest(self) -> float:
        """The value that larger ones are cut to before they are stored in 8 bits."""
        return _LARGEST[self.dtype]

    @property
    def offset(self) -> int:
        """The number that is added to integers."""
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
    """Returns what `EngineConfig.kv_cache_dtype` stands for in a model that computes in `dtype` and
    has heads of these sizes.

    Raises:
        ConfigError: the model's heads cannot be stored like that.
    """
    stored = _FORMATS.get(name)
    if stored is None:
        return KVFormat(dtype)
    for head_dim in head_dims:
        if head_dim % 2:
            raise ConfigError(
                f"kv_cache_dtype={name} needs heads of an even size, this model's have {head_dim}; "
                "use auto",
                "kv_cache_dtype",
            )
    return stored


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The stored keys and values of one layer.

    k, v: [NB, Hkv, BS, D], strided views; each head's BS * D values lie together.
    k_scale, v_scale: float32, what stored values are to be multiplied by. [Hkv] where heads have
        fixed ones, views [NB, Hkv, BS] where tokens have, or None.
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
