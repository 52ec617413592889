"""Sums over ranks of whole rows and their norms by a kernel, against the sum in the order of ranks
and `ops.rms_norm`.

Every rank is a process in Triton's interpreter, and all map the same memory.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from quire.ops import reference
from quire.ops.triton.collectives import all_reduce, sum_norm

WIDTH = 48
PLACES = 4
"""Rows of a launch."""
ROWS = (1, 9, 3, 16, 4, 1, 1)
"""Sums of these sizes, one after the other, over the same places."""
EPS = 1e-5


def parts(world: int, dtype: torch.dtype) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Returns each rank's part, and the residual, of every sum. Some parts hold -0.0."""
    make = torch.Generator().manual_seed(world)

    def draw(rows: int) -> torch.Tensor:
        drawn = torch.randn(rows, WIDTH, generator=make).to(dtype)
        return drawn.where(drawn.abs() > 0.2, -0.0)

    return [([draw(rows) for _ in range(world)], draw(rows)) for rows in ROWS]


def memory_for(world: int, words: int) -> torch.Tensor:
    """Returns the buffers of all ranks, which every rank maps."""
    size = sum_norm.place_words(PLACES, words, world)
    return torch.full((world, size), sum_norm.EMPTY, dtype=torch.int32).share_memory_()


def seen_by(
    rank: int, memory: torch.Tensor, words: int, tries: int
) -> tuple[all_reduce.Peers, sum_norm.RowPlaces]:
    """Returns a rank's `Peers`."""
    starts = torch.tensor([own.data_ptr() for own in memory])
    epochs = torch.zeros(PLACES, dtype=torch.int32)
    control = torch.tensor([0, tries], dtype=torch.int32)
    report = torch.zeros(3, dtype=torch.int32)
    none = torch.zeros(0)
    peers = all_reduce.Peers(rank, len(memory), none, none, none, none, control, report)
    return peers, sum_norm.RowPlaces(starts, epochs, PLACES, words)


def run_rank(rank: int, memory: torch.Tensor, dtype: torch.dtype, out: Any) -> None:
    torch.set_num_threads(1)
    words = WIDTH * dtype.itemsize // 4
    peers, rows = seen_by(rank, memory, words, 1 << 30)
    weight = torch.linspace(0.5, 2, WIDTH).to(dtype)
    found = []
    for mine, residual in parts(len(memory), dtype):
        assert sum_norm.takes(rows, mine[rank], residual, weight)
        both = sum_norm.sum_norm(peers, rows, mine[rank], residual, weight, EPS, 7)
        found.append([each.float().numpy() for each in both])
    out.put((rank, found, peers.report.tolist(), rows.epochs.tolist()))


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (3, torch.float16)]
)
def test_sums_and_their_norms(kernel_device: str, world: int, dtype: torch.dtype) -> None:
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    context = multiprocessing.get_context("fork")
    memory, out = memory_for(world, WIDTH * dtype.itemsize // 4), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, memory, dtype, out), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = {rank: rest for rank, *rest in (out.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(timeout=60)
    weight = torch.linspace(0.5, 2, WIDTH).to(dtype)
    for index, (mine, residual) in enumerate(parts(world, dtype)):
        total = torch.stack([part.float() for part in mine]).sum(0) + residual.float()
        expected = total.to(dtype), reference.rms_norm(total.to(dtype), weight, EPS)
        # The interpreter cuts bits off where a GPU rounds to bf16.
        slack = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-6)
        for rank in range(world):
            for way in range(2):
                got = torch.from_numpy(found[rank][0][index][way])
                torch.testing.assert_close(got, expected[way].float(), rtol=slack, atol=slack)
                assert torch.equal(got, torch.from_numpy(found[0][0][index][way]))
    for rank in range(world):
        assert found[rank][1] == [0, 0, 0]
        assert found[rank][2] == found[0][2]
    assert (memory == sum_norm.EMPTY).all()


def test_waiting_for_a_missing_rank_ends(kernel_device: str) -> None:
    """The wait ends, the report names the missing rank, and later sums do not wait at all."""
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    memory = memory_for(2, WIDTH)
    peers, rows = seen_by(0, memory, WIDTH, tries=3)
    x = torch.ones(1, WIDTH)
    for site in (5, 6):
        sum_norm.sum_norm(peers, rows, x, x, x[0], EPS, site)
        assert peers.report.tolist() == [2, 5, 1]
    assert peers.control[all_reduce.FAILED] == 1


def test_tensors_that_the_kernel_does_not_take() -> None:
    _, rows = seen_by(0, memory_for(2, WIDTH), WIDTH, tries=3)
    x = torch.ones(2, WIDTH)
    assert sum_norm.takes(rows, x, x, x[0])
    assert not sum_norm.takes(rows, x[:, :-1], x[:, :-1], x[0, :-1])
    assert not sum_norm.takes(rows, x, x, x[0].half())
    assert not sum_norm.takes(rows, x.half(), x.half(), x[0].half())
    assert not sum_norm.takes(rows, x, x[:1], x[0])
    assert not sum_norm.takes(rows, x[:0], x[:0], x[0])
