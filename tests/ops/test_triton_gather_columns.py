"""A kernel that gathers the ranks' columns of a matrix.

Every rank is a process in Triton's interpreter, and all map the same memory.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from quire.ops.triton.collectives import all_reduce, gather_columns

WIDTH = 24
"""RankColumns of a rank."""
ROWS = (3, 1, 4, 4, 1)
MOST, WORDS = 4, 4
"""Rows at most, and words of a tile."""


def parts(world: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Returns each rank's columns of every matrix."""
    make = torch.Generator().manual_seed(world)
    return [
        [torch.randn(rows, WIDTH, generator=make).to(dtype) for _ in range(world)] for rows in ROWS
    ]


def memory_for(world: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the matrices and the flags of all ranks."""
    matrices = torch.zeros(world, MOST, world * WIDTH, dtype=dtype).share_memory_()
    tiles = MOST * -(-WIDTH * dtype.itemsize // (4 * WORDS))
    flags = torch.zeros(world, gather_columns.flag_words(tiles, world), dtype=torch.int32)
    return matrices, flags.share_memory_()


def seen_by(
    rank: int, memory: tuple[torch.Tensor, torch.Tensor], tries: int
) -> tuple[all_reduce.Peers, gather_columns.RankColumns]:
    """Returns a rank's `Peers` and `RankColumns`."""
    matrices, flags = memory
    starts, flag_starts = (torch.tensor([own.data_ptr() for own in each]) for each in memory)
    epochs = torch.zeros(flags.shape[1], dtype=torch.int32)
    control = torch.tensor([0, tries], dtype=torch.int32)
    report, none = torch.zeros(3, dtype=torch.int32), torch.zeros(0)
    peers = all_reduce.Peers(rank, len(flags), none, none, none, none, control, report)
    return peers, gather_columns.RankColumns(starts, matrices[rank], flag_starts, epochs)


def run_rank(rank: int, memory: tuple[torch.Tensor, torch.Tensor], dtype: Any, out: Any) -> None:
    gather_columns.TILE = WORDS
    torch.set_num_threads(1)
    peers, columns = seen_by(rank, memory, 1 << 30)
    found = []
    for mine in parts(peers.world, dtype):
        assert gather_columns.takes(columns, mine[rank])
        got = gather_columns.gather_columns(peers, columns, mine[rank], 7)
        found.append(got.float().numpy().copy())
    out.put((rank, found, peers.report.tolist()))


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32)])
def test_columns_of_all_ranks(kernel_device: str, world: int, dtype: torch.dtype) -> None:
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    context = multiprocessing.get_context("fork")
    memory, out = memory_for(world, dtype), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, memory, dtype, out), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = {rank: rest for rank, *rest in (out.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(timeout=60)
    for index, mine in enumerate(parts(world, dtype)):
        for rank in range(world):
            assert torch.equal(torch.from_numpy(found[rank][0][index]), torch.cat(mine, 1).float())
    assert all(report == [0, 0, 0] for _, report in found.values())


def test_waiting_for_a_missing_rank_ends(kernel_device: str) -> None:
    """The wait ends, and the report names the missing rank."""
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    memory = memory_for(2, torch.float32)
    peers, columns = seen_by(0, memory, tries=3)
    gather_columns.gather_columns(peers, columns, torch.ones(2, WIDTH), 5)
    assert peers.report.tolist() == [2, 5, 1]
    assert peers.control[all_reduce.FAILED] == 1


def test_matrices_that_the_kernel_does_not_take() -> None:
    _, columns = seen_by(0, memory_for(2, torch.float32), tries=3)
    x = torch.ones(2, WIDTH)
    assert gather_columns.takes(columns, x)
    assert not gather_columns.takes(columns, x.half())
    assert not gather_columns.takes(columns, x[:, :-4])
    assert not gather_columns.takes(columns, torch.ones(MOST + 1, WIDTH))
    assert not gather_columns.takes(columns, x[:0])
    assert not gather_columns.takes(columns, torch.ones(2, 2 * WIDTH)[:, ::2])
