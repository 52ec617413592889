"""A time budget per kernel for every target of the GPU fast path, as Markdown.

    python bench/kernels/budget.py    # prints the tables, which bench/report.py puts in place

The costs come from a small model over measured ceilings of one H200 (constants below), not from a
fit to Quire. The kernels must reach the budget. The tables compare it with their measured times.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import measured
from shapes import MODELS, Shape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import targets

BANDWIDTH = 4.24e6
"""Bytes per µs of a GEMV or a copy (4.24 TB/s)."""
MATMUL = 700e6
"""bf16 FLOP per µs of a large matmul (700 TFLOP/s)."""
PDL = 0.8
"""µs of a small dependent kernel in a graph with programmatic dependent launch."""
STEP_GAP = 12.0
"""µs between the last kernel of a step and the first of the next (two graph launches)."""
CHUNK = 8192
"""Prompt tokens a step computes at most."""


def gemm(rows: float, n: int, k: int) -> float:
    """µs of one linear layer. Bytes and FLOPs overlap imperfectly near the ridge, hence the 2-norm
    (it lands within 6 % of the cuBLAS sums measured at 128 to 512 rows). The tail is launch, fill
    and drain: 1.8 µs was measured per GEMV with PDL; 1.2 assumes that prefetching the next weights
    under attention and the small kernels hides a third of it."""
    bytes_ = 2 * (n * k + rows * (n + k))
    tail = 1.2 if rows <= 8 else 2.0 if rows <= 64 else 4.0
    return math.hypot(bytes_ / BANDWIDTH, 2 * rows * n * k / MATMUL) + tail


def decode_attention(shape: Shape, rows: float, kv_tokens: float) -> float:
    """µs of split-KV attention of one layer, without the combine. One row is latency (a launch, a
    block-table look-up, a few dependent tiles); many rows: bandwidth plus an uneven last wave."""
    fixed = 6.5 if rows <= 8 else 10.0
    return kv_tokens * shape.kv_bytes_per_token / (0.95 * BANDWIDTH) + fixed


def prefill_attention(shape: Shape, tokens: int) -> float:
    """µs of causal attention over one prompt in one layer. TFLOP/s by length: what a plain Triton
    kernel should reach beside cuDNN's 310 at 2048 and 528 to 558 at 8192."""
    rate = 140e6 if tokens <= 512 else 280e6 if tokens <= 2048 else 430e6
    return 2.0 * tokens * tokens * shape.heads * shape.head_dim / rate + 2.0


def elementwise(bytes_: float, launch: float = PDL) -> float:
    return bytes_ / BANDWIDTH + launch


@dataclass
class Budget:
    """µs per kernel of one step, and what the step is held against."""

    title: str
    rows: list[tuple[str, int, float]] = field(default_factory=list)
    note: str = ""

    def add(self, kernel: str, calls: int, each: float) -> None:
        self.rows.append((kernel, calls, each))

    @property
    def total(self) -> float:
        return sum(calls * each for _, calls, each in self.rows)


def layer_kernels(shape: Shape, rows: float, out: Budget) -> None:
    """Everything of a decoder layer but attention. Below 65 rows norm, activation and residual ride
    in the GEMMs; above, they are kernels of their own."""
    fused = rows <= 64
    for name, (n, k) in shape.projections.items():
        out.add(f"linear: {name}", shape.layers, gemm(rows, n, k))
    if not fused:
        out.add("residual + RMSNorm", 2 * shape.layers, elementwise(8 * rows * shape.hidden))
        out.add("SiLU·mul", shape.layers, elementwise(6 * rows * shape.intermediate))
    name = "q/k norm + RoPE + KV store" if shape.qk_norm else "RoPE + KV store"
    out.add(name, shape.layers, elementwise(4 * rows * shape.qkv_width, 1.0))


def head_kernels(shape: Shape, rows: float, out: Budget) -> None:
    out.add("batch preparation + embedding", 1, 2 * PDL + elementwise(4 * rows * shape.hidden))
    out.add("linear: LM head", 1, gemm(rows, shape.vocab, shape.hidden))
    out.add("sampler (two stages)", 1, elementwise(4 * rows * shape.vocab, 2 * PDL + 3.0))
    out.add("gap between steps", 1, STEP_GAP)


def decode_step(shape: Shape, rows: float, kv_tokens: float, title: str) -> Budget:
    """One step of `rows` generating requests whose contexts sum to `kv_tokens`."""
    out = Budget(title)
    layer_kernels(shape, rows, out)
    out.add("attention, split KV", shape.layers, decode_attention(shape, rows, kv_tokens))
    out.add("attention, combine", shape.layers, 1.0)
    head_kernels(shape, rows, out)
    return out


def prefill_step(shape: Shape, tokens: int, prompts: int, title: str) -> Budget:
    """One step that computes `prompts` whole prompts of `tokens` tokens."""
    out = Budget(title)
    layer_kernels(shape, tokens * prompts, out)
    each = prompts * (prefill_attention(shape, tokens) - 2.0) + 2.0
    out.add("attention, prefill", shape.layers, each)
    head_kernels(shape, prompts, out)
    out.add("tokenless `generate` (plan, copy, read)", 1, 350.0)
    return out


def nano_lengths() -> list[tuple[int, int]]:
    """(prompt, output) lengths of the community benchmark, in its own order of draws."""
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(draw.randint(100, 1024))
        for _ in range(prompts[-1]):
            draw.randint(0, 10000)
    return [(p, draw.randint(100, 1024)) for p in prompts]


