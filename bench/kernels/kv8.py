"""8-bit KV beside bf16 on this GPU: every kernel against its float64 twin, then times.

    PYTHONPATH=src python bench/kernels/kv8.py --results DIR [--seconds 180] [--only TEXT]

Times decode attention over contexts of equal length, with the tiles that could be chosen, then
prefill and the store. Prints a table at the end and appends records to DIR/kv8.jsonl. A failing
check or configuration is reported, not fatal; what does not fit the time is skipped and named.
--only: checks and timings whose name has this in it.
Without a GPU it only checks, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from attention_cases import Batch, name
from kv8_cases import AUTO, FORMATS, Store, checks
from session import Session, only
from shapes import QWEN3_0_6B, QWEN3_8B, QWEN25_1_5B, Shape
from timing import DEVICE, copies_beyond_l2, graph_us

from quire.ops import KVFormat
from quire.ops.triton.attention.attention import AttentionTuning, Tiles
from quire.ops.triton.launch import compiling
from quire.tools.bench.record import BenchRecord, append_jsonl, make_record

BF16 = KVFormat(torch.bfloat16)
DECODE = (
    Tiles(16, 64, 4, 2),
    Tiles(16, 64, 4, 3),
    Tiles(16, 64, 4, 4),
    Tiles(16, 128, 4, 2),
    Tiles(16, 128, 4, 3),
    Tiles(16, 128, 4, 3, 168),
)
PREFILL = (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2))
CELLS = [
    *((QWEN25_1_5B, 256, context) for context in (2048, 8192)),
    *((QWEN3_0_6B, 256, context) for context in (2048, 8192)),
    (QWEN3_8B, 256, 2048),
    *((shape, 256, 1024) for shape in (QWEN25_1_5B, QWEN3_0_6B, QWEN3_8B)),
    *((shape, 256, 4096) for shape in (QWEN25_1_5B, QWEN3_0_6B, QWEN3_8B)),
    (QWEN3_8B, 256, 8192),
    *((shape, rows, 4096) for rows in (64, 1) for shape in (QWEN25_1_5B, QWEN3_0_6B, QWEN3_8B)),
]


# -- checks --------------------------------------------------------------------------------------


def run_checks(session: Session, text: str, until: float) -> None:
    if DEVICE == "cuda":
        with compiling(os.cpu_count() or 4):
            for _, check in only(text, checks()):
                with contextlib.suppress(Exception):  # it is told when it runs
                    check()
        print(f"checks compiled after {session.seconds:.0f} s", flush=True)
    session.check(only(text, checks()), until)


# -- times ---------------------------------------------------------------------------------------


@dataclass
class Line:
    """The µs of each trial of one case, by format."""

    kernel: str
    model: str
    case: str
    bytes: dict[str, float]
    trials: dict[str, dict[str, float]]

    def best(self, kind: str) -> tuple[str, float]:
        return min(self.trials[kind].items(), key=lambda trial: trial[1])

    def record(self) -> BenchRecord:
        metrics: dict[str, float] = {}
        for kind, trials in self.trials.items():
            if not trials:
                continue
            _, best = self.best(kind)
            metrics[f"{kind}_us"] = trials.get("default", best)
            metrics[f"{kind}_best_us"] = best
            metrics[f"{kind}_tb_s"] = self.bytes[kind] / best / 1e6
            if kind != "bf16" and self.trials["bf16"]:
                bf16 = self.trials["bf16"]["default"]
                metrics[f"{kind}_speedup"] = bf16 / metrics[f"{kind}_us"]
                metrics[f"{kind}_best_speedup"] = self.best("bf16")[1] / best
        return make_record(
            f"{self.kernel} {self.case}", metrics, model=self.model, device=DEVICE,
            settings={"trials_us": self.trials},
        )  # fmt: skip


def kinds() -> dict[str, KVFormat]:
    return {"bf16": BF16, **FORMATS}


def tunings(kind: str, rows: int) -> dict[str, AttentionTuning]:
    found = {"default": AUTO}
    for tiles in DECODE if kind != "bf16" else DECODE[:2]:
        found[name(tiles)] = replace(AUTO, decode=tiles)
    if rows <= 64:
        found["programs 264"] = replace(AUTO, programs=264)
        found["programs 528"] = replace(AUTO, programs=528)
    return found


def decode_batch(shape: Shape, rows: int, context: int, kv_format: KVFormat) -> Batch:
    each = rows * context * 2 * shape.kv_heads * kv_format.bytes_per_head(128)
    layers = copies_beyond_l2(each)
    return Batch.make(
        [(1, context)] * rows, shape.heads, shape.kv_heads, 128, layers, torch.bfloat16, kv_format
    )


def compile_all(names: list[str]) -> None:
    """Compiles the timed attention kernels, on all cores at once."""
    with compiling(os.cpu_count() or 4):
        for shape in dict.fromkeys(cell[0] for cell in CELLS):
            for kind, kv_format in kinds().items():
                if any(name.startswith("decode") for name in names):
                    compile_decode(shape, kind, kv_format)
                if any(name.startswith("prefill") for name in names):
                    prefill_batch(shape, 512, kv_format).run(0, AUTO)
                    for tiles in PREFILL:
                        prefill_batch(shape, 512, kv_format).run(0, AttentionTuning(prefill=tiles))


def compile_decode(shape: Shape, kind: str, kv_format: KVFormat) -> None:
    for rows in sorted({cell[1] for cell in CELLS}):
        batch = Batch.make(
            [(1, 64)] * rows, shape.heads, shape.kv_heads, 128, 2, kv_format=kv_format
        )
        for tuning in tunings(kind, rows).values():
            batch.run(0, tuning)


def prefill_batch(shape: Shape, tokens: int, kv_format: KVFormat) -> Batch:
    return Batch.make([(tokens, tokens)], shape.heads, shape.kv_heads, 128, kv_format=kv_format)


def trial(calls: list[Callable[[], object]], at_least: int) -> float | str:
    try:
        return graph_us(calls, 3.0, at_least)
    except Exception as error:  # a tile may not fit this card; the others still tell
        return f"{type(error).__name__}: {str(error)[:80]}"


def time_decode(shape: Shape, rows: int, context: int) -> Line:
    line = Line("attention decode", shape.name, f"{rows} x {context}", {}, {})
    at_least = 32 if rows * context * shape.kv_heads < 1 << 21 else 4
    for kind, kv_format in kinds().items():
        batch = decode_batch(shape, rows, context, kv_format)
        line.bytes[kind] = rows * context * 2 * shape.kv_heads * kv_format.bytes_per_head(128)
        line.trials[kind] = {}
        for label, tuning in tunings(kind, rows).items():
            try:
                scratch = batch.schedule(tuning)
            except Exception as error:
                print(f"{label}: {error}")
                continue
            calls: list[Callable[[], object]] = [
                functools.partial(batch.run, layer, tuning, scratch=scratch)
                for layer in range(len(batch.q))
            ]
            add(line.trials[kind], f"{line.model} {line.case} {kind} {label}", label,
                trial(calls, at_least))  # fmt: skip
        del batch
        torch.cuda.empty_cache()
    return line


def time_prefill(shape: Shape, tokens: int) -> Line:
    line = Line("attention prefill", shape.name, str(tokens), {}, {})
    for kind, kv_format in kinds().items():
        batch = prefill_batch(shape, tokens, kv_format)
        line.bytes[kind] = tokens * 2 * shape.kv_heads * kv_format.bytes_per_head(128)
        line.trials[kind] = {}
        tried = {"default": AUTO} | {name(t): replace(AUTO, prefill=t) for t in PREFILL}
        for label, tuning in tried.items():
            call = functools.partial(batch.run, 0, tuning)
            add(line.trials[kind], f"{line.model} {line.case} {kind} {label}", label,
                trial([call], 8))  # fmt: skip
    return line


def time_store(shape: Shape, tokens: int) -> Line:
    line = Line("RoPE + store", shape.name, str(tokens), {}, {})
    for kind, kv_format in kinds().items():
        copies = copies_beyond_l2(tokens * shape.qkv_width * 2, 16)
        case = Store(shape, tokens, kv_format, copies)
        line.bytes[kind] = tokens * 2 * shape.kv_heads * kv_format.bytes_per_head(128)
        calls: list[Callable[[], object]] = [
            functools.partial(case.run, copy) for copy in range(copies)
        ]
        line.trials[kind] = {}
        add(line.trials[kind], f"{line.model} {line.case} {kind}", "default", trial(calls, 32))
    return line


def add(trials: dict[str, float], what: str, label: str, found: float | str) -> None:
    if isinstance(found, str):
        print(f"{what}: {found}", flush=True)
    else:
        trials[label] = found


def timings() -> Iterator[tuple[str, Callable[[], Line]]]:
    for i, (shape, rows, context) in enumerate(CELLS):
        if i == 4:
            for shape, tokens in ((QWEN25_1_5B, 8192), (QWEN25_1_5B, 2048), (QWEN3_8B, 8192)):
                call = functools.partial(time_prefill, shape, tokens)
                yield f"prefill {shape.name} {tokens}", call
            yield "store 256", functools.partial(time_store, QWEN25_1_5B, 256)
            yield "store 8192", functools.partial(time_store, QWEN25_1_5B, 8192)
        label = f"decode {shape.name} {rows} x {context}"
        yield label, functools.partial(time_decode, shape, rows, context)


def table(lines: list[Line]) -> Iterator[str]:
    """Per case and format: the default and the best, each beside bf16's default and best."""
    head = ("kernel", "model", "case", "KV", "µs", "x bf16", "best µs", "x bf16", "TB/s", "with")
    rows = [head]
    for line in lines:
        for kind, trials in line.trials.items():
            if not trials:
                continue
            label, best = line.best(kind)
            default = trials.get("default", float("nan"))
            bf16 = line.trials["bf16"]
            ratio = bf16["default"] / default, line.best("bf16")[1] / best
            rows.append((
                line.kernel, line.model, line.case, kind, f"{default:.1f}", f"{ratio[0]:.2f}",
                f"{best:.1f}", f"{ratio[1]:.2f}", f"{line.bytes[kind] / best / 1e6:.2f}", label,
            ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def totals(lines: list[Line]) -> Iterator[str]:
    """Each trial's mean speed-up over bf16's default, in decode at 256 rows."""
    chosen = [x for x in lines if x.kernel == "attention decode" and x.case.startswith("256 ")]
    for kind in FORMATS:
        labels = dict.fromkeys(label for line in chosen for label in line.trials.get(kind, {}))
        means = {}
        for label in labels:
            ratios = [
                x.trials["bf16"]["default"] / x.trials[kind][label]
                for x in chosen
                if label in x.trials.get(kind, {})
            ]
            means[label] = sum(ratios) / len(ratios), min(ratios), len(ratios)
        for label, (mean, least, count) in sorted(means.items(), key=lambda m: -m[1][0]):
            yield f"{kind:12} {label:24} mean {mean:.2f}  least {least:.2f}  of {count}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time 8-bit KV.")
    parser.add_argument("--results", type=Path, help="folder for kv8.jsonl")
    parser.add_argument("--seconds", type=float, default=180.0, help="start nothing after this")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="names with this in them")
    options = parser.parse_args()
    session = Session()
    if not options.no_checks:
        run_checks(session, options.only, until=0.5 * options.seconds)
    lines: list[Line] = []
    if DEVICE == "cuda":
        chosen = list(only(options.only, timings()))
        compile_all([name for name, _ in chosen])
        print(f"compiled after {session.seconds:.0f} s", flush=True)
        for line in session.each(chosen, until=options.seconds):
            lines.append(line)
            torch.cuda.empty_cache()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        append_jsonl(options.results / "kv8.jsonl", [line.record() for line in lines])
    print("\n".join(totals(lines)))
    print("\n".join(table(lines)))
    if session.skipped:
        print(f"skipped for lack of time: {', '.join(session.skipped)}")
    print(f"{session.seconds:.0f} s; {len(session.failed)} failures")
    print("".join(f"  {line}\n" for line in session.failed), end="")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
