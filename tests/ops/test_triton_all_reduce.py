"""Sums over ranks by kernels, against the sum in fp32 in the order of ranks.

Every rank is a process in Triton's interpreter, and all map the same memory.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from quire.ops.triton.collectives import all_reduce as kernels
from quire.parallel import exchange

TILES = 4
WIDTH = 64
ROWS = (1, 9, 3, 16, 9, 1, 1)
"""Sums of these sizes, one after the other, over the same tiles."""
SHAPE = {"one_shot": 512, "two_shot": 256}
"""Tiles for the test, so that few rows are several of them."""


def parts(world: int, dtype: torch.dtype) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Returns each rank's part, and the residual, of every sum."""
    make = torch.Generator().manual_seed(world)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=make).to(dtype)

    return [([draw(rows) for _ in range(world)], draw(rows)) for rows in ROWS]


def peers_of(rank: int, world: int, memory: torch.Tensor, tries: int) -> kernels.Peers:
    """Returns a rank's `Peers`.

    Args:
        memory: int32 [world, words], mapped by all ranks.
    """
    each = memory.shape[1] * 4
    one = kernels.one_shot_words(TILES, world) * 8
    two = kernels.two_shot_words(TILES) * 4
    assert each >= one + two + 4 * kernels.flag_words(TILES, world)
    starts = torch.tensor([memory.data_ptr() + peer * each for peer in range(world)])
    return kernels.Peers(
        rank, world, starts, starts + one, starts + one + two,
        epochs=torch.zeros(2 * TILES, dtype=torch.int32),
        control=torch.tensor([0, tries], dtype=torch.int32),
        report=torch.zeros(3, dtype=torch.int32),
    )  # fmt: skip


def memory_for(world: int) -> torch.Tensor:
    words = (
        2 * kernels.one_shot_words(TILES, world)
        + kernels.two_shot_words(TILES)
        + kernels.flag_words(TILES, world)
    )
    return torch.zeros(world, words, dtype=torch.int32).share_memory_()


