"""Scores and classes from what the engine returns of texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.arrays import Float32
from quire.config import EngineConfig
from quire.errors import BrokenLogitsError, RequestError


def class_values(logits: Float32, config: EngineConfig, *, activate: bool = True) -> Float32:
    """Returns the values of classes, float32 [classes], from their logits.

    Args:
        activate: apply the model's activation; otherwise the values are the logits.

    Raises:
        BrokenLogitsError: a logit is not finite.
    """
    return _activated(logits, config.class_activation if activate else "identity")


def pair_value(logits: Float32, config: EngineConfig) -> Float32:
    """Returns the score of a pair, float32 [1]. Raises as `class_values`."""
    return _activated(logits, config.score_activation)


def check_classifies(config: EngineConfig) -> None:
    """Raises RequestError if the model has no classification head."""
    if config.task != "classify":
        raise RequestError(
            "this model has no classification head (...ForSequenceClassification): use embeddings "
            "or scores",
            code="model_has_no_classes",
        )


def check_scores(config: EngineConfig) -> None:
    """Raises RequestError if the model has classes, of which none is a score."""
    if config.task == "classify" and len(config.labels) != 1:
        raise RequestError(
            f"this model has {len(config.labels)} classes, and a score needs a model with one: use "
            "/classify",
            code="model_gives_no_scores",
        )


def similarities(first: Sequence[Float32], second: Sequence[Float32]) -> Float32:
    """Returns how alike pairs of texts are, float32 [pairs]; one `first` belongs to all.

    Of single vectors it is their cosine. Of vectors for each token it is the sum over the first
    text's tokens of the largest cosine with a token of the second (Khattab & Zaharia 2020).

    Args:
        first: vectors of length 1, float32 [dimensions] or [tokens, dimensions].
        second: the other texts' vectors.
    """
    if first[0].ndim == 2:
        pairs = zip(list(first) * (len(second) // len(first)), second, strict=True)
        found = [float((one @ other.T).max(axis=1).sum()) for one, other in pairs]
        return np.asarray(found, dtype=np.float32)
    products: Float32 = (np.stack(first) * np.stack(second)).sum(axis=1, dtype=np.float32)
    return np.clip(products, -1.0, 1.0)


def _activated(logits: Float32, activation: str) -> Float32:
    if not np.isfinite(logits).all():
        raise BrokenLogitsError()
    values: Any = logits
    if activation == "sigmoid":
        values = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    elif activation == "softmax":
        powers = np.exp(logits.astype(np.float64) - logits.max())
        values = powers / powers.sum()
    return np.ascontiguousarray(values, dtype=np.float32)
