"""Sums over ranks of one GPU each, against sums in fp32: as calls and as replays of a graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from quire.errors import EngineDeadError
from quire.layers.async_tp import HalvesGroup
from quire.ops.triton.norm import rms_norm
from quire.parallel.exchange import make_exchange
from quire.parallel.symmetric_memory import SymmetricGroup, symmetric_group
from quire.parallel.torch_group import TorchGroup, join_group

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
WIDTH, VOCAB = 4096, 151936
HALF = 1024
"""The most rows of a half of a step."""


def draws(
    rows: int, width: int, dtype: torch.dtype, seed: int, device: torch.device
) -> torch.Tensor:
    make = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=make, device=device).to(dtype)


def check(
    group: SymmetricGroup, width: int, device: torch.device, dtypes: Sequence[torch.dtype]
) -> int:
    """Returns how many sums were wrong."""
    wrong, seed = 0, 0
    for dtype in dtypes:
        for rows in (1, 64, 3, 1, 17, 200, 1, 64, 512, 5):
            seed += 1
            mine = [draws(rows, width, dtype, 100 * seed + r, device) for r in range(group.world)]
            residual = draws(rows, width, dtype, 100 * seed + 99, device) if seed % 2 else None
            total = torch.zeros(rows, width, device=device)
            for part in mine:
                total += part.float()
            if residual is not None:
                total += residual.float()
            expected = total.to(dtype)
            ways = [group.two_shot]
            if rows * width * dtype.itemsize <= 1 << 20:
                ways.append(group.one_shot)
            for way in ways:
                if group.rank == seed % group.world:
                    torch.cuda._sleep(2_000_000)  # a millisecond late
                for _ in range(3):
                    got = way(mine[group.rank], residual, seed)
                    wrong += not torch.equal(got, expected)
    return wrong


def check_graph(group: SymmetricGroup, width: int, device: torch.device) -> int:
    """Returns how many replays of a graph of many sums were wrong."""
    rows = (1, 64, 8, 200, 1, 300)
    inputs = [draws(n, width, torch.bfloat16, n + group.rank, device) for n in rows]
    # The residual stream is the same on every rank.
    streams = [draws(n, width, torch.bfloat16, 1000 + n, device) for n in rows]
    ways = [group.one_shot if n <= 64 else group.two_shot for n in rows]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        outs = [
            way(x, stream, 1)
            for _ in range(6)
            for way, x, stream in zip(ways, inputs, streams, strict=True)
        ]
        graph.capture_end()
    expected = []
    for x, stream in zip(inputs, streams, strict=True):
        parts = x.new_empty(group.world, *x.shape)
        dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
        total = torch.zeros(x.shape, device=device)
        for part in parts:
            total += part.float()
        expected.append((total + stream.float()).to(x.dtype))
    wrong = 0
    for index in range(50):
        if index % 7 == group.rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        wrong += sum(not torch.equal(a, b) for a, b in zip(outs, expected * 6, strict=True))
    return wrong


def check_normed(group: SymmetricGroup, width: int, device: torch.device) -> int:
    """Returns how many sums that are normed at once were wrong, as calls and as replays of a
    graph."""
    rows = (32, 64, 17, 256, 1, 5000, 64)
    weight = draws(1, width, torch.bfloat16, 3, device)[0]
    inputs = [draws(n, width, torch.bfloat16, n + 7 * group.rank, device) for n in rows]
    streams = [draws(n, width, torch.bfloat16, 1000 + n, device) for n in rows]
    totals = [ordered_sum(x, stream) for x, stream in zip(inputs, streams, strict=True)]
    expected = [(total, rms_norm(total, weight, 1e-6)) for total in totals]

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip(inputs, streams, strict=True)
        return [group.normed(x, stream, weight, 1e-6, 3) for x, stream in pairs]

    def count(found: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        wrong = 0
        for got, want in zip(found, expected, strict=True):
            # A sum of squares may be added up in another order.
            off = (got[1].float() - want[1].float()).abs() > 2**-7 * want[1].float().abs()
            wrong += not torch.equal(got[0], want[0]) or bool(off.any())
        return wrong

    wrong = 0
    for index in range(10):
        if index % 3 == group.rank:
            torch.cuda._sleep(2_000_000)
        wrong += count(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        found = [each for _ in range(3) for each in run()][-len(rows) :]
        graph.capture_end()
    for index in range(40):
        if index % 7 == group.rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        wrong += count(found)
    return wrong


def check_gather(group: SymmetricGroup, device: torch.device) -> int:
    """Returns how many matrices of logits were gathered wrong."""
    plain, wrong = TorchGroup(group.handle), 0
    for rows in (1, 64, 256):
        x = draws(rows, VOCAB // group.world, torch.bfloat16, rows + group.rank, device)
        expected = plain.all_gather(x)
        # The next gather must not overwrite the last one before it is read.
        second = draws(rows, x.shape[1], torch.bfloat16, 99 + group.rank, device)
        for index in range(20):
            if index % 3 == group.rank:
                torch.cuda._sleep(1_000_000)
            wrong += not torch.equal(group.all_gather(x), expected)
            first = group.all_gather(second).clone()
            wrong += not torch.equal(first, plain.all_gather(second))
    return wrong


def halves_of(group: SymmetricGroup, width: int, device: torch.device, copies: bool) -> HalvesGroup:
    exchange = make_exchange(group, HALF, width, torch.bfloat16, device) if copies else None
    return HalvesGroup(group, 0, device, exchange)


def sums_in_turns(
    group: HalvesGroup, inputs: list[torch.Tensor], stream: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the sums of the inputs, half by half, with two sums in flight."""
    with group.halves():
        found = []
        for index, x in enumerate(inputs):
            group.turn(index % 2)
            found.append(group.all_reduce(x, stream[: len(x)], "turns"))
    return found


