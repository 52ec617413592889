"""Compiles kernels before a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def compiling(workers: int) -> Iterator[None]:
    """Makes kernel launches within the block compile only, `workers` at a time, and waits for them
    at its end.

    A kernel that fails to compile raises at its next launch."""
    from quire.ops.triton.launch import (
        compiling as triton_compiling,  # needed only where graphs are
    )

    with triton_compiling(workers):
        yield
