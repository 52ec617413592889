"""Copies on a GPU, with interpreted kernels and fake streams that only count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from quire.arrays import int32
from quire.errors import ConfigError
from quire.parallel import SingleGroup
from quire.runner.transfer.copier import CudaCopier, PinnedCopier
from quire.runner.transfer.host import HostPool
from quire.runner.transfer.layout import BlockLayout, head_range
from quire.runner.transfer.peer import StagingPool


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Stream:
    """A fake stream: work runs when it is launched; events seem pending until something waits for
    them."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: Event) -> None:
        event.done = True
        self.waited.append(event)

    def record_event(self) -> Event:
        return Event()


STEP = Stream()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the real thing")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: STEP)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    STEP.waited.clear()
    return


def copier(tensors: list[torch.Tensor], slots: int, places: int) -> CudaCopier:
    layout = BlockLayout(tensors)
    pool = HostPool([layout], (slots,), pinned=False)
    return CudaCopier([layout], pool, (places * layout.size,), torch.device("cpu"))


@pytest.mark.parametrize("places", [1, 3, 10])
def test_blocks_of_several_tensors_go_and_come_back(places: int) -> None:
    tensors = [torch.randn(8, 2, 16), torch.randint(0, 99, (8, 4, 16)).byte()]
    was = [t.clone() for t in tensors]
    copies = copier(tensors, 10, places)
    done = copies.out(0, int32([7, 0, 3, 4, 5]), int32([9, 1, 2, 0, 5]))
    assert not done()
    # With too few staging buffers the step waits until the first ones were read.
    assert len(STEP.waited) == {1: 4, 3: 1, 10: 0}[places]
    for tensor in tensors:
        tensor.zero_()
    copies.into(0, int32([1, 2, 6]), int32([9, 2, 5]))
    for tensor, then in zip(tensors, was, strict=True):
        assert torch.equal(tensor[[1, 2, 6]], then[[7, 3, 5]])
        assert not tensor[[0, 3, 4, 5, 7]].any()
    assert STEP in copies._out.waited
    assert copies._in.waited == [STEP]


def test_staging_buffers_are_returned_after_the_read() -> None:
    copies = copier([torch.randn(8, 16)], 8, places=2)
    for turn in range(5):
        copies.out(0, int32([turn]), int32([turn]))
        copies._staging[0]._lent[-1][1].done = True
    assert not STEP.waited or all(isinstance(event, Event) for event in STEP.waited)
    staging = copies._staging[0]
    lent = [place for places, _ in staging._lent for place in places]
    assert sorted(staging._free + lent) == [0, 1]


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        copier([torch.randn(8, 3)], 2, 1)


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (4, 2)])
def test_heads_of_ranks_cross_by_pieces(writers: int, readers: int) -> None:
    """Two heads on four ranks: two ranks hold each head."""
    whole = torch.randn(3, 2, 2, 2, 4, 4)
    pool: StagingPool | None = None
    for rank in range(writers):
        heads = head_range(2, rank, writers)
        layout = BlockLayout([whole[:, :, :, heads.first : heads.end].contiguous()], heads)
        pool = pool or StagingPool([layout.size], 4, SingleGroup(), "cpu")
        PinnedCopier([layout], pool, torch.device("cpu")).out(0, int32([2, 0]), int32([1, 3]))
    assert pool is not None
    for rank in range(readers):
        heads = head_range(2, rank, readers)
        part = whole[:, :, :, heads.first : heads.end]
        target = torch.zeros_like(part).contiguous()
        copier = PinnedCopier([BlockLayout([target], heads)], pool, torch.device("cpu"))
        copier.into(0, int32([0, 1]), int32([1, 3]))
        assert torch.equal(target[0], part[2])
        assert torch.equal(target[1], part[0])
        assert not target[2].any()
