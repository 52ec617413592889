"""Pinned host memory of a sleeping GPU."""

from __future__ import annotations

import pytest
import torch

from quire.errors import QuireError
from quire.runner import pinned_memory
from quire.runner.pinned_memory import PinnedMemory


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "_CHUNK", 1 << 20)


def test_chunks_stay_pinned() -> None:
    pinned: list[int] = []
    memory = PinnedMemory(
        lambda chunk: pinned.append(chunk.data_ptr()),
        lambda chunk: pinned.remove(chunk.data_ptr()),
    )
    first = [chunk.data_ptr() for chunk in memory.chunks((1 << 20) + 1)]
    assert len(first) == 2
    assert sorted(first) == sorted(pinned)
    assert [chunk.data_ptr() for chunk in memory.chunks(1)]
    chunks = list(memory.chunks(3 << 20))
    assert {chunk.data_ptr() for chunk in chunks} == set(pinned) > set(first)
    assert len(pinned) == 3
    assert all(bool((chunk == 0).all()) for chunk in chunks)
    del chunks
    memory.close()
    assert pinned == []


def test_memory_that_cannot_be_pinned() -> None:
    def refuse(chunk: torch.Tensor) -> None:
        raise QuireError("no memory")

    memory = PinnedMemory(refuse, lambda chunk: None)
    with pytest.raises(QuireError, match="no memory"):
        list(memory.chunks(1))
    memory.close()
