"""Assigns the kernels of a profile to the kinds of `roofline`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from quire.tools.bench.cases import Case, parse_case
from quire.tools.bench.throughput import QuireEngine
from quire.tools.profile.profile import Profiler, charged
from quire.tools.roofline.roofline import Prediction

OTHERS = "others"
PRODUCTS = "products"
_MERGED = {"projections": PRODUCTS, "head": PRODUCTS}
"""Kinds that a profile cannot tell apart, because they run the same kernels."""
_PARTS: Sequence[tuple[str, Sequence[str]]] = (
    ("experts", ("grouped_kernel", "up_gemv", "down_gemv", "combine_kernel", "sort_kernel",
                 "route_kernel", "mma_rows", "mma_sum")),
    ("states", ("_conv", "_recurrent", "_gated_norm", "_solve", "_scan",
                "_advance_copies")),
    ("attention", ("attend", "attention", "latent", "combine", "_schedule")),
    ("norms", ("norm", "rope", "_round")),
    (PRODUCTS, ("gemv", "gemm", "skinny", "eight_bit", "_sum_kernel", "_adapted", "nvjet", "cublas",
                "cutlass", "splitk", "aten::mm", "aten::addmm", "aten::linear", "mkldnn")),
)  # fmt: skip
"""Parts of kernels' names by kind. The first one that a name contains decides."""


def kind_of(kernel: str) -> str:
    """Returns the kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in _PARTS if any(p in name for p in parts)), OTHERS)


def measured_kinds(engine: QuireEngine, name: str) -> dict[str, float]:
    """Profiles a case. Returns the seconds of each kind; "others" has the time without a kernel.

    Args:
        name: name of a prediction: a case, or `ttft` with a number of prompt tokens.
    """
    core, recorder = engine.llm._core, engine.trace
    # A profiler records steps itself.
    core._executor = recorder.inner
    try:
        # The profile is None only with NVTX.
        spans = Profiler(engine.llm, None).case(_case(name)).spans  # type: ignore[union-attr]
    finally:
        core._executor = recorder
    busy, idle, _ = charged(spans)
    seconds: Counter[str] = Counter()
    for kernel, ns in busy.items():
        seconds[kind_of(kernel)] += ns
    seconds[OTHERS] += idle.total()
    return {kind: ns / 1e9 for kind, ns in seconds.items()}


def _case(name: str) -> Case:
    word, _, tokens = name.partition(" ")
    return parse_case(f"1x{tokens}x1") if word == "ttft" else parse_case(name)


def predicted_kinds(predicted: Prediction) -> dict[str, float]:
    """Returns the predicted seconds of the kinds that `measured_kinds` tells apart."""
    seconds: dict[str, float] = {}
    known = {kind for kind, _ in _PARTS}
    for name, kind in predicted.kinds.items():
        merged = _MERGED.get(name, name)
        merged = merged if merged in known else OTHERS
        seconds[merged] = seconds.get(merged, 0.0) + kind.seconds
    return seconds


def compared(
    predicted: Mapping[str, float], found: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Returns the predicted and the measured ms of each kind, and the residual in percent.

    A kind that was not measured has no residual."""
    table: dict[str, dict[str, float]] = {}
    for kind in sorted({*predicted, *found}, key=lambda kind: -found.get(kind, 0.0)):
        a, b = predicted.get(kind, 0.0), found.get(kind, 0.0)
        line = {"predicted_ms": 1e3 * a, "measured_ms": 1e3 * b}
        table[kind] = {**line, "residual_percent": 100.0 * (a / b - 1.0)} if a and b else line
    return table
