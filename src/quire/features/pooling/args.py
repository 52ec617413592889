"""The setting for embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config import FeatureArgs, setting


@dataclass(frozen=True, kw_only=True)
class PoolingArgs(FeatureArgs):
    """The setting for embeddings."""

    pooling: Literal["auto", "last", "mean", "cls", "max"] = setting(
        "auto",
        "Embeddings: the last token's hidden state, or the mean over all; of encoders also the "
        "first one's, or the largest numbers. auto: as the model's 1_Pooling/config.json says, "
        "else last, or mean for encoders.",
        subject="Model",
    )
