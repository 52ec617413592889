"""Times kernels over 8-bit KV beside bf16.

    PYTHONPATH=src python bench/kernels/kv8.py --results DIR [--seconds 180] [--only TEXT]

Times decode attention over contexts of equal length, prefill attention, and the store. bf16 also
runs with tiles that suit equal lengths, and 8-bit KV is compared with its best time. Prints a table
at the end and appends records to DIR/kv8.jsonl. A failure is reported, not fatal. Work
beyond the time given is skipped and named. --only: timings whose name has this in it.
tests/ops/test_kv8.py and tests/gpu compare the kernels with twins.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from attention_cases import Batch, times
from session import Session, only
from shapes import QWEN3_0_6B, QWEN3_8B, QWEN25_1_5B, Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor

from quire.ops import KVFormat, KVLayer
from quire.ops.triton.attention.attention import AttentionTuning, Tiles
from quire.ops.triton.attention.rope_store import qk_norm_rope_store
from quire.tools.bench.record import BenchRecord, append_jsonl, make_record

AUTO = AttentionTuning()
KINDS = {
    "bf16": KVFormat(torch.bfloat16),
    "fp8": KVFormat(torch.float8_e4m3fn, "head"),
    "fp8_dynamic": KVFormat(torch.float8_e4m3fn, "token"),
    "int8": KVFormat(torch.uint8, "token"),
}
EQUAL_LENGTHS = {
    "default": AUTO,
    "two stages": AttentionTuning(decode=Tiles(16, 64, 4, 2)),
    "three stages": AttentionTuning(decode=Tiles(16, 64, 4, 3)),
}
"""Tiles of decode attention in bf16."""
MODELS = (QWEN25_1_5B, QWEN3_0_6B, QWEN3_8B)
DECODES = ((256, 2048), (256, 8192), (256, 1024), (256, 4096), (64, 4096), (1, 4096))
"""Requests and their contexts."""
PREFILLS = ((QWEN25_1_5B, 8192), (QWEN25_1_5B, 2048), (QWEN3_8B, 8192))


class Store:
    """Tokens between the projection and an 8-bit cache."""

    def __init__(self, shape: Shape, tokens: int, kv_format: KVFormat, copies: int = 1) -> None:
        heads = shape.heads + 2 * shape.kv_heads
        self.qkv = torch.randn(copies, tokens, heads, 128, device=DEVICE).bfloat16()
        self.kv_format = kv_format
        blocks = -(-tokens // 16) + 1
        size = blocks, copies, 2, shape.kv_heads, 16
        self.values = torch.zeros((*size, 128), dtype=kv_format.dtype, device=DEVICE)
        self.scales = torch.zeros(size, device=DEVICE)
        if kv_format.scales == "head":
            self.scales = torch.full((copies, 2, shape.kv_heads), 0.01, device=DEVICE)
        angles = torch.outer(torch.arange(tokens + 1.0), 0.9 ** torch.arange(64.0))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
        self.positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
        self.slots = torch.randperm(16 * blocks, device=DEVICE)[:tokens].int()

    def layer(self, copy: int) -> KVLayer:
        own: tuple[Tensor | None, Tensor | None] = None, None
        if self.kv_format.scales == "token":
            own = self.scales[:, copy, 0], self.scales[:, copy, 1]
        elif self.kv_format.scales == "head":
            own = self.scales[copy, 0], self.scales[copy, 1]
        return KVLayer(self.values[:, copy, 0], self.values[:, copy, 1], *own)

    def run(self, copy: int = 0) -> Tensor:
        return qk_norm_rope_store(
            self.qkv[copy], self.layer(copy), positions=self.positions, slots=self.slots,
            cos_sin=self.cos_sin,
        )  # fmt: skip


@dataclass
class Line:
    """The µs of one case by the format of KV, and the bytes that it reads."""

    kernel: str
    model: str
    case: str
    us: dict[str, float]
    bytes: dict[str, float]

    def record(self) -> BenchRecord:
        metrics: dict[str, float] = {}
        for kind, us in self.us.items():
            metrics[f"{kind}_us"] = us
            metrics[f"{kind}_tb_s"] = self.bytes[kind] / us / 1e6
            metrics[f"{kind}_speedup"] = self.us["bf16"] / us
        name = f"{self.kernel} {self.case}"
        return make_record(name, metrics, model=self.model, device=DEVICE)


def kv_bytes(shape: Shape, tokens: int) -> dict[str, float]:
    return {
        kind: tokens * 2 * shape.kv_heads * form.bytes_per_head(128) for kind, form in KINDS.items()
    }


def batch_of(shape: Shape, rows: list[tuple[int, int]], kind: str, layers: int = 1) -> Batch:
    heads = shape.heads, shape.kv_heads, 128
    return Batch.make(rows, *heads, layers, torch.bfloat16, KINDS[kind])


def time_decode(shape: Shape, rows: int, context: int) -> Line:
    nbytes, us = kv_bytes(shape, rows * context), {}
    for kind in KINDS:
        layers = copies_beyond_l2(int(nbytes[kind]))
        batch = batch_of(shape, [(1, context)] * rows, kind, layers)
        tunings = EQUAL_LENGTHS if kind == "bf16" else {"default": AUTO}
        us[kind] = min(found for _, found in times(batch, tunings))
        del batch
        torch.cuda.empty_cache()
    return Line("attention decode", shape.name, f"{rows} x {context}", us, nbytes)


def time_prefill(shape: Shape, tokens: int) -> Line:
    us = {}
    for kind in KINDS:
        ((_, us[kind]),) = times(batch_of(shape, [(tokens, tokens)], kind), {"default": AUTO})
    return Line("attention prefill", shape.name, str(tokens), us, kv_bytes(shape, tokens))


def time_store(shape: Shape, tokens: int) -> Line:
    us = {}
    for kind, form in KINDS.items():
        copies = copies_beyond_l2(tokens * shape.qkv_width * 2, 16)
        store = Store(shape, tokens, form, copies)
        us[kind] = graph_us([partial(store.run, copy) for copy in range(copies)], 3.0)
    return Line("RoPE + store", shape.name, str(tokens), us, kv_bytes(shape, tokens))


def timings() -> Iterator[tuple[str, Callable[[], Line]]]:
    for rows, context in DECODES:
        for shape in MODELS:
            name = f"decode {shape.name} {rows} x {context}"
            yield name, partial(time_decode, shape, rows, context)
    for shape, tokens in PREFILLS:
        yield f"prefill {shape.name} {tokens}", partial(time_prefill, shape, tokens)
    for tokens in (256, 8192):
        yield f"store {tokens}", partial(time_store, QWEN25_1_5B, tokens)


def table(lines: list[Line]) -> Iterator[str]:
    yield "| kernel | model | case | " + " | ".join(KINDS) + " |"
    yield "| --- " * (3 + len(KINDS)) + "|"
    for line in lines:
        cells = [
            f"{us:.1f} µs ({line.us['bf16'] / us:.2f} ×, {line.bytes[kind] / us / 1e6:.2f} TB/s)"
            for kind, us in line.us.items()
        ]
        yield f"| {line.kernel} | {line.model} | {line.case} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="folder for kv8.jsonl")
    parser.add_argument("--seconds", type=float, default=180.0, help="start nothing after this")
    parser.add_argument("--only", default="", metavar="TEXT", help="names with this in them")
    options = parser.parse_args()
    session = Session()
    lines: list[Line] = []
    for line in session.each(only(options.only, timings()), until=options.seconds):
        lines.append(line)
        torch.cuda.empty_cache()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        append_jsonl(options.results / "kv8.jsonl", [line.record() for line in lines])
    print("\n".join(table(lines)))
    return session.report()


if __name__ == "__main__":
    sys.exit(main())
