"""Times sums over GPUs in graphs, beside NCCL.

    python bench/kernels/all_reduce.py [--ranks 2] [--width 4096]

The script starts its own ranks. Its tables have µs of:

1. A sum with the residual added, of bf16 rows of the width.
2. A row-parallel product, the sum, the norm and the next product, with sum and norm in two kernels
   and in one.
3. Gathering logits.
4. Sums during products, as in halves of long steps (`--async-tp`). The columns are two products of
   one half, one sum, both in a row, and both at once, by copies (`parallel/exchange.py`) and by
   NCCL.

tests/gpu/test_sums_over_ranks.py compares the sums with sums in fp32.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from quire import ops
from quire.layers.async_tp import HalvesGroup
from quire.parallel.exchange import make_exchange
from quire.parallel.symmetric_memory import (
    ONE_SHOT_WORDS,
    TWO_SHOT_WORDS,
    SymmetricGroup,
    symmetric_group,
)
from quire.parallel.torch_group import TorchGroup, join_group

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def draws(
    rows: int, width: int, dtype: torch.dtype, seed: int, device: torch.device
) -> torch.Tensor:
    make = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, width, generator=make, device=device).to(dtype)


VOCAB = 151936


def time_gather(group: SymmetricGroup, device: torch.device) -> list[str]:
    """Returns lines with the µs to gather logits, by NCCL and by our kernel."""
    plain, lines = TorchGroup(group.handle), []
    for rows in (1, 64, 256):
        x = draws(rows, VOCAB // group.world, torch.bfloat16, rows + group.rank, device)
        times = [
            1e6 * graph_seconds(functools.partial(way.all_gather, x), device, 5)
            for way in (plain, group)
        ]
        lines.append(f"{rows:6}" + "".join(f"{each:12.1f}" for each in times))
    return lines


def layers(
    group: SymmetricGroup, x: torch.Tensor, stream: torch.Tensor,
    pairs: list[tuple[torch.Tensor, torch.Tensor]], scale: ops.RmsScale,
    act: ops.Activation | None, at_once: bool,
) -> None:  # fmt: skip
    """Runs pairs of a row-parallel product of x and a product behind the normed sum."""
    for before, weight in pairs:
        part, behind = ops.linear(x, ops.Weight.plain(before)), ops.Weight.plain(weight)
        if at_once:
            stream, normed = group.normed(part, stream, *scale)
            ops.linear(normed, behind, act=act)
        else:
            stream = group.all_reduce(part, stream, "apart")
            ops.linear(stream, behind, norm=scale, act=act)


def time_normed(
    group: SymmetricGroup, width: int, device: torch.device
) -> dict[tuple[int, str], list[float]]:
    """Returns the µs of each column of the second table, by rows and products."""
    found = {}
    for name, inner, outer, act in (
        ("down, gate_up", 3 * width // 2, 3 * width, "silu_and_mul"),
        ("o, qkv", width // 2, 3 * width // 4, None),
    ):
        # As many as outgrow the L2.
        count = 5 if act else 10
        befores = [draws(width, inner, torch.bfloat16, i, device) / 64 for i in range(count)]
        weights = [draws(outer, width, torch.bfloat16, i, device) / 64 for i in range(count)]
        scale = ops.RmsScale(draws(1, width, torch.bfloat16, 3, device)[0], 1e-6)
        pairs = list(zip(befores, weights, strict=True))
        for rows in (64, 256):
            x = draws(rows, inner, torch.bfloat16, 2, device)
            start = draws(rows, width, torch.bfloat16, 4, device)
            times = []
            for at_once in (False, True):
                work = functools.partial(layers, group, x, start, pairs, scale, act, at_once)
                times.append(1e6 * graph_seconds(work, device, 2) / count)
            found[rows, name] = times
    return found


HALVES = (512, 1024, 2048, 4096)
"""Rows of halves of steps."""


def halves_of(group: SymmetricGroup, width: int, device: torch.device, copies: bool) -> HalvesGroup:
    exchange = make_exchange(group, max(HALVES), width, torch.bfloat16, device) if copies else None
    return HalvesGroup(group, 0, device, exchange)


def time_beside(group: SymmetricGroup, width: int, device: torch.device) -> list[list[float]]:
    """Returns per size of HALVES the µs of each column of the second table."""
    copies, nccl = (halves_of(group, width, device, way) for way in (True, False))
    weight = draws(3 * width, width, torch.bfloat16, 1, device)
    lines = []
    for rows in HALVES:
        x = draws(rows, width, torch.bfloat16, 2, device)
        part, stream = torch.zeros_like(x), torch.zeros_like(x)

        def products(x: torch.Tensor = x) -> None:
            inner = torch.nn.functional.linear(x, weight)
            torch.nn.functional.linear(inner, weight.t())

        def plain(part: torch.Tensor = part, stream: torch.Tensor = stream) -> None:
            group.all_reduce(part, stream, "plain")

        def beside(
            way: HalvesGroup, work: bool, part: torch.Tensor = part, stream: torch.Tensor = stream
        ) -> None:
            # Two of each, as a layer has.
            with way.halves():
                for _ in range(2):
                    way.turn(0)
                    way.all_reduce(part, stream, "beside")
                    way.turn(1)
                    if work:
                        products()

        def in_a_row() -> None:
            plain()
            products()

        ways = (
            products, plain, in_a_row, lambda: beside(copies, False), lambda: beside(copies, True),
            lambda: beside(nccl, True),
        )  # fmt: skip
        times = [1e6 * graph_seconds(way, device) for way in ways]
        lines.append([*times[:3], *(time / 2 for time in times[3:])])
    return lines


def graph_seconds(work: Callable[[], None], device: torch.device, calls: int = 10) -> float:
    """Returns the time of some work within a graph; all ranks call it alike."""
    work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            work()
        graph.capture_end()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / calls)
    return best


def rank_main(rank: int, world: int, width: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    join_group(device, f"file://{folder}/ranks", rank, world, 60.0)
    group = symmetric_group(device, torch.bfloat16, width=width, vocab=VOCAB)
    if not isinstance(group, SymmetricGroup):
        raise SystemExit("no symmetric memory")
    lines = []
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)

    def at_once(x: torch.Tensor, residual: torch.Tensor | None, site: int) -> torch.Tensor:
        return group.normed(x.view(-1, width), x.view(-1, width), weight, 1e-6)[1]

    for rows in ROWS:
        # As many sums on every rank: what is timed depends on no time.
        words = rows * width // 2
        ways = [group.nccl_sum, group.one_shot, group.two_shot, at_once]
        most = (words, ONE_SHOT_WORDS, TWO_SHOT_WORDS, words)
        lines.append([
            group.seconds(way, words, torch.bfloat16) * 1e6 if words <= limit else None
            for way, limit in zip(ways, most, strict=True)
        ])  # fmt: skip
    if rank == 0:
        chosen = [2 * limit // width for limit in group.limits]
        print(f"limits chosen: {chosen} rows; normed at once: {group.normed_rows}")
        print(f"{'rows':>6}{'NCCL':>12}{'one shot':>12}{'two shots':>12}{'normed':>12}   µs")
        for rows, times in zip(ROWS, lines, strict=True):
            cells = ["" if each is None else f"{each:.2f}" for each in times]
            print(f"{rows:6}" + "".join(f"{cell:>12}" for cell in cells))
    normed = time_normed(group, width, device)
    if rank == 0:
        print(f"{'rows':>6}{'products':>16}{'apart':>9}{'at once':>9}   µs")
        for (rows, name), times in normed.items():
            print(f"{rows:6}{name:>16}" + "".join(f"{each:9.1f}" for each in times))
    gathered = time_gather(group, device)
    if rank == 0:
        print(f"{'rows':>6}{'NCCL':>12}{'ours':>12}   µs to gather logits")
        print("\n".join(gathered))
    beside = time_beside(group, width, device)
    if rank == 0:
        columns = ("products", "sum", "in a row", "copies", "beside", "NCCL beside")
        print(f"{'rows':>6}" + "".join(f"{column:>12}" for column in columns) + "   µs")
        for rows, times in zip(HALVES, beside, strict=True):
            print(f"{rows:6}" + "".join(f"{each:12.1f}" for each in times))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            rank_main,
            (arguments.ranks, arguments.width, folder),
            nprocs=arguments.ranks,
        )


if __name__ == "__main__":
    main()
