"""The gated delta rule's kernels, compiled, against their twins in float64."""

from __future__ import annotations

import pytest
import torch

from quire.ops.reference import gated_delta as twins
from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.recurrent import gated_delta_net as kernels
from quire.plan import STATE_SAVES

DEVICE = torch.device("cuda", 0)
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
STEPS = {
    "decode": ([(0, 1), (7, 1), (100, 1)], []),
    "a few tokens": ([(0, 5), (7, 3), (64, 8)], []),
    "a prompt that leaves copies": ([(0, 300)], [16, 64, 200, 211, 300]),
    "a prompt goes on": ([(128, 200)], [192, 320]),
    "mixed": ([(33, 1), (0, 200), (12, 17), (5, 16), (900, 65)], []),
}


def rows_of(lengths: list[tuple[int, int]], saves: list[int]) -> StateRows:
    """Returns rows of (start, tokens), each in the lane and slot of its number. The first leaves
    copies at `saves`."""
    count = len(lengths)
    table = torch.zeros(count, 1 + 2 * STATE_SAVES, dtype=torch.int32)
    table[:, 0] = torch.arange(count)
    for pair, position in enumerate(saves):
        table[0, 1 + 2 * pair], table[0, 2 + 2 * pair] = position, count + pair
    counts = torch.tensor([0, *(tokens for _, tokens in lengths)])
    starts = counts.cumsum(0).int().to(DEVICE)
    ends = torch.tensor([start + tokens for start, tokens in lengths], dtype=torch.int32)
    ids = torch.ones(int(starts[-1]), dtype=torch.int32, device=DEVICE)
    lanes = torch.arange(count, dtype=torch.int32, device=DEVICE)
    return StateRows(ids, lanes, starts, ends.to(DEVICE), table.to(DEVICE), (), int(counts.max()))


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (64, 128), (64, 64), (16, 24)])
@pytest.mark.parametrize("step", STEPS)
def test_kernels_match_the_twins(
    step: str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    key_heads, heads, taps = 2, 6, 4
    lengths, saves = STEPS[step]
    rows = rows_of(lengths, saves)
    tokens, slots = len(rows.ids), len(lengths) + STATE_SAVES
    channels = 2 * key_heads * key_dim + heads * value_dim

    def normal(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(kind)

    x = normal(tokens, channels, kind=dtype)
    a, b = normal(tokens, heads, kind=dtype), normal(tokens, heads, kind=dtype)
    weight, a_log, dt_bias = normal(channels, taps), normal(heads) - 2, normal(heads)
    recurrent = normal(slots, heads, key_dim, value_dim)
    conv = normal(slots, taps - 1, channels, kind=dtype)
    z, gain = normal(tokens, heads * value_dim, kind=dtype), normal(value_dim, kind=dtype)
    found = []
    for side, wide in ((kernels, False), (twins, True)):
        parts = [x, a, b, weight, a_log, dt_bias, recurrent, conv, z, gain]
        own = [part.double() if wide else part.clone() for part in parts]
        state = StateLayer(own[6], own[7])
        mixed = side.short_conv(own[0], own[3], state, rows)
        out = side.gated_delta(mixed, own[1], own[2], own[4], own[5], state, rows)
        gated = side.gated_rms_norm(out, own[8], own[9], 1e-6)
        found.append([mixed, out, gated, *state[:2]])
    for got, want in zip(*found, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error < LIMIT[dtype]


@pytest.mark.parametrize("dtype", LIMIT)
def test_rows_go_on_from_drafts(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    key_heads, heads, key_dim, value_dim, taps, drafts = 16, 32, 128, 128, 4, 7
    channels = 2 * key_heads * key_dim + heads * value_dim
    lengths = [(40, 8), (33, 1), (20, 3), (64, 70), (7, 5), (0, 9)]
    accepted, generating = [7, 2, 0, 5, 3, 0], [True, True, True, False, False, False]
    rows = rows_of(lengths, [])
    flags = torch.tensor([0 if own else 1 for own in generating], dtype=torch.int32, device=DEVICE)
    rows = rows._replace(flags=flags)
    tokens, slots = len(rows.ids), len(lengths)

    def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(kind)

    seen = [start - count for (start, _), count in zip(lengths, accepted, strict=True)]
    base = 2 * torch.tensor(seen, dtype=torch.int32, device=DEVICE) + 1
    parts = {
        "recurrent": normal(slots, heads, key_dim, value_dim, kind=torch.float32),
        "conv": normal(slots, taps - 1 + drafts, channels),
        "mixed": normal(slots, 2, drafts, channels),
        "gates": normal(slots, 2, drafts, 2 * heads),
    }
    x, a, b = normal(tokens, channels), normal(tokens, heads), normal(tokens, heads)
    weight = normal(channels, taps, kind=torch.float32)
    a_log = normal(heads, kind=torch.float32) - 2
    dt_bias = normal(heads, kind=torch.float32)
    found = []
    for side, wide in ((kernels, False), (twins, True)):
        own = {name: part.double() if wide else part.clone() for name, part in parts.items()}
        entries = base[:, None].repeat(1, channels + heads * value_dim)
        state = StateLayer(**own, base=entries)
        given = [part.double() if wide else part for part in (x, weight, a, b, a_log, dt_bias)]
        mixed = side.short_conv(given[0], given[1], state, rows)
        out = side.gated_delta(mixed, *given[2:], state, rows)
        found.append([mixed, out, *own.values()])
        found[-1][4] = own["mixed"][..., key_heads * key_dim :]
        assert (state.base // 2 == state.base[:, :1] // 2).all()
    for got, want in zip(*found, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < LIMIT[dtype]
