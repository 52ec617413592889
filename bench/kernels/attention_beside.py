"""Our attention beside torch's FlashAttention-2 and cuDNN, at the shapes of real models.

    PYTHONPATH=src python bench/kernels/attention_beside.py [--seconds 180] [--only TEXT]

Causal prefill of one prompt of 512 to 8192 tokens, in TFLOP/s of the pairs that a query sees, and
decoding of batches, in GB/s of the keys and values read. Ours reads them from blocks of 16 tokens;
the others get the same contiguous, [requests, heads, tokens, head_dim], which is less work. All
must agree. Times are those inside a CUDA graph; buffers rotate over more than L2 holds. What a
library refuses is a dash, with the reason above the table. Writes $OUT/attention_beside.json, if
that is set. Without a GPU only the checks of ours run, under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from attention_cases import BLOCK_SIZE, Batch
from session import Session
from shapes import MODELS, Shape
from timing import DEVICE, copies_beyond_l2, graph_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.ops.triton.attention.attention import AttentionTuning

LIBRARIES = {
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
PROMPTS = (512, 1024, 2048, 4096, 8192)
DECODES = ((1, 512), (1, 8192), (8, 2048), (64, 640), (16, 8192), (64, 2048), (256, 1024))
"""Requests and their contexts."""
_ALLOWED = 3 * torch.finfo(torch.bfloat16).eps
"""Error of a kernel in bf16, as a share of 1 + the value."""
_SCALE = 0.1
"""Scale of the products, as in `attention_cases`."""


@dataclass(frozen=True)
class Case:
    """Causal attention of `new` tokens each behind `context - new` others."""

    shape: Shape
    rows: int
    new: int
    context: int

    @property
    def name(self) -> str:
        what = "prefill" if self.new > 1 else f"decode {self.rows} x"
        return f"{self.shape.name} {what} {self.context}"

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.context * self.shape.kv_bytes_per_token

    def rate(self, us: float) -> float:
        """Returns TFLOP/s of a prompt, GB/s of a decode step."""
        if self.new == 1:
            return self.kv_bytes / us / 1e3
        pairs = self.rows * self.new * (self.new + 1) / 2
        return 4.0 * pairs * self.shape.heads * self.shape.head_dim / us / 1e6


@dataclass
class Row:
    """The times of one case.

    Attributes:
        us: by the kernel's name.
        rates: in `unit`, by the kernel's name.
        refused: reasons of libraries that do not take the case.
        repeated: libraries that got keys and values repeated for each head of queries.
    """

    name: str
    unit: str
    us: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)


def cases() -> Iterator[Case]:
    for shape in MODELS:
        for tokens in PROMPTS:
            yield Case(shape, 1, tokens, tokens)
        for rows, context in DECODES:
            yield Case(shape, rows, 1, context)


def ours(case: Case, layers: int) -> Batch:
    shape = case.shape
    rows = [(case.new, case.context)] * case.rows
    return Batch.make(rows, shape.heads, shape.kv_heads, shape.head_dim, layers)


def calls_of_ours(batch: Batch) -> list[Callable[[], Tensor]]:
    tuning = AttentionTuning()
    # A step makes the schedule once for all its layers.
    made = batch.schedule(tuning) if DEVICE == "cuda" else {}
    layers = range(len(batch.caches))
    return [functools.partial(batch.run, layer, tuning, scratch=made) for layer in layers]


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference as a share of the tolerance."""
    return float(((got.double() - want.double()).abs() / (1 + want.abs())).max()) / _ALLOWED


