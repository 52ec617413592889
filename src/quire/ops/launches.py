"""Launches of kernels, for those who capture them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def compiling(workers: int) -> Iterator[None]:
    """Kernel launches within the block only compile, `workers` at a time, and are done when it
    ends. What fails to compile raises when it is launched."""
    from quire.ops.triton.launch import (
        compiling as triton_compiling,  # needed only where graphs are
    )

    with triton_compiling(workers):
        yield
