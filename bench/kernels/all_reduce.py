"""Sums over GPUs: checks our kernels against sums in fp32, then times them beside NCCL in graphs.

    python bench/kernels/all_reduce.py [--ranks 2] [--width 4096]

The script starts its own ranks. Every rank must get the same bits, at sizes that vary from sum to
sum, in calls and in replays of a graph, and with ranks that come late. A rank that never comes must
end in a report. All tables have µs, and their results are checked too.

1. A sum with the residual added, of bf16 rows of the width.
2. A row-parallel product, the sum, the norm and the next product, with sum and norm in two kernels
   and in one.
3. Gathering logits.
4. Sums during products, as in halves of long steps (`--async-tp`). The columns are two products of
   one half, one sum, both in a row, and both at once, by copies (`parallel/exchange.py`) and by
   NCCL.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from quire import ops  # noqa: E402
from quire.errors import EngineDeadError  # noqa: E402
from quire.layers.async_tp import HalvesGroup  # noqa: E402
from quire.ops.triton.norm import rms_norm  # noqa: E402
from quire.parallel.exchange import make_exchange  # noqa: E402
from quire.parallel.symmetric_memory import (  # noqa: E402
    ONE_SHOT_WORDS,
    TWO_SHOT_WORDS,
    SymmetricGroup,
    symmetric_group,
)
from quire.parallel.torch_group import TorchGroup, join_group  # noqa: E402

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


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
                    if not torch.equal(got, expected):
                        wrong += 1
                        off = (got.float() - expected.float()).abs().max().item()
                        print(f"rank {group.rank}: {way.__name__} of {rows} rows in {dtype}: "
                              f"off by {off:.3g}", flush=True)  # fmt: skip
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
    print(f"rank {group.rank}: sums normed at once: {wrong} wrong", flush=True)
    return wrong


VOCAB = 151936


def check_gather(group: SymmetricGroup, device: torch.device) -> tuple[int, list[str]]:
    """Returns how many matrices of logits were gathered wrong, and lines of times beside NCCL's."""
    plain, wrong, lines = TorchGroup(group.handle), 0, []
    for rows in (1, 64, 256):
        x = draws(rows, VOCAB // group.world, torch.bfloat16, rows + group.rank, device)
        expected = plain.all_gather(x)
        # What is read of the last one must not be overwritten.
        second = draws(rows, x.shape[1], torch.bfloat16, 99 + group.rank, device)
        for index in range(20):
            if index % 3 == group.rank:
                torch.cuda._sleep(1_000_000)
            wrong += not torch.equal(group.all_gather(x), expected)
            first = group.all_gather(second).clone()
            wrong += not torch.equal(first, plain.all_gather(second))
        times = [
            1e6 * graph_seconds(functools.partial(way.all_gather, x), device, 5)
            for way in (plain, group)
        ]
        lines.append(f"{rows:6}" + "".join(f"{each:12.1f}" for each in times))
    print(f"rank {group.rank}: logits gathered: {wrong} wrong", flush=True)
    return wrong, lines


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
    """Returns how many sums beside others were wrong, as calls and as replays."""
    rows = (64, 1024, 200, 64, 1024, 3, 7, 512)
    inputs = [draws(n, width, torch.bfloat16, n + 7 * group.rank, device) for n in rows]
    stream = draws(max(rows), width, torch.bfloat16, 5, device)
    expected = [ordered_sum(x, stream[: len(x)]) for x in inputs]
    # NCCL rounds before the residual is added.
    return sum(
        wrong_in_turns(halves_of(group, width, device, copies), inputs, stream, expected, slack)
        for copies, slack in ((True, 0.0), (False, 0.07))
    )


def ordered_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all ranks' x in the order of ranks, and the residual, rounded once."""
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.view(-1))
    total = torch.zeros(x.shape, device=x.device)
    for part in parts:
        total += part.float()
    return (total + residual.float()).to(x.dtype)


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
    way = "NCCL" if group.exchange is None else "copies"
    print(f"rank {group.rank}: sums beside others by {way}: {wrong} wrong", flush=True)
    return wrong


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


def rank_main(rank: int, world: int, width: int, quick: bool, folder: str) -> None:
    device = torch.device("cuda", rank)
    join_group(device, f"file://{folder}/ranks", rank, world, 60.0)
    group = symmetric_group(device, torch.bfloat16, width=width, vocab=VOCAB)
    if not isinstance(group, SymmetricGroup):
        raise SystemExit("no symmetric memory")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    wrong = check(group, width, device, dtypes[: 1 if quick else 3])
    wrong += check_graph(group, width, device)
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
    wrong += check_normed(group, width, device)
    wrong += 0 if quick else check_halves(group, width, device)
    normed = time_normed(group, width, device)
    if rank == 0:
        print(f"{'rows':>6}{'products':>16}{'apart':>9}{'at once':>9}   µs")
        for (rows, name), times in normed.items():
            print(f"{rows:6}{name:>16}" + "".join(f"{each:9.1f}" for each in times))
    gathered, times_of_gather = check_gather(group, device)
    wrong += gathered
    if rank == 0:
        print(f"{'rows':>6}{'NCCL':>12}{'ours':>12}   µs to gather logits")
        print("\n".join(times_of_gather))
    beside = [] if quick else time_beside(group, width, device)
    if rank == 0:
        columns = ("products", "sum", "in a row", "copies", "beside", "NCCL beside")
        print(f"{'rows':>6}" + "".join(f"{column:>12}" for column in columns) + "   µs")
        for rows, times in zip(HALVES, beside, strict=False):
            print(f"{rows:6}" + "".join(f"{each:12.1f}" for each in times))
    told = "left out" if quick else check_absence(group, device)
    if rank == 0:
        print(f"{wrong} sums wrong on rank 0; a rank that never came: {told or 'NOT NOTICED'}")
    if wrong or (rank == 0 and not told):
        raise SystemExit(1)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument(
        "--quick", action="store_true", help="bf16 alone, and no sums beside products"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(
            rank_main,
            (arguments.ranks, arguments.width, arguments.quick, folder),
            nprocs=arguments.ranks,
        )


if __name__ == "__main__":
    main()