def dense(case: Case, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the same queries, keys and values, contiguous: [rows, heads, tokens, head_dim]."""
    shape, cache = case.shape, batch.caches[layer]
    q = batch.q[layer].reshape(case.rows, case.new, shape.heads, shape.head_dim).transpose(1, 2)
    blocks = batch.table[:, : -(-case.context // BLOCK_SIZE)].long()

    def gathered(values: Tensor) -> Tensor:
        # [rows, blocks, heads, block, head_dim]
        found = values[blocks].transpose(1, 2).flatten(2, 3)
        return found[:, :, : case.context].contiguous()

    return q.contiguous(), gathered(cache.k), gathered(cache.v)


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=case.new > 1, scale=_SCALE, enable_gqa=grouped
    )


def flat(out: Tensor) -> Tensor:
    """[rows, heads, new, head_dim] as ours gives it, [tokens, heads, head_dim]."""
    return out.transpose(1, 2).flatten(0, 1)


def measure(case: Case) -> Row:
    """Raises ValueError where results differ."""
    row = Row(case.name, "TFLOP/s" if case.new > 1 else "GB/s")
    layers = copies_beyond_l2(case.kv_bytes, 8)
    batch = ours(case, layers)
    calls = calls_of_ours(batch)
    result = calls[0]()
    row.us["ours"] = graph_us(calls)
    inputs = [dense(case, batch, layer) for layer in range(layers)]
    for name, backend in LIBRARIES.items():
        try:
            row.us[name] = library_us(case, backend, inputs, result)
        except RuntimeError as error:
            row.refused[name] = str(error).strip().splitlines()[0][:120]
    grouped = case.shape.heads != case.shape.kv_heads
    for name in list(row.refused) if grouped and case.new > 1 else ():
        # A prompt's time is that of its products, which repeating does not change.
        with contextlib.suppress(RuntimeError):
            each = [(q, repeated(q, k), repeated(q, v)) for q, k, v in inputs]
            row.us[name] = library_us(case, LIBRARIES[name], each, result)
            row.repeated.append(name)
    row.rates = {name: case.rate(us) for name, us in row.us.items()}
    return row


def repeated(q: Tensor, values: Tensor) -> Tensor:
    return values.repeat_interleave(q.shape[1] // values.shape[1], dim=1)


def library_us(
    case: Case, backend: SDPBackend, inputs: list[tuple[Tensor, Tensor, Tensor]], result: Tensor
) -> float:
    """Returns the µs of a library's kernel.

    Raises:
        RuntimeError: it does not take the case.
        ValueError: its output is not `result`, ours.
    """
    with sdpa_kernel(backend):
        off = difference(flat(attend(case, *inputs[0])), result)
        if not off <= 2.0:
            raise ValueError(f"{backend.name} and ours differ by {off:.3g} of what is allowed")
        return graph_us([functools.partial(attend, case, *each) for each in inputs])


def check(case: Case) -> float:
    """Returns the largest difference of ours from torch's attention in float64, as a share of what
    is allowed."""
    batch = ours(case, 1)
    want = flat(attend(case, *(each.double() for each in dense(case, batch, 0))))
    return difference(calls_of_ours(batch)[0](), want)


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    small = Shape("small", 1, 0, 4, 2, 64, 0, 0)
    on_gpu = [Case(shape, 3, 1, 300) for shape in MODELS] if DEVICE == "cuda" else []
    on_gpu += [Case(shape, 1, 512, 512) for shape in MODELS] if DEVICE == "cuda" else []
    for case in (Case(small, 2, 1, 40), Case(small, 1, 40, 40), *on_gpu):
        yield case.name, functools.partial(check, case)


def table(rows: list[Row]) -> str:
    names = ["ours", *LIBRARIES]
    lines = [["case", *(f"{name} µs" for name in names), *names, ""]]
    for row in rows:
        us = [f"{row.us[name]:.1f}" if name in row.us else "–" for name in names]
        marks = ["*" if name in row.repeated else "" for name in names]
        rates = [
            f"{row.rates[name]:,.0f}{mark}" if name in row.rates else "–"
            for name, mark in zip(names, marks, strict=True)
        ]
        lines.append([row.name, *us, *rates, row.unit])
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [*lines[:1], ["---"] * 8, *lines[1:]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="start nothing after this")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their name")
    options = parser.parse_args()
    session = Session()
    torch.manual_seed(0)
    session.check(checks(), until=0.4 * options.seconds)
    rows: list[Row] = []
    chosen = [case for case in cases() if options.only in case.name]
    parts = ((case.name, functools.partial(measure, case)) for case in chosen)
    for row in session.each(parts if DEVICE == "cuda" else (), until=options.seconds):
        rows.append(row)
        print(row.name, {name: round(us, 1) for name, us in row.us.items()}, flush=True)
        torch.cuda.empty_cache()
    out = os.environ.get("OUT")
    if out:
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
        record = {"device": device, "torch": torch.__version__, "failed": session.failed}
        found = {**record, "skipped": session.skipped, "rows": [asdict(row) for row in rows]}
        Path(out, "attention_beside.json").write_text(json.dumps(found, indent=1))
    reasons = {(name, reason) for row in rows for name, reason in row.refused.items()}
    for name, reason in sorted(reasons):
        print(f"{name} refuses: {reason}")
    if session.skipped:
        print(f"skipped for lack of time: {', '.join(session.skipped)}")
    print(f"{session.seconds:.0f} s, {len(session.failed)} failures")
    print("\n".join(session.failed))
    print(table(rows))
    if any(row.repeated for row in rows):
        print("* with keys and values repeated for each head of queries")


if __name__ == "__main__":
    main()
