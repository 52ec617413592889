"""Parameters of embeddings, as users give them."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from quire.errors import RequestError

Pooling = Literal["last", "mean", "cls", "max"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters that turn a text's hidden states into one vector.

    Attributes:
        pooling: "last" takes the last token's state, "mean" the mean of all. Encoders also have
            "cls", the first token's state, and "max", the largest number of all states in each
            place. None: the engine's setting.
        normalize: scale the vector to length 1.
        dimensions: keep only so many first dimensions, before normalizing. The model must be
            trained for it (Kusupati et al., 2022, "Matryoshka").
        prompt_name: name of the model's prompt to put before a text; None: the model's default.
    """

    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise RequestError(
                f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}",
                param="pooling",
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
