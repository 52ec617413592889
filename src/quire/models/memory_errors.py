"""Errors of allocations, as errors of the model whose sizes asked for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quire.errors import ModelError


@contextlib.contextmanager
def must_fit_memory() -> Iterator[None]:
    """Turns the error of an allocation that fails, on the host or a GPU, into a ModelError."""
    try:
        yield
    except RuntimeError as error:
        raise too_large(error) from error


def too_large(error: RuntimeError) -> ModelError:
    """Returns the error of an allocation that failed as a ModelError; raises any other as it is."""
    if "memory" not in str(error) and "overflow" not in str(error):
        raise error
    return ModelError(f"the sizes in config.json do not fit the memory: {error}")
