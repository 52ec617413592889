"""Asks whether one persistent program per multiprocessor can stream a small model's layers.

    PYTHONPATH=src python bench/kernels/streaming_gates.py --out FILE.jsonl [--only TEXT]

Three gates, for Qwen3-0.6B in bf16 with one row. 128 programs run at once, one a multiprocessor.

a. **Exchange**: 200 exchanges in a chain, each of 1024 words of payload and epoch, through L2.
   Every program sends 8 words and reads all. The limit is 1.2 µs an exchange.
b. **Stream**: one warp of each program copies the weights of 28 layers (881 MB) by TMA to a ring in
   shared memory. The other warps only release the boxes. The limit is 90 % of 4.25 TB/s on an H200,
   and 90 % of the measured copy ceiling on another card.
c. **Both**: six such exchanges a layer, with the boxes of a product behind its exchange. The limit
   is 11 µs a layer on an H200. For another card the record also has `scaled_us`, in which the time
   of the bytes at its own ceiling is replaced by their time at 4.25 TB/s. The variant "as many
   bytes as time" measures the same on an H100: its boxes take as long as all boxes at 4.25 TB/s.

A gate's result is its best variant. Variants that are marked as extra ask something else and count
for no gate: `VARIANTS` says what. Each variant has its own process, which compiles beside others
and measures alone. A failure is recorded and ends only its variant. Every wait for words has a
limit, and the host ends a process that measures for more than 25 s. Times are medians of
100 launches by CUDA events, the launch included. The states of all programs are compared with
`streaming_schedule.final_states`, and the boxes that a variant reads with their sum.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from shapes import QWEN3_0_6B
from streaming_schedule import (
    BOX_BYTES,
    LINES,
    ROWS,
    Boxes,
    Exchange,
    Schedule,
    boxes_of,
    final_states,
    layer_exchanges,
    model_exchanges,
)

from quire.tools.bench.record import BenchRecord, append_jsonl, make_record

PROGRAMS = 128
CHAIN = 200
H200_TB_S = 4.25
EXCHANGE_US, STREAM_SHARE, LAYER_US = 1.2, 0.9, 11.0
"""The limits of the gates."""
WARM_LAUNCHES, LAUNCHES = 100, 100
PREPARE_S, MEASURE_S = 60.0, 25.0
"""The longest time that a variant may take to compile, and to measure."""
RELAXED, VOLATILE, ACQUIRE = (
    f"ld.{kind}.global" for kind in ("relaxed.gpu", "volatile", "acquire.gpu")
)
LAYER_BYTES = sum(2 * n * k for n, k in QWEN3_0_6B.projections.values())


# -- variants ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to measure a gate.

    Attributes:
        gate: `ceiling`, `a`, `b` or `c`.
        extra: the variant does not count for the gate.
        warps: warps that exchange words and release boxes.
        bits: bits of a word; half of them are its epoch.
        way: see `streaming_kernels.exchange`.
        load: the instruction that polls.
        copies: copies of the words. Programs read different ones.
        form: see `streaming_schedule.boxes_of`.
        box: bytes of a box.
        ring: bytes of the ring, which are the most in flight.
        swizzle: bytes of the swizzle of boxes in shared memory.
        reads: the warps read the boxes from shared memory, and sum them up.
        own_words: exchange the words of the model instead of six times 1024.
        short: copy fewer bytes, so that the card takes as long for them as an H200 for all.
        programs: number of programs.
    """

    name: str
    gate: str
    extra: bool = False
    warps: int = 8
    bits: int = 64
    way: str = "thread"
    load: str = RELAXED
    copies: int = 1
    form: str = LINES
    box: int = BOX_BYTES
    ring: int = 13 * BOX_BYTES
    swizzle: int = 128
    reads: bool = False
    own_words: bool = False
    short: bool = False
    programs: int = PROGRAMS

    @property
    def stages(self) -> int:
        return self.ring // self.box


