"""Gated delta nets on the shape of Qwen3.5-27B: checks the kernels against twins in float64, then
times them in graphs, beside `fla-core`'s kernel where that is installed.

    python bench/kernels/gated_delta.py

The table has µs per layer: of prompts of 8192 tokens (one row, and four), of decodes (1 and 64
lanes, with the share of the memory bandwidth that reading and writing the states takes).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "bench" / "kernels"))

from timing import DEVICE, graph_us  # noqa: E402

from quire.ops.reference import gated_delta as reference  # noqa: E402
from quire.ops.state import StateLayer, StateRows  # noqa: E402
from quire.ops.triton.recurrent import gated_delta_net as kernels  # noqa: E402
from quire.plan import STATE_SAVES  # noqa: E402

KEY_HEADS, HEADS, DIM, TAPS = (16, 48, 128, 4) if DEVICE == "cuda" else (1, 2, 16, 4)
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
BANDWIDTH = 4.8e12
"""Bytes a second of an H200."""
LAYERS = 6
"""Layers' states that a timing goes through, to find none in the L2 cache."""


def rows_of(lengths: Sequence[tuple[int, int]], saves: Sequence[int] = ()) -> StateRows:
    """lengths: (start, tokens) of each row, whose lane and slot are its number. saves: positions at
    which the first leaves copies."""
    count = len(lengths)
    table = torch.zeros(count, 1 + 2 * STATE_SAVES, dtype=torch.int32)
    table[:, 0] = torch.arange(count)
    for pair, position in enumerate(saves):
        table[0, 1 + 2 * pair], table[0, 2 + 2 * pair] = position, count + pair
    counts = [tokens for _, tokens in lengths]
    starts = [sum(counts[:i]) for i in range(count + 1)]
    lanes = torch.arange(count, dtype=torch.int32)
    ends = [start + tokens for start, tokens in lengths]
    return StateRows(
        torch.ones(starts[-1], dtype=torch.int32, device=DEVICE),
        lanes.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(ends, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE),
        (),
        max(counts),
    )


class Layer:
    """Random inputs and states of one layer, for so many tokens and slots."""

    def __init__(self, tokens: int, slots: int, dtype: torch.dtype, seed: int = 0) -> None:
        draw = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device=DEVICE)

        width = CHANNELS + HEADS * DIM + 2 * HEADS
        self.projected = normal(tokens, width).to(dtype)
        parts = [CHANNELS, HEADS * DIM, HEADS, HEADS]
        self.x, self.z, self.b, self.a = self.projected.split(parts, dim=1)
        self.weight = normal(CHANNELS, TAPS)
        self.a_log, self.dt_bias = normal(HEADS) - 2, normal(HEADS)
        self.norm = normal(DIM).to(dtype)
        recurrent = normal(slots, HEADS, DIM, DIM)
        self.state = StateLayer(recurrent, normal(slots, TAPS - 1, CHANNELS).to(dtype))

    def wide(self) -> Layer:
        """Returns a copy in float64."""
        other = object.__new__(Layer)
        for name, value in vars(self).items():
            if isinstance(value, StateLayer):
                wide = StateLayer(*(p if p is None else p.double() for p in value))
            else:
                wide = value.double()
            setattr(other, name, wide)
        return other

    def run(self, side: object, rows: StateRows) -> list[torch.Tensor]:
        """Returns what each op gives."""
        conv = side.short_conv(self.x, self.weight, self.state, rows)  # type: ignore[attr-defined]
        out = side.gated_delta(  # type: ignore[attr-defined]
            conv, self.a, self.b, self.a_log, self.dt_bias, self.state, rows
        )
        gated = side.gated_rms_norm(out, self.z, self.norm, 1e-6)  # type: ignore[attr-defined]
        return [conv, out, gated]


CHECKS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "decode, 5 lanes": ([(0, 1), (7, 1), (100, 1), (3, 1), (64, 1)], []),
    "one prompt of 700": ([(0, 700)], [16, 64, 500, 511, 700]),
    "mixed": ([(33, 1), (0, 200), (12, 17), (5, 16), (900, 65)], []),
}