def nano(shape: Shape) -> tuple[Budget, float]:
    """The mean decode step (by summed time), and output tokens/s of the whole run in µs terms."""
    lengths = nano_lengths()
    steps = max(out for _, out in lengths) - 1
    sums: dict[str, list[float]] = {}
    decode = 0.0
    for step in range(1, steps + 1):
        alive = [(p, o) for p, o in lengths if o > step]
        one = decode_step(shape, len(alive), sum(p + step for p, _ in alive), "")
        decode += one.total
        for kernel, calls, each in one.rows:
            sums.setdefault(kernel, []).append(calls * each)
    prompt_tokens = sum(p for p, _ in lengths)
    chunks = math.ceil(prompt_tokens / CHUNK)
    mean_prompt = round(prompt_tokens / len(lengths))
    prefill = chunks * prefill_step(shape, mean_prompt, round(CHUNK / mean_prompt), "").total
    out = Budget(f"{shape.name}, nano (mean decode step)")
    for kernel, values in sums.items():
        out.add(kernel, 1, sum(values) / steps)
    out.note = (
        f"{steps} decode steps, {decode / 1e6:.2f} s; {prompt_tokens} prompt tokens, "
        f"{prefill / 1e6:.2f} s."
    )
    return out, sum(o for _, o in lengths) / (decode + prefill) * 1e6


@dataclass(frozen=True)
class Target:
    """A case to reach.

    Attributes:
        reach: output tokens per second, or ms for TTFT.
        size: output tokens of b1, prompt tokens of TTFT.
    """

    shape: Shape
    case: str
    reach: float
    size: int = 512

    @property
    def label(self) -> str:
        return f"{self.case} {self.size}" if self.case == "TTFT" else self.case


def _targets() -> Iterator[Target]:
    """Yields the targets of `bench/targets.py` that a step's kernels decide."""
    shapes = {shape.name: shape for shape in MODELS}
    for target in targets.TARGETS:
        shape, reach = shapes[target.model], target.reach
        if reach is None:
            continue
        if target.case == "ttft":
            yield Target(shape, "TTFT", reach, int(target.label.split()[1]))
        elif target.case in ("nano", "b64"):
            yield Target(shape, target.case, reach)
        elif target.case in ("b1", "b1-256"):
            yield Target(shape, "b1", reach, 256 if target.case == "b1-256" else 512)


TARGETS = tuple(_targets())


def evaluate(target: Target) -> tuple[Budget, float]:
    """The step that dominates the case, and the figure the whole case would then reach."""
    shape, name = target.shape, f"{target.shape.name}, {target.label}"
    if target.case == "nano":
        return nano(shape)
    if target.case == "TTFT":
        step = prefill_step(shape, target.size, 1, name)
        return step, step.total / 1e3
    if target.case == "b64":
        step = decode_step(shape, 64, 64 * 640, f"{name} (mean decode step, context 640)")
        prefill = 4 * prefill_step(shape, 512, 16, "").total
        step.note = f"255 such steps and {prefill / 1e3:.1f} ms of prefill."
        return step, 64 * 256 / (255 * step.total + prefill) * 1e6
    context = 128 + target.size // 2
    step = decode_step(shape, 1, context, f"{name} (mean decode step, context {context})")
    prefill = prefill_step(shape, 128, 1, "").total
    return step, target.size / ((target.size - 1) * step.total + prefill) * 1e6


def verdict(target: Target, figure: float) -> str:
    margin = target.reach / figure if target.case == "TTFT" else figure / target.reach
    return f"{100 * (margin - 1):+.0f} %"


def summary(results: list[tuple[Target, Budget, float]]) -> Iterator[str]:
    yield "| model | case | target | budget | margin | measured (against target) |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for target, _, figure in results:
        ttft = target.case == "TTFT"
        reach = f"≤ {target.reach:g} ms" if ttft else f"≥ {target.reach:,.0f} tok/s"
        shown = f"{figure:.2f} ms" if ttft else f"{figure:,.0f} tok/s"
        got = MEASURED.case(target.shape.name, target.case, target.size)
        seen = "" if got is None else f"{got:.2f} ms" if ttft else f"{got:,.0f} tok/s"
        if got is not None:
            seen += f" ({verdict(target, got)})"
        row = (target.shape.name, target.label, reach, shown, verdict(target, figure), seen)
        yield "| " + " | ".join(row) + " |"


def table(target: Target, budget: Budget) -> Iterator[str]:
    yield f"### {budget.title}"
    yield ""
    yield "| kernel | calls | µs each | µs | measured µs |"
    yield "| --- | --- | --- | --- | --- |"
    for kernel, calls, each in budget.rows:
        # A mean step of `nano` is no step of any one size, so kernels cannot be held against it.
        got = None
        if target.case != "nano":
            got = MEASURED.kernel(target.shape, kernel, target.case, target.size)
        seen = "" if got is None else f"{got:.1f}"
        yield f"| {kernel} | {calls} | {each:.1f} | {calls * each:.0f} | {seen} |"
    yield f"| **sum** | | | **{budget.total:.0f}** | |"
    yield ""
    if budget.note:
        yield budget.note
        yield ""


def markdown(results: list[tuple[Target, Budget, float]]) -> str:
    lines = [*summary(results), ""]
    for target, budget, _ in results:
        lines += table(target, budget)
    return "\n".join(lines).rstrip() + "\n"


MEASURED = measured.load()


def main() -> None:
    print(markdown([(t, *evaluate(t)) for t in TARGETS]))


if __name__ == "__main__":
    main()
