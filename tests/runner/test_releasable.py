"""Memory that a sleeping engine gives up."""

from __future__ import annotations

import torch

from quire.runner.releasable import HostPages, _gaps, _in_chunks, releasable_memory

MB = 1 << 20


def test_gaps_between_spans() -> None:
    assert list(_gaps((0, 100), [])) == [(0, 100)]
    assert list(_gaps((0, 100), [(0, 100)])) == []
    assert list(_gaps((50, 100), [(0, 60), (70, 80), (75, 90), (99, 200)])) == [(60, 70), (90, 99)]
    assert list(_gaps((50, 100), [(0, 50), (100, 110)])) == [(50, 100)]


def test_spans_in_chunks() -> None:
    chunks = [torch.full((8,), index, dtype=torch.uint8) for index in range(3)]
    found = [(span, each.tolist()) for span, each in _in_chunks([(2, 7), (20, 31)], iter(chunks))]
    assert found == [
        ((2, 7), [0] * 5),
        ((20, 23), [0] * 3),
        ((23, 31), [1] * 8),
    ]


def test_pages_of_a_cpu() -> None:
    memory = releasable_memory(torch.device("cpu"), enabled=True)
    assert isinstance(memory, HostPages)
    with memory.allocate():
        kept, dropped = torch.ones(4 * MB), torch.ones(4 * MB)
    address = dropped.data_ptr()
    # The first and the last page may hold other data.
    assert 15 * MB < memory.release([dropped, torch.empty(8, device="meta")]) <= 16 * MB
    memory.restore()
    assert dropped.data_ptr() == address
    assert int((dropped != 0).sum()) < 4096
    assert bool(kept.all())
    dropped.fill_(2.0)
    assert bool((dropped == 2).all())
    memory.close()
