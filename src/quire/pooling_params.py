"""Parameters of embeddings, as users give them."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.errors import RequestError

Pooling = Literal["last", "mean"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters that turn a text's hidden states into one vector.

    Attributes:
        pooling: "last" takes the last token's state, "mean" the mean of all; None: the engine's
            setting.
        normalize: scale the vector to length 1.
        dimensions: keep only so many first dimensions, before normalizing. The model must be
            trained for it (Kusupati et al., 2022, "Matryoshka").
    """

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in (None, "last", "mean"):
            raise RequestError(
                f"pooling must be last or mean, got {self.pooling!r}", param="pooling"
            )
        if not isinstance(self.normalize, bool):
            raise RequestError(
                f"normalize must be true or false, got {self.normalize!r}", param="normalize"
            )
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(
                f"dimensions must be a positive integer, got {size!r}", param="dimensions"
            )