def check(dtype: torch.dtype, limit: float) -> int:
    """Prints the distance from the twins, relative to their length. Returns how many are beyond the
    limit."""
    wrong = 0
    for name, (lengths, saves) in CHECKS.items():
        rows = rows_of(lengths, saves)
        layer = Layer(len(rows.ids), len(lengths) + STATE_SAVES, dtype)
        wide = layer.wide()
        want = [*wide.run(reference, rows), *wide.state[:2]]
        again = Layer(len(rows.ids), len(lengths) + STATE_SAVES, dtype)
        got = [*layer.run(kernels, rows), *layer.state[:2]]
        same = [*again.run(kernels, rows), *again.state[:2]]
        found = [
            ((one.double() - other).norm() / other.norm()).item()
            for one, other in zip(got, want, strict=True)
        ]
        equal = all(torch.equal(one, other) for one, other in zip(got, same, strict=True))
        bad = not equal or not all(each < limit for each in found)
        wrong += bad
        distances = " ".join(f"{each:.1e}" for each in found)
        print(f"{str(dtype)[6:]:9} {name:18} {distances}  {'WRONG' if bad else 'ok'}", flush=True)
    return wrong


def times(lengths: list[tuple[int, int]], saves: Sequence[int] = ()) -> list[float]:
    """Returns µs of the convolution, the rule, the gated norm and of all three."""
    rows = rows_of(lengths, saves)
    slots = len(lengths) + STATE_SAVES
    layers = [Layer(len(rows.ids), slots, torch.bfloat16, seed) for seed in range(LAYERS)]
    mixed = [kernels.short_conv(one.x, one.weight, one.state, rows) for one in layers]
    outs = [torch.empty(len(rows.ids), HEADS, DIM, device=DEVICE).bfloat16() for _ in layers]

    def of(run: Callable[[int], object]) -> float:
        return graph_us([lambda i=i: run(i) for i in range(LAYERS)], at_least=12)  # type: ignore[misc]

    def rule(i: int) -> object:
        one = layers[i]
        return kernels.gated_delta(mixed[i], one.a, one.b, one.a_log, one.dt_bias, one.state, rows)

    return [
        of(lambda i: kernels.short_conv(layers[i].x, layers[i].weight, layers[i].state, rows)),
        of(rule),
        of(lambda i: kernels.gated_rms_norm(outs[i], layers[i].z, layers[i].norm, 1e-6)),
        of(lambda i: layers[i].run(kernels, rows)),
    ]


def fla_us(lengths: list[tuple[int, int]]) -> float | None:
    """Returns µs of fla-core's rule on prompts of these lengths; None: it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    tokens = sum(count for _, count in lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=DEVICE).bfloat16()

    q, k = normal(HEADS, DIM), normal(HEADS, DIM)
    v, g, beta = normal(HEADS, DIM), -normal(HEADS).float().exp(), normal(HEADS).sigmoid()
    starts = [sum(count for _, count in lengths[:i]) for i in range(len(lengths) + 1)]
    offsets = torch.tensor(starts, device=DEVICE)
    state = torch.zeros(len(lengths), HEADS, DIM, DIM, device=DEVICE)

    def run() -> object:
        return chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=offsets,
        )  # fmt: skip

    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 100


def main() -> int:
    wrong = check(torch.float32, 1e-4)
    if DEVICE != "cuda":
        return wrong
    wrong += check(torch.bfloat16, 2e-2)
    state_bytes = HEADS * DIM * DIM * 4
    print(f"\n{'case':24}{'conv':>9}{'rule':>9}{'norm':>9}{'layer':>9}   µs per layer")
    for name, lengths, saves in (
        ("prompt 8192", [(0, 8192)], ()),
        ("prompt 8192, 4 copies", [(0, 8192)], (4096, 7168, 7936, 8128)),
        ("4 prompts of 2048", [(0, 2048)] * 4, ()),
        ("decode, 1 lane", [(500, 1)], ()),
        ("decode, 64 lanes", [(500, 1)] * 64, ()),
    ):
        found = times(lengths, saves)
        line = f"{name:24}" + "".join(f"{each:9.1f}" for each in found)
        if lengths[0][1] == 1:
            floor = 2 * len(lengths) * state_bytes / BANDWIDTH * 1e6
            line += f"   states at {100 * floor / found[1]:.0f} % of the bandwidth"
        else:
            theirs = fla_us(lengths)
            line += "" if theirs is None else f"   fla-core's rule {theirs:.1f}"
        print(line, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
