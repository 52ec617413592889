"""Turns errors of memory allocations into errors about the model's sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quire.errors import ModelError


@contextlib.contextmanager
def must_fit_memory() -> Iterator[None]:
    """Turns a failed allocation within the block, on the host or a GPU, into a ModelError."""
    try:
        yield
    except RuntimeError as error:
        raise too_large(error) from error


def too_large(error: RuntimeError) -> ModelError:
    """Returns a ModelError for a failed allocation. Raises any other error unchanged."""
    if "memory" not in str(error) and "overflow" not in str(error):
        raise error
    return ModelError(f"the sizes in config.json do not fit the memory: {error}")