def check_halves(group: SymmetricGroup, width: int, device: torch.device) -> int:
    """Returns how many sums with others in flight were wrong, as calls and as replays."""
    rows = (64, 1024, 200, 64, 1024, 3, 7, 512)
    inputs = [draws(n, width, torch.bfloat16, n + 7 * group.rank, device) for n in rows]
    stream = draws(max(rows), width, torch.bfloat16, 5, device)
    expected = [ordered_sum(x, stream[: len(x)]) for x in inputs]
    # NCCL rounds before the residual is added.
    return sum(
        wrong_in_turns(halves_of(group, width, device, copies), inputs, stream, expected, slack)
        for copies, slack in ((True, 0.0), (False, 0.07))
    )


def wrong_in_turns(
    group: HalvesGroup, inputs: list[torch.Tensor], stream: torch.Tensor,
    expected: list[torch.Tensor], slack: float,
) -> int:  # fmt: skip
    """Returns how many of the sums of `sums_in_turns` are further off than `slack`."""

    def run() -> list[torch.Tensor]:
        # NCCL overwrites what it sums.
        return sums_in_turns(group, [x.clone() for x in inputs], stream)

    def count(found: list[torch.Tensor]) -> int:
        off = [(a.float() - b.float()).abs().max() for a, b in zip(found, expected, strict=True)]
        return sum(float(each) > slack for each in off)

    wrong = 0
    for index in range(10):
        if index % 3 == group.rank:
            torch.cuda._sleep(2_000_000)
        wrong += count(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(stream.device)):
        graph.capture_begin(capture_error_mode="thread_local")
        found = run()
        graph.capture_end()
    for index in range(30):
        if index % 7 == group.rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        wrong += count(found)
    return wrong


def ordered_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all ranks' x in the order of ranks, and the residual, rounded once."""
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
    total = torch.zeros(x.shape, device=x.device)
    for part in parts:
        total += part.float()
    return (total + residual.float()).to(x.dtype)


def check_absence(group: SymmetricGroup, device: torch.device) -> str:
    """Rank 0 sums alone. Returns what its error says, and in how long."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device=device)
    dist.barrier()
    group.started()
    if group.rank:
        time.sleep(8.0)
        return ""
    began = time.monotonic()
    group.all_reduce(x, None, "layers.0.absent")
    group.all_reduce(x, None, "layers.1.absent")
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    try:
        group.check(7)
    except EngineDeadError as error:
        return f"{error}, after {seconds:.2f} s"
    return ""


def run_rank(rank: int, world: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    join_group(device, f"file://{folder}/ranks", rank, world, 60.0)
    group = symmetric_group(device, torch.bfloat16, width=WIDTH, vocab=VOCAB)
    assert isinstance(group, SymmetricGroup)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert check(group, WIDTH, device, dtypes) == 0
    assert check_graph(group, WIDTH, device) == 0
    assert check_normed(group, WIDTH, device) == 0
    assert check_gather(group, device) == 0
    assert check_halves(group, WIDTH, device) == 0
    # Last: the group cannot be used after it.
    report = check_absence(group, device)
    assert report or rank


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_ranks(tmp_path: Path, ranks: int) -> None:
    """Ranks come late, and at last one never comes, which must end in a report."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    multiprocessing.spawn(run_rank, (ranks, str(tmp_path)), nprocs=ranks)