def run_rank(
    rank: int, world: int, dtype: torch.dtype, memory: torch.Tensor, ways: Any, out: Any
) -> None:
    kernels.ONE_SHOT_TILE, kernels.TWO_SHOT_TILE = SHAPE["one_shot"], SHAPE["two_shot"]
    torch.set_num_threads(1)
    peers = peers_of(rank, world, memory, 1 << 30)
    found = []
    for index, (mine, residual) in enumerate(parts(world, dtype)):
        stream = residual if index % 2 else None
        for way in ways:
            if way == "one_shot":
                got = kernels.one_shot(peers, mine[rank], stream, 7)
            else:
                got = kernels.two_shot(peers, mine[rank], stream, 7, TILES)
            found.append(got.float().numpy())
    out.put((rank, found, peers.report.tolist(), peers.epochs.tolist()))


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (4, torch.float16)]
)
def test_sums_over_ranks(monkeypatch: pytest.MonkeyPatch, world: int, dtype: torch.dtype) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    monkeypatch.setattr(kernels, "ONE_SHOT_TILE", SHAPE["one_shot"])
    monkeypatch.setattr(kernels, "TWO_SHOT_TILE", SHAPE["two_shot"])
    context = multiprocessing.get_context("fork")
    memory, out = memory_for(world), context.Queue()
    ways = ("one_shot", "two_shot")
    ranks = [
        context.Process(target=run_rank, args=(rank, world, dtype, memory, ways, out), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = {rank: rest for rank, *rest in (out.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(timeout=60)
    for index, (mine, residual) in enumerate(parts(world, dtype)):
        total = torch.zeros(ROWS[index], WIDTH)
        for part in mine:
            total += part.float()
        if index % 2:
            total += residual.float()
        expected = total.to(dtype).float()
        for rank in range(world):
            for way in range(2):
                got = torch.from_numpy(found[rank][0][2 * index + way])
                # The interpreter cuts bits off where a GPU rounds to bf16.
                slack = 2**-7 if dtype == torch.bfloat16 else 0.0
                torch.testing.assert_close(got, expected, rtol=slack, atol=slack)
                assert torch.equal(got, torch.from_numpy(found[0][0][2 * index]))
    for rank in range(world):
        assert found[rank][1] == [0, 0, 0]
        assert found[rank][2] == found[0][2]


class _Exchanging:
    """Has the attributes that an exchange reads from a rank's group."""

    def __init__(self, peers: kernels.Peers) -> None:
        self.rank, self.world, self.peers = peers.rank, peers.world, peers

    def site(self, name: str) -> int:
        return len(name)


def exchange_of_rank(
    rank: int, memory: Sequence[torch.Tensor], most: int, tries: int = 1 << 30
) -> exchange.Exchange:
    world = len(memory)
    peers = peers_of(rank, world, memory_for(world), tries)
    storages = [each.untyped_storage() for each in memory]
    return exchange.Exchange(cast(Any, _Exchanging(peers)), storages, most)


def exchange_memory(world: int, most: int) -> list[torch.Tensor]:
    size = exchange.exchange_bytes(most, world)
    return [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world)]


def run_exchange(rank: int, memory: Sequence[torch.Tensor], dtype: torch.dtype, out: Any) -> None:
    """Sums of two halves alternate: each is collected after the next one is sent."""
    kernels.COLLECT_TILE = 128
    torch.set_num_threads(1)
    world, most = len(memory), max(ROWS) * WIDTH
    own, waiting, found = exchange_of_rank(rank, memory, most), [], []
    for index, (mine, residual) in enumerate(parts(world, dtype)):
        x, result = mine[rank], torch.empty_like(mine[rank])
        stream = residual if index % 2 else None
        assert own.takes(x, stream)
        slot = index % 2 * 2 + index // 2 % 2
        own.send(slot, x)
        waiting.append((slot, x, stream, result, "a layer"))
        found.append(result)
        if len(waiting) == 2:
            own.collect(*waiting.pop(0))
    own.collect(*waiting.pop())
    out.put((rank, [result.float().numpy() for result in found]))


@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.bfloat16), (2, torch.float32), (3, torch.float32)]
)
def test_sums_by_exchange(kernel_device: str, world: int, dtype: torch.dtype) -> None:
    """There are more sums than an exchange has buffers, with different sizes."""
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    context = multiprocessing.get_context("fork")
    memory, out = exchange_memory(world, max(ROWS) * WIDTH), context.Queue()
    ranks = [
        context.Process(target=run_exchange, args=(rank, memory, dtype, out), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = dict(out.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    assert len(ROWS) > exchange.SLOTS
    for index, (mine, residual) in enumerate(parts(world, dtype)):
        total = torch.stack([part.float() for part in mine]).sum(0)
        expected = (total + residual.float() if index % 2 else total).to(dtype).float()
        for rank in range(world):
            got = torch.from_numpy(found[rank][index])
            slack = 2**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(got, expected, rtol=slack, atol=slack)
            assert torch.equal(got, torch.from_numpy(found[0][index]))


def test_a_part_that_never_comes(kernel_device: str) -> None:
    """The report names the rank and the sum."""
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    own = exchange_of_rank(1, exchange_memory(2, 128), 128, tries=3)
    x = torch.ones(2, WIDTH)
    assert not own.takes(torch.ones(3, WIDTH), None)
    own.send(0, x)
    own.collect(0, x, None, torch.empty_like(x), "here")
    assert cast(Any, own)._group.peers.report.tolist() == [1, 4, 1]


@pytest.mark.parametrize("way", ["one_shot", "two_shot"])
def test_waiting_for_a_missing_rank_ends(way: str, kernel_device: str) -> None:
    """The wait ends, the report names the missing rank, and later sums do not wait at all."""
    if kernel_device != "cpu":
        pytest.skip("ranks of one GPU each: tests/gpu/test_sums_over_ranks.py")
    memory = memory_for(2)
    peers = peers_of(0, 2, memory, tries=3)
    x = torch.ones(2, WIDTH)
    for site in (5, 6):
        if way == "one_shot":
            kernels.one_shot(peers, x, None, site)
        else:
            kernels.two_shot(peers, x, None, site, TILES)
        assert peers.report.tolist() == [2, 5, 1]
    assert peers.control[kernels.FAILED] == 1


def test_tensors_that_kernels_do_not_take() -> None:
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert kernels.words_of(x) == 12
    assert kernels.words_of(x.double()) is None
    assert kernels.words_of(x[:, :4]) is None
    assert kernels.words_of(x[:1, :5]) is None
    assert kernels.words_of(x.view(-1)[1:5]) is None
