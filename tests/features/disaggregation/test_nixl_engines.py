"""Real engines that read each other's KV cache by the real library, over UCX on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire.errors import NIXL
from tests.features.disaggregation.test_disagg_engines import alone, check, folders, make

__all__ = ["folders", "make"]
pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in NIXL), reason="needs the extra `nixl`"
)


@pytest.mark.parametrize(
    ("model", "mode", "kv"),
    [("full", "async", "int8"), ("window", "sync", "float32"), ("state", "sync", "float32")],
)
def test_tokens_are_those_of_one_engine(
    folders: dict[str, Path], make: Any, model: str, mode: str, kv: str
) -> None:
    expected = alone(folders[model], kv_cache_dtype=kv)
    check(make(folders[model], mode, transport="nixl", kv_cache_dtype=kv), expected)


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_engines_of_different_ranks(
    folders: dict[str, Path], make: Any, ranks: tuple[int, int]
) -> None:
    """KV is read layer by layer, following the clock of each of the writer's ranks."""
    check(make(folders["full"], "async", transport="nixl", ranks=ranks), alone(folders["full"]))
