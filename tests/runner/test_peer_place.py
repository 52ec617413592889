"""Blocks between engines with different numbers of ranks: each rank moves its own heads."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import ops
from quire.arrays import int32
from quire.errors import ConfigError
from quire.layers.gated_delta import StateLayout
from quire.parallel import SingleGroup
from quire.parallel.sharding import ShardSpec
from quire.plan import Transfer
from quire.runner.transfer.copier import HostCopier
from quire.runner.transfer.engine_memory import (
    RankMemory,
    decode_memory,
    encode_memory,
    find_pieces,
    group_memory,
)
from quire.runner.transfer.layout import BlockLayout, HeadCut, HeadRange, head_range
from quire.runner.transfer.peer import PeerPlace, StagingPool
from quire.runner.transfer.rank_moves import RankMoves

WORLDS = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8, 16)


def whole_block(heads: int, blocks: int = 3) -> list[Tensor]:
    """A group of two layers, with values and scales: [blocks, layers, 2, heads, tokens, width]."""
    values = torch.arange(blocks * 2 * 2 * heads * 4 * 4).view(blocks, 2, 2, heads, 4, 4).int()
    return [values, values[..., 0].float() + 0.5]


def of_rank(whole: list[Tensor], heads: int, rank: int, world: int) -> list[Tensor]:
    """Returns a rank's part, by the split of the weights."""
    first, end = ShardSpec(dim=0).bounds(heads, rank, world)
    return [tensor[:, :, :, first:end].contiguous() for tensor in whole]


def places(ranks: list[list[Tensor]], heads: int) -> list[PeerPlace]:
    world = len(ranks)
    layouts = [
        BlockLayout(tensors, head_range(heads, rank, world)) for rank, tensors in enumerate(ranks)
    ]
    pool = StagingPool([layouts[0].size], 4, SingleGroup(), "cpu")
    found = []
    for layout in layouts:
        assert layout.size == layouts[0].size
        assert layout.heads is not None
        place = PeerPlace(pool, HostCopier([layout], pool), [layout.heads.owner])
        found.append(place)
    return found


def move(found: list[PeerPlace], transfer: Transfer) -> None:
    for place in found:
        (place.out if transfer.direction == "out" else place.into)(transfer)


@pytest.mark.parametrize("heads", HEADS)
@settings(max_examples=16)
@given(writers=st.sampled_from(WORLDS), readers=st.sampled_from(WORLDS))
def test_every_rank_count_reads_blocks_of_every_other(
    heads: int, writers: int, readers: int
) -> None:
    whole = whole_block(heads)
    sources = [of_rank(whole, heads, rank, writers) for rank in range(writers)]
    targets = [
        [torch.zeros_like(tensor) for tensor in of_rank(whole, heads, rank, readers)]
        for rank in range(readers)
    ]
    wrote, read = places(sources, heads), places(targets, heads)
    move(wrote, Transfer(1, "out", "peer", 0, int32([2, 0]), slots=int32([3, 1])))
    # Slots have the heads of all ranks in order, for any number of writing ranks.
    for slot, block in ((3, 2), (1, 0)):
        data = bytes(wrote[0].pool.view(0, slot))
        assert data.startswith(whole[0][block].numpy().tobytes())
        read[0].pool.view(0, slot)[:] = data
    move(read, Transfer(2, "in", "peer", 0, int32([1, 2]), slots=int32([3, 1])))
    for rank, tensors in enumerate(targets):
        for now, was in zip(tensors, of_rank(whole, heads, rank, readers), strict=True):
            assert torch.equal(now[1], was[2])
            assert torch.equal(now[2], was[0])
            assert not now[0].any()


def whole_state(drafts: int) -> StateLayout:
    """Eight key heads of 2 numbers. Each serves two value heads of 3 numbers."""
    return StateLayout(16, 2, 3, 8 * 2 * 2 + 16 * 3, 3, torch.float32, drafts)


