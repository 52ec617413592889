"""Ranks' heads are copied to the memory between engines and back, on separate streams."""

from __future__ import annotations

import time

import pytest
import torch

from quire.arrays import int32
from quire.parallel import SingleGroup
from quire.plan import Transfer
from quire.runner.transfer.copier import PinnedCopier
from quire.runner.transfer.layout import BlockLayout, head_range
from quire.runner.transfer.peer import PeerPlace, StagingPool

HEADS, BLOCKS, SLOTS = 8, 128, 64


def place(tensor: torch.Tensor, rank: int, world: int, pool: StagingPool | None) -> PeerPlace:
    heads = head_range(HEADS, rank, world)
    layout = BlockLayout([tensor], heads)
    pool = pool or StagingPool([layout.size], SLOTS, SingleGroup(), "cuda")
    copier = PinnedCopier([layout], pool, torch.device("cuda"))
    return PeerPlace(pool, copier, [heads.owner])


def finish(found: PeerPlace, id: int) -> None:
    while found.ended() != ([id], []):
        time.sleep(1e-4)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 4), (16, 8)])
def test_every_rank_count_reads_blocks_of_every_other(writers: int, readers: int) -> None:
    whole = torch.randint(-99, 99, (BLOCKS, 4, 2, HEADS, 16, 128), device="cuda").bfloat16()
    blocks, slots = int32(range(0, 2 * SLOTS, 2)), int32(range(SLOTS))
    pool: StagingPool | None = None
    for rank in range(writers):
        heads = head_range(HEADS, rank, writers)
        part = whole[:, :, :, heads.first : heads.end].contiguous()
        found = place(part, rank, writers, pool)
        pool = found.pool
        found.out(Transfer(rank, "out", "peer", 0, blocks, slots=slots))
        finish(found, rank)
        pool.board[:] = 0
    picked = torch.from_numpy(blocks).long().cuda()
    for rank in range(readers):
        heads = head_range(HEADS, rank, readers)
        part = whole[:, :, :, heads.first : heads.end]
        target = torch.zeros_like(part).contiguous()
        found = place(target, rank, readers, pool)
        found.into(Transfer(rank, "in", "peer", 0, blocks, slots=slots))
        finish(found, rank)
        assert torch.equal(target[picked], part[picked])
        found.pool.board[:] = 0
    found.close()
