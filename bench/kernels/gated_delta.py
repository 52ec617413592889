"""Times the layers of gated delta nets on the shape of Qwen3.5-27B, beside `fla-core`'s kernel.

    python bench/kernels/gated_delta.py

The table has µs per layer: of prompts of 8192 tokens (one row, and four), and of decodes (1 and 64
lanes, with the share of the bandwidth that reading and writing the states takes). `fla-core` is
left out where it is not installed. tests/gpu/test_gated_delta.py compares the kernels with twins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from timing import DEVICE, graph_us

from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.recurrent import gated_delta_net as kernels
from quire.plan import STATE_SAVES

KEY_HEADS, HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
BANDWIDTH = 4.8e12
"""Bytes a second of an H200."""
LAYERS = 6
"""Layers whose states a timing rotates through, so that L2 holds none of them."""


def rows_of(lengths: Sequence[tuple[int, int]], saves: Sequence[int] = ()) -> StateRows:
    """Returns the rows of a step. The lane and slot of a row are its number.

    Args:
        lengths: (start, tokens) of each row.
        saves: positions at which the first row stores copies of its state.
    """
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

    def run(self, rows: StateRows) -> None:
        """Runs the convolution, the rule and the gated norm."""
        conv = kernels.short_conv(self.x, self.weight, self.state, rows)
        out = kernels.gated_delta(conv, self.a, self.b, self.a_log, self.dt_bias, self.state, rows)
        kernels.gated_rms_norm(out, self.z, self.norm, 1e-6)


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
        of(lambda i: layers[i].run(rows)),
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


def main() -> None:
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


if __name__ == "__main__":
    main()