def _variants() -> list[Variant]:
    a, b, c = (Variant("", gate) for gate in "abc")
    halves, copies = {"bits": 32}, {"copies": 4}
    return [
        Variant("copy of 2 GB by torch", "ceiling"),
        replace(a, name="threads poll"),
        replace(a, name="threads poll, 1 warp", warps=1),
        replace(a, name="threads poll, 4 warps", warps=4),
        replace(a, name="threads poll, 16 warps", warps=16),
        replace(a, name="threads poll, volatile", load=VOLATILE),
        replace(a, name="threads poll, 4 copies", copies=4),
        replace(a, name="threads poll, words of 32 bits", bits=32),
        replace(a, name="threads poll, words of 32 bits, 4 copies", bits=32, copies=4),
        replace(a, name="program polls", way="program"),
        replace(a, name="a flag per program", way="flags", load=ACQUIRE),
        replace(a, name="a counter of arrivals", way="counter"),
        replace(b, name="lines of 16 KB, 13 stages"),
        replace(b, name="lines of 16 KB, 8 stages", ring=8 * BOX_BYTES),
        replace(b, name="lines of 16 KB, 4 stages", ring=4 * BOX_BYTES),
        replace(b, name="lines of 8 KB, 26 stages", box=8192),
        replace(b, name="8 rows x 1024, 13 stages", form=ROWS),
        replace(b, name="8 rows x 1024, no swizzle", form=ROWS, swizzle=0),
        replace(b, name="132 programs", programs=132, extra=True),
        replace(b, name="reads boxes", reads=True, extra=True),
        replace(c, name="threads poll"),
        replace(c, name="words of 32 bits", **halves),
        replace(c, name="4 copies", **copies),
        replace(c, name="words of 32 bits, 4 copies", **halves, **copies),
        replace(c, name="4 warps", warps=4),
        replace(c, name="boxes of 8 KB", box=8192),
        replace(c, name="8 rows x 1024", form=ROWS),
        replace(c, name="a flag per program", way="flags", load=ACQUIRE),
        replace(c, name="reads boxes", reads=True, extra=True),
        replace(c, name="words of the model", own_words=True, extra=True),
        replace(c, name="words of the model, reads boxes", own_words=True, reads=True, extra=True),
        replace(c, name="as many bytes as time", short=True, extra=True),
    ]  # fmt: skip


VARIANTS = {f"{variant.gate}: {variant.name}": variant for variant in _variants()}
EQUAL_TIME = "c: as many bytes as time"
SHORT_BOXES = (3, 1, 4, 3)
"""Boxes of qkv, o, gate_up and down in `short`, instead of 4, 2, 6 and 3: 73 % of the bytes. A copy
on an H100 runs at about 71 % of 4.25 TB/s."""


