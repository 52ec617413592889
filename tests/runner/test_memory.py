"""Sizes of the KV cache, and the memory that it takes."""

from __future__ import annotations

import io
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.layers.attention import KVLayout
from quire.ops import KVFormat
from quire.plan import KVGroup
from quire.runner import loaded_model, memory
from quire.runner.kv_cache import KVCache
from quire.runner.loaded_model import LoadedModel

MEMINFO = "MemTotal: 9000 kB\nMemFree: {free} kB\nMemAvailable: {available} kB\n"


@pytest.mark.parametrize("free", [10, 8_000_000])
def test_the_cpu_budget_does_not_depend_on_the_page_cache(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MEMINFO.format(free=free, available=8_000_000)
    monkeypatch.setattr(memory, "open", lambda path: io.StringIO(text), raising=False)
    config: Any = SimpleNamespace(args=SimpleNamespace(kv_cache_gb=None))
    assert memory.cpu_budget(config) == 8_000_000 * 1024 // 4


@pytest.mark.parametrize(("given", "left"), [(2.0, 2_000_000_000), (None, 6_000_000_000)])
def test_hooks_take_nothing_from_a_cache_of_a_given_size(
    given: float | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "activation_bytes", lambda *known: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * memory.GB, 10 * memory.GB))
    args = SimpleNamespace(kv_cache_gb=given, gpu_memory_utilization=1.0)
    loaded: Any = SimpleNamespace(
        config=SimpleNamespace(args=args),
        device=torch.device("cuda"),
        model=None,
        groups=(),
        _hooks=[SimpleNamespace(reserved_bytes=lambda groups, budget: 3 * memory.GB)],
    )
    assert LoadedModel._cache_budget(loaded) == left


def test_a_cache_that_no_machine_has_room_for_is_a_typed_error() -> None:
    layout = KVLayout(kv_heads=2, head_dim=64, query_heads=2)
    with pytest.raises(ConfigError, match="could not get"):
        KVCache(
            [KVGroup((0,))],
            [10**12],
            layouts=[layout],
            kv_format=KVFormat(torch.float32),
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_cache_on_a_cpu_takes_memory_when_it_is_used(dtype: torch.dtype) -> None:
    group = KVGroup((0, 1), tokens_per_block=16)
    layout = KVLayout(kv_heads=2, head_dim=64, query_heads=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache = KVCache(
        [group], [100_000], layouts=[layout], kv_format=KVFormat(dtype), device=torch.device("cpu")
    )
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    (values,) = cache.block_tensors(0)
    assert values.shape[:3] == (100_000, 2, 2)
    assert pages < values.nbytes // resource.getpagesize() // 20
    assert not values[77].float().any()
    values[77] = 1
    assert values[77].float().sum() == values[77].numel()
    assert values.data_ptr() % 64 == 0