def states(drafts: int, blocks: int = 3) -> list[Tensor]:
    """A group of two layers' recurrent states."""
    parts = whole_state(drafts).parts(16, ops.KVFormat(torch.float32))
    shapes = [(blocks, 2, *shape) for shape, _ in parts]
    return [torch.arange(math.prod(shape)).view(shape).int() for shape in shapes]


def states_of_rank(whole: list[Tensor], rank: int, world: int) -> tuple[list[Tensor], HeadRange]:
    """Returns a rank's part of the states, by the sections of heads in `StateLayer`, and its
    layout."""
    channels = [16, 16, 48]
    sections = [(2, [16]), (3, channels), (4, channels), (4, [16, 16]), (2, [*channels, 48])]
    found = []
    for tensor, (dim, sizes) in zip(whole, sections, strict=False):
        split = [part.chunk(world, dim)[rank] for part in tensor.split(sizes, dim)]
        found.append(torch.cat(split, dim).contiguous())
    drafts = whole[1].shape[2] - 2
    layout = StateLayout(16 // world, 2, 3, 80 // world, 3, torch.float32, drafts)
    cuts = tuple(HeadCut(*cut) for cut in layout.head_sections)
    return found, head_range(8, rank, world, cuts)


@settings(max_examples=32)
@given(
    writers=st.sampled_from(WORLDS),
    readers=st.sampled_from(WORLDS),
    drafts=st.sampled_from([0, 2]),
    layered=st.booleans(),
)
def test_any_ranks_read_any_ranks_states(
    writers: int, readers: int, drafts: int, layered: bool
) -> None:
    """States are read from the memory between engines, where they have the layout of one rank, and
    directly from the writers' memory."""
    whole = states(drafts)
    sources = [states_of_rank(whole, rank, writers) for rank in range(writers)]
    layouts = [BlockLayout(tensors, heads) for tensors, heads in sources]
    pool = StagingPool([layouts[0].size], 4, SingleGroup(), "cpu")
    for layout in layouts:
        HostCopier([layout], pool).out(0, int32([2, 0]), int32([3, 1]))
    assert bytes(pool.view(0, 3)).startswith(whole[0][2].numpy().tobytes())
    for rank in range(readers):
        wanted, heads = states_of_rank(whole, rank, readers)
        staged = [torch.zeros_like(tensor) for tensor in wanted]
        HostCopier([BlockLayout(staged, heads)], pool).into(0, int32([1, 2]), int32([3, 1]))
        direct = [torch.zeros_like(tensor) for tensor in wanted]
        target = BlockLayout(direct, heads)
        for number, layout in enumerate(layouts):
            memory = group_memory(layout, number == 0)
            for layers in (range(1), range(1, 2)) if layered else (None,):
                pieces = find_pieces(target, int32([1, 2]), memory, int32([2, 0]), layers)
                for here, there, size in () if pieces is None else pieces.each():
                    ctypes.memmove(here, there, size)
        for was, *now in zip(wanted, staged, direct, strict=True):
            for tensor in now:
                assert torch.equal(tensor[1], was[2])
                assert torch.equal(tensor[2], was[0])
                assert not tensor[0].any()


@pytest.mark.parametrize("heads", HEADS)
@settings(max_examples=16)
@given(writers=st.sampled_from(WORLDS), readers=st.sampled_from(WORLDS), layered=st.booleans())
def test_any_ranks_read_any_ranks_memory(
    heads: int, writers: int, readers: int, layered: bool
) -> None:
    """Each byte is read once, from the rank that owns its head, and blocks keep their order; also
    where layers are read one by one."""
    whole = whole_block(heads)
    sources = [of_rank(whole, heads, rank, writers) for rank in range(writers)]
    described = []
    for rank, tensors in enumerate(sources):
        layout = BlockLayout(tensors, head_range(heads, rank, writers))
        described.append(group_memory(layout, rank == 0))
    told = encode_memory([RankMemory(b"agent", "DRAM", 0, [memory]) for memory in described])
    for rank in range(readers):
        wanted = of_rank(whole, heads, rank, readers)
        tensors = [torch.zeros_like(tensor) for tensor in wanted]
        layout = BlockLayout(tensors, head_range(heads, rank, readers))
        written: list[int] = []
        for remote in decode_memory(told).ranks:
            for layers in (range(1), range(1, 2)) if layered else (None,):
                pieces = find_pieces(layout, int32([1, 2]), remote.groups[0], int32([2, 0]), layers)
                for here, there, size in () if pieces is None else pieces.each():
                    ctypes.memmove(here, there, size)
                    written += range(here, here + size)
        assert len(written) == len(set(written)) == 2 * sum(t[0].nbytes for t in tensors)
        for now, was in zip(tensors, wanted, strict=True):
            assert torch.equal(now[1], was[2])
            assert torch.equal(now[2], was[0])
            assert not now[0].any()


def test_blocks_that_a_peer_does_not_have_are_not_read() -> None:
    layout = BlockLayout([torch.zeros(3, 1, 2, 2, 4)])
    memory = group_memory(layout, owner=True)
    for blocks in ([3], [-1]):
        with pytest.raises(ValueError, match="of 3"):
            find_pieces(layout, int32([0]), memory, int32(blocks))


def test_a_move_that_fails_on_any_rank_fails() -> None:
    cells = np.zeros((2, 2), dtype=np.int64)
    first, second = RankMoves(cells, 0), RankMoves(cells, 1)
    ends: dict[tuple[int, int], bool] = {}
    for id in (5, 6, 7):
        for rank, moves in enumerate((second, first)):  # the other rank may be earlier
            moves.begin(id, lambda at=(1 - rank, id): ends.get(at))  # type: ignore[misc]
    ends |= {(1, 5): False, (1, 6): True, (1, 7): True, (0, 7): True}
    assert second.ended() == ([], [])
    assert second.busy  # there is no room to tell of the third
    assert first.ended() == ([], [])
    second.ended()
    assert not second.busy
    assert first.ended() == ([7], [])
    ends |= {(0, 5): True, (0, 6): True}
    assert first.ended() == ([6], [5])
    assert not first.busy


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("world", WORLDS)
def test_heads_are_split_as_the_weights_and_each_has_one_owner(heads: int, world: int) -> None:
    owned: list[int] = []
    for rank in range(world):
        found = head_range(heads, rank, world)
        assert (found.first, found.end) == ShardSpec(dim=0).bounds(heads, rank, world)
        owned += range(found.first, found.end) if found.owner else ()
    assert owned == list(range(heads))


def test_a_move_ends_once_it_has_on_every_rank() -> None:
    class Slow(HostCopier):
        done = False

        def out(self, *given):  # type: ignore[no-untyped-def]
            super().out(*given)
            return lambda: self.done

    whole = whole_block(2)
    layouts = [BlockLayout(of_rank(whole, 2, rank, 2), head_range(2, rank, 2)) for rank in range(2)]
    memory = StagingPool([layouts[0].size], 4, SingleGroup(), "cpu")
    memory.board = torch.zeros(2, 2, dtype=torch.int64).numpy()
    copiers = [HostCopier([layouts[0]], memory), Slow([layouts[1]], memory)]
    found = []
    for memory.rank, copier in enumerate(copiers):
        found.append(PeerPlace(memory, copier, [True]))
    first, second = found
    transfer = Transfer(7, "out", "peer", 0, int32([0]), slots=int32([0]))
    move([first, second], transfer)
    assert first.ended() == ([], [])
    assert second.ended() == ([], [])
    copiers[1].done = True  # type: ignore[attr-defined]
    assert second.ended() == ([7], [])
    assert first.ended() == ([7], [])
    assert not first.busy


def test_unaligned_parts_are_refused_on_a_gpu() -> None:
    from quire.runner.transfer.copier import PinnedCopier

    layout = BlockLayout([torch.zeros(4, 1, 2, 2, 3, 1)], head_range(2, 0, 1))
    with pytest.raises(ConfigError, match="16 bytes"):
        PinnedCopier(
            [layout], StagingPool([layout.size], 1, SingleGroup(), "cpu"), torch.device("cpu")
        )
