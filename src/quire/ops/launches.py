"""Compiles kernels before a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def compiling(workers: int) -> Iterator[None]:
    """Makes kernel launches within the block only compile, on `workers` threads.

    The end of the block waits for all of them. A kernel that fails to compile raises at its next
    launch."""
    from quire.ops.triton.launch import (
        compiling as triton_compiling,  # Only a device with graphs needs it.
    )

    with triton_compiling(workers):
        yield