@dataclass(frozen=True)
class Work:
    """The exchanges and copies of a variant.

    Attributes:
        schedule: exchanges, and the number of boxes behind each.
        kinds: the boxes of each kind of weights.
    """

    schedule: Schedule
    kinds: tuple[Boxes, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that all programs copy in a launch."""
        program = sum(kind.count * kind.box[0] * kind.box[1] * 4 for kind in self.kinds)
        return program * self.schedule.programs * self.schedule.layers


def work_of(variant: Variant, layers: int | None = None) -> Work:
    """Returns the work of a variant.

    Args:
        layers: layers of the model, or exchanges of the chain, if not as many as the gate asks for.
    """
    if variant.gate == "a":
        return Work(Schedule(variant.programs, layers or CHAIN, (Exchange(1024, 1024),)))
    layers = layers or QWEN3_0_6B.layers
    if variant.programs != PROGRAMS:
        # The rows of a layer do not divide by this number: one kind has all weights, and a layer
        # is a box of each program.
        lines = variant.box // 128
        count = layers * LAYER_BYTES // (variant.programs * variant.box)
        return Work(
            Schedule(variant.programs, count, (Exchange(0, 0, 1),)),
            (Boxes(lines, 32, (lines, 32)),),
        )
    kinds = boxes_of(QWEN3_0_6B, variant.programs, variant.form, variant.box)
    if variant.short:
        kinds = tuple(
            replace(kind, rows=count * kind.box[0])
            for kind, count in zip(kinds, SHORT_BOXES, strict=True)
        )
    if variant.gate == "b":
        exchanges: tuple[Exchange, ...] = (Exchange(0, 0, sum(kind.count for kind in kinds)),)
    else:
        exchanges = (model_exchanges if variant.own_words else layer_exchanges)(kinds)
    return Work(Schedule(variant.programs, layers, exchanges), kinds)


# -- one variant, in a process of its own ------------------------------------------------------


@dataclass
class Launch:
    """The launch of a variant's kernel.

    Attributes:
        run: launches the kernel behind some number of epochs.
        compile: compiles the kernel.
        weights: int32, all weights.
        error: int32 [1], 0 until a wait fails.
        out: int32 [programs, 3], see the kernels.
    """

    run: Callable[[int], object]
    compile: Callable[[], object]
    weights: Any
    error: Any
    out: Any = field(repr=False)


def launch_of(variant: Variant, work: Work, device: str = "cuda") -> Launch:
    """Allocates a variant's tensors. Its weights are not yet set."""
    # PyTorch and Triton are imported here because the parent process starts without them.
    import torch
    from streaming_kernels import exchange_words, stream_layers
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def zeros(*size: int, bits: int = 32) -> Any:
        dtype = torch.int32 if bits == 32 else torch.int64
        return torch.zeros(size, dtype=dtype, device=device)

    plan = work.schedule
    words = zeros(max(1, 2 * plan.layer_words * variant.copies), bits=variant.bits)
    error, out = zeros(1), zeros(plan.programs, 3)
    weights = torch.empty(work.bytes // 4, dtype=torch.int32, device=device)
    shared = (words, zeros(2 * plan.programs, bits=64), error, out)
    named = {
        "SCHEDULE": plan.text, "PROGRAMS": plan.programs, "BITS": variant.bits,
        "WAY": variant.way, "LOAD": variant.load, "COPIES": variant.copies,
        "num_warps": variant.warps, "launch_cooperative_grid": True,
    }  # fmt: skip
    kernel: Any = exchange_words
    descs: list[Any] = []
    if work.kinds:
        kernel, first = stream_layers, 0
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=variant.swizzle, element_bitwidth=32, rank=2
        )
        for kind in work.kinds:
            rows = plan.layers * plan.programs * kind.rows
            own = weights[first : first + rows * kind.columns].view(rows, kind.columns)
            first += own.numel()
            descs.append(
                TensorDescriptor(own, list(own.shape), list(own.stride()), list(kind.box), layout)
            )
        descs += descs[:1] * (4 - len(descs))
        named |= {
            "BOXES": " ".join(kind.text for kind in work.kinds), "STAGES": variant.stages,
            "DOWN": work.kinds[0].box[0], "ACROSS": work.kinds[0].box[1],
            "READS": variant.reads, "SWIZZLE": variant.swizzle, "WARPS": variant.warps,
        }  # fmt: skip
    grid = (plan.programs,)
    return Launch(
        run=lambda base: kernel[grid](*descs, *shared, base, plan.layers, **named),
        compile=lambda: kernel.warmup(*descs, *shared, 0, plan.layers, grid=grid, **named),
        weights=weights, error=error, out=out,
    )  # fmt: skip


def check(variant: Variant, work: Work, launch: Launch) -> None:
    """Compares the results of a launch."""
    failed = int(launch.error.item())
    if failed:
        raise RuntimeError(f"a wait for epoch {failed} exceeded its limit of polls")
    found = launch.out.cpu().numpy()
    wrong = np.flatnonzero(found[:, 0].view(np.uint32) != final_states(work.schedule))
    if len(wrong):
        raise RuntimeError(f"wrong states of {len(wrong)} programs, first of {wrong[0]}")
    if variant.reads:
        expected, own = int(launch.weights.sum()) % 2**32, int(found[:, 2].sum()) % 2**32
        if expected != own:
            raise RuntimeError(f"the sum of all boxes is {own}, not {expected}")


def measure(variant: Variant, work: Work, launch: Launch) -> dict[str, float]:
    """Returns the times of launches in µs: `us`, the median, with `least_us` and `most_us`."""
    import torch

    launch.weights.random_(-(2**31), 2**31 - 1)
    times, epochs = [], work.schedule.epochs
    for index in range(WARM_LAUNCHES + LAUNCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch.run(index * epochs)
        end.record()
        times.append((start, end))
        if index == 0:
            check(variant, work, launch)
    torch.cuda.synchronize()
    check(variant, work, launch)
    found = sorted(1e3 * start.elapsed_time(end) for start, end in times[WARM_LAUNCHES:])
    return {
        "us": statistics.median(found),
        "least_us": found[0],
        "most_us": found[-1],
        "multiprocessors": len(set(launch.out[:, 1].tolist())),
    }


def metrics_of(variant: Variant, work: Work, times: dict[str, float]) -> dict[str, float]:
    plan = work.schedule
    if variant.gate == "a":
        return {"exchange_us": times["us"] / plan.layers, **times}
    rate = work.bytes / times["us"] / 1e6
    if variant.gate == "b":
        return {"tb_s": rate, "bytes": work.bytes, **times}
    return {
        "layer_us": times["us"] / plan.layers, "tb_s": rate,
        "layer_bytes": work.bytes / plan.layers, **times,
    }  # fmt: skip


def copy_ceiling() -> dict[str, float]:
    """Returns the rate of a copy of 2 GB, which are read and written."""
    import torch

    source = torch.empty(2**29, dtype=torch.int32, device="cuda").random_()
    target, times = torch.empty_like(source), []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    us = statistics.median(times[3:])
    return {"tb_s": 2 * source.nbytes / us / 1e6, "us": us}


def run_variant(name: str) -> None:
    """Prepares a variant, prints `ready`, waits for a line and prints the record."""
    import torch

    variant = VARIANTS[name]
    work = None if variant.gate == "ceiling" else work_of(variant)
    torch.cuda.init()
    if work is not None:
        # Tensors of the CPU, because another variant measures on the GPU at this time.
        launch_of(variant, work, "cpu").compile()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    if work is None:
        metrics = copy_ceiling()
    else:
        metrics = metrics_of(variant, work, measure(variant, work, launch_of(variant, work)))
    record = make_record(
        name, metrics, model=QWEN3_0_6B.name, device="cuda", settings=settings_of(variant)
    )
    print(json.dumps(record_fields(record)), flush=True)


def settings_of(variant: Variant) -> dict[str, Any]:
    """Returns the fields of a variant that differ from their defaults."""
    plain = Variant(variant.name, variant.gate)
    return {
        name: value
        for name in Variant.__dataclass_fields__
        if (value := getattr(variant, name)) != getattr(plain, name)
    }


def record_fields(record: BenchRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


# -- all variants ------------------------------------------------------------------------------


class Process:
    """The process of a variant. Its output is read by a thread, because a read has no limit."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = [sys.executable, __file__, "--variant", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._add(line)
        self._add(None)

    def _add(self, line: str | None) -> None:
        with self._news:
            if line is None:
                self._ended = True
            else:
                self._lines.append(line.rstrip("\n"))
            self._news.notify_all()

    def _await(self, found: Callable[[], bool], seconds: float, what: str) -> None:
        with self._news:
            self._news.wait_for(lambda: found() or self._ended, seconds)
            if not found():
                why = f"took more than {seconds:.0f} s" if not self._ended else "failed"
                raise RuntimeError(f"{what} {why}: {' | '.join(self._lines[-4:])[-600:]}")

    def await_ready(self, seconds: float) -> None:
        self._await(lambda: "ready" in self._lines, seconds, "preparing")

    def measure(self, seconds: float) -> BenchRecord:
        """Lets the process measure, and returns its record."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._await(lambda: any(map(is_record, self._lines)), seconds, "measuring")
        return BenchRecord(**json.loads(next(filter(is_record, self._lines))))

    def end(self) -> None:
        self._process.kill()
        # A process whose kernel does not end may take long to be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def is_record(line: str) -> bool:
    return line.startswith('{"case"')


def run_all(names: list[str], seconds: float, beside: int) -> list[BenchRecord]:
    """Runs variants in turn. `beside` processes prepare at a time."""
    began, waiting = time.monotonic(), list(names)
    running: list[Process] = []
    records = []
    while waiting or running:
        while waiting and len(running) < beside:
            running.append(Process(waiting.pop(0)))
        process = running.pop(0)
        left = seconds - (time.monotonic() - began)
        try:
            if left <= 0:
                raise RuntimeError(f"no time was left of --seconds {seconds:.0f}")
            process.await_ready(min(PREPARE_S, left))
            record = process.measure(MEASURE_S)
        except (RuntimeError, OSError) as error:
            record = make_record(
                process.name, {}, model=QWEN3_0_6B.name, settings={"failure": str(error)}
            )
        process.end()
        records.append(record)
        print(line_of(record), flush=True)
    return records


def names_in_turn(text: str) -> list[str]:
    """Returns the ceiling and the variants with a text in their name. The gates take turns, so that
    all have results if time runs out."""
    places: dict[str, int] = {}
    of_gate: dict[str, int] = {}
    for name, variant in VARIANTS.items():
        places[name] = of_gate[variant.gate] = of_gate.get(variant.gate, -1) + 1
    found = [name for name, own in VARIANTS.items() if text in name or own.gate == "ceiling"]
    return sorted(found, key=lambda name: (VARIANTS[name].gate != "ceiling", places[name]))


def line_of(record: BenchRecord) -> str:
    if "failure" in record.settings:
        return f"{record.case:<48} FAILED {record.settings['failure']}"
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
    return f"{record.case:<48} {numbers}"


def add_scaled(records: list[BenchRecord], ceiling: float | None) -> None:
    """Adds `ceiling_share` to the records of (b), and `scaled_us` to those of (c)."""
    if ceiling is None:
        return
    for record in records:
        metrics = record.metrics
        if record.case.startswith("b:") and metrics:
            metrics["ceiling_share"] = metrics["tb_s"] / ceiling
        elif record.case.startswith("c:") and metrics:
            size = metrics["layer_bytes"] / 1e6
            metrics["scaled_us"] = metrics["layer_us"] - size / ceiling + size / H200_TB_S


def gates(records: list[BenchRecord], card: str, ceiling: float | None) -> list[BenchRecord]:
    """Returns a record for each gate: its best variant, its limit and whether it holds."""
    own = H200_TB_S if "H200" in card or ceiling is None else ceiling
    judged = (
        ("a", "exchange_us", EXCHANGE_US, min),
        ("b", "tb_s", STREAM_SHARE * own, max),
        ("c", "layer_us", LAYER_US, min),
    )
    found = []
    for gate, metric, limit, best_of in judged:
        counted = [
            record
            for record in records
            if record.case.startswith(f"{gate}:")
            and metric in record.metrics
            and not VARIANTS[record.case].extra
        ]
        if not counted:
            continue
        best = best_of(counted, key=lambda record: record.metrics[metric])
        value = best.metrics[metric]
        metrics = {metric: value, "limit": limit, "holds": float(best_of(value, limit) == value)}
        if "scaled_us" in best.metrics:
            scaled = best.metrics["scaled_us"]
            metrics |= {"scaled_us": scaled, "scaled_holds": float(scaled <= limit)}
            short = next((record for record in records if record.case == EQUAL_TIME), None)
            if short is not None and short.metrics:
                metrics["equal_time_us"] = short.metrics["layer_us"]
        settings = {"variant": VARIANTS[best.case].name, "failed": failures(records, gate)}
        fields = record_fields(best) | {
            "case": f"gate {gate}", "metrics": metrics, "settings": settings
        }  # fmt: skip
        found.append(BenchRecord(**fields))
    return found


def failures(records: list[BenchRecord], gate: str) -> int:
    """Returns the number of a gate's variants without a result."""
    return sum(record.case.startswith(f"{gate}:") and not record.metrics for record in records)


def table(records: list[BenchRecord], gate_records: list[BenchRecord]) -> str:
    """Returns a row per variant, best first within a gate, and the gates."""
    lines = [f"{'':48} {'µs':>8} {'TB/s':>6} {'share':>6} {'scaled':>7}"]
    for gate, metric in (("a", "exchange_us"), ("b", "us"), ("c", "layer_us")):
        own = [record for record in records if record.case.startswith(f"{gate}:")]
        for record in sorted(own, key=lambda record: record.metrics.get(metric, 1e9)):
            extra = " (extra)" if VARIANTS[record.case].extra else ""
            metrics = record.metrics
            cells = [
                f"{metrics[name]:>{width}.{digits}f}" if name in metrics else " " * width
                for name, width, digits in (
                    (metric, 8, 3), ("tb_s", 6, 2), ("ceiling_share", 6, 3), ("scaled_us", 7, 2)
                )
            ]  # fmt: skip
            cells = cells if metrics else ["failed"]
            lines.append(f"{record.case + extra:<48} {' '.join(cells)}")
    for record in gate_records:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in record.metrics.items())
        lines.append(f"{record.case}: {record.settings['variant']}: {numbers}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the records, which are appended")
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin none after this time")
    parser.add_argument("--beside", type=int, default=8, help="processes that prepare at a time")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        run_variant(options.variant)
        return 0
    records = run_all(names_in_turn(options.only), options.seconds, options.beside)
    card = next((record.card for record in records if record.metrics), "")
    for record in records:
        record.card = card  # The parent does not know the card of a variant that failed.
    ceiling = records[0].metrics.get("tb_s")
    add_scaled(records, ceiling)
    judged = gates(records, card, ceiling)
    if options.out:
        append_jsonl(options.out, [*records, *judged])
    print(table(records, judged))
    return 0 if len(judged) == 3 else 1


if __name__ == "__main__":
    sys.exit(main())
