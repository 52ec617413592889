"""The kernels of gated delta nets against their twins in float64."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.ops.choose import Policy, use_policy
from quire.ops.reference import gated_delta as reference
from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.recurrent import gated_delta_net as kernels
from quire.plan import STATE_SAVES

LANES, SLOTS = 7, 40


class Case(NamedTuple):
    rows: StateRows
    state: StateLayer
    given: dict[str, Tensor]


class Sizes(NamedTuple):
    key_heads: int = 2
    heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def make(
    device: str,
    lengths: list[tuple[int, int]],
    sizes: Sizes,
    *,
    saves: dict[int, list[int]] | None = None,
    ended: tuple[int, ...] = (),
    padding: int = 3,
    alike: bool = False,
    seed: int = 0,
    drafts: int = 0,
    accepted: dict[int, int] | None = None,
    generating: tuple[int, ...] = (),
) -> Case:
    """Returns a random case.

    Args:
        lengths: (start, tokens) of each row.
        saves: by row, positions of copies.
        ended: rows whose tokens are padding.
        alike: all keys of a row point the same way.
        drafts: the most drafts of a row.
        accepted: by row, the number of accepted drafts of its last step.
        generating: rows whose tokens are drafts, except the first.
    """
    draw = torch.Generator().manual_seed(seed)
    slots = list(range(SLOTS))
    random.Random(seed).shuffle(slots)
    table = torch.zeros(LANES, 1 + 2 * STATE_SAVES, dtype=torch.int32)
    lanes = random.Random(seed).sample(range(LANES), len(lengths))
    ids: list[int] = []
    for row, (_, count) in enumerate(lengths):
        table[lanes[row], 0] = slots.pop()
        for pair, position in enumerate((saves or {}).get(row, [])):
            table[lanes[row], 1 + 2 * pair] = position
            table[lanes[row], 2 + 2 * pair] = slots.pop()
        ids += [-1 if row in ended else 1] * count
    counts = [count for _, count in lengths]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    # Two rows of padding.
    rows = StateRows(
        torch.tensor([*ids, *[-1] * padding], dtype=torch.int32).to(device),
        torch.tensor([*lanes, -1, -1], dtype=torch.int32).to(device),
        torch.tensor([*starts, starts[-1], starts[-1]], dtype=torch.int32).to(device),
        torch.tensor([*(s + n for s, n in lengths), 0, 0], dtype=torch.int32).to(device),
        table.to(device),
        tuple(counts),
        max(counts),
        torch.tensor([row not in generating for row in range(len(lengths) + 2)]).int().to(device),
    )
    tokens = starts[-1] + padding

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device)

    state = StateLayer(
        normal(SLOTS, sizes.heads, sizes.key_dim, sizes.value_dim),
        normal(SLOTS, sizes.taps - 1 + drafts, sizes.channels),
    )
    if drafts:
        base = torch.zeros(SLOTS, sizes.channels + sizes.heads * sizes.value_dim, dtype=torch.int32)
        for row, (start, _) in enumerate(lengths):
            seen = start - (accepted or {}).get(row, 0)
            base[table[lanes[row], 0]] = 2 * seen + row % 2
        state = state._replace(
            mixed=normal(SLOTS, 2, drafts, sizes.channels),
            gates=normal(SLOTS, 2, drafts, 2 * sizes.heads),
            base=base.to(device),
        )
    mixed = normal(tokens, sizes.channels)
    gates = 2 * normal(tokens, 2 * sizes.heads)
    if alike:
        mixed[:, : 2 * sizes.key_heads * sizes.key_dim] = 1.0
    given = {
        "x": normal(tokens, sizes.channels + 5)[:, : sizes.channels],
        "weight": normal(sizes.channels, sizes.taps),
        "mixed": mixed,
        "a": gates[:, : sizes.heads],
        "b": gates[:, sizes.heads :],
        "a_log": normal(sizes.heads) - 1,
        "dt_bias": normal(sizes.heads),
        "z": normal(tokens, sizes.heads * sizes.value_dim + 3)[:, 3:],
        "norm": normal(sizes.value_dim),
    }
    return Case(rows, state, given)


def run(side: Any, case: Case, dtype: torch.dtype | None = None) -> tuple[list[Tensor], StateLayer]:
    """Returns the results of the ops, and the states after them."""
    wide = dtype or torch.float32
    state = StateLayer(*(_to(part, wide) for part in case.state))
    given = {name: value.to(wide) for name, value in case.given.items()}
    conv = side.short_conv(given["x"], given["weight"], state, case.rows)
    names = "mixed", "a", "b", "a_log", "dt_bias"
    out = side.gated_delta(*(given[name] for name in names), state, case.rows)
    return [conv, out], state


def check(case: Case, ended: tuple[int, ...] = ()) -> None:
    cpu = Case(
        StateRows(*(part.cpu() if isinstance(part, Tensor) else part for part in case.rows)),
        StateLayer(*(None if part is None else part.cpu() for part in case.state)),
        {name: value.cpu() for name, value in case.given.items()},
    )
    want, after = run(reference, cpu, torch.float64)
    got, left = run(kernels, case)
    real = cpu.rows.ids >= 0
    for one, other in zip(got, want, strict=True):
        close(one.cpu()[real], other[real])
    assert left.base is None or torch.equal(left.base.cpu() // 2, after.base // 2)
    for one, other in zip(left[:4], after[:4], strict=True):
        if one is not None:
            close(one.cpu(), other)


def _to(part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if part is None:
        return None
    return part.clone() if part.dtype == torch.int32 else part.to(dtype, copy=True)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("taps", [2, 4])
def test_single_tokens(kernel_device: str, taps: int) -> None:
    case = make(
        kernel_device, [(0, 1), (9, 1), (100, 1)], Sizes(taps=taps), saves={1: [10], 0: [1]}
    )
    check(case)


def test_drafts(kernel_device: str) -> None:
    """Rows continue after the last step's drafts, with new drafts or with the rest of a prompt,
    short or long."""
    case = make(
        kernel_device,
        [(9, 4), (20, 1), (0, 3), (30, 2), (5, 70), (0, 66)],
        Sizes(),
        drafts=3,
        accepted={0: 2, 1: 3, 3: 1, 4: 3},
        generating=(0, 1),
        saves={2: [2], 4: [40]},
    )
    check(case)


def test_single_tokens_go_on_from_drafts(kernel_device: str) -> None:
    case = make(
        kernel_device, [(9, 1), (20, 1), (30, 1)], Sizes(taps=2), drafts=5,
        accepted={0: 5, 1: 1}, generating=(0, 1, 2), ended=(2,),
    )  # fmt: skip
    check(case)


def test_lanes_that_have_ended_stay_as_they_are(kernel_device: str) -> None:
    case = make(kernel_device, [(5, 1), (9, 1), (100, 1)], Sizes(), ended=(1,))
    check(case)
    _, after = run(kernels, case)
    slot = int(case.rows.table[int(case.rows.lanes[1]), 0])
    assert torch.equal(after.recurrent[slot], case.state.recurrent[slot])
    assert torch.equal(after.conv[slot], case.state.conv[slot])


def test_rows_of_all_lengths(kernel_device: str) -> None:
    lengths = [(0, 130), (3, 1), (40, 17), (7, 16), (0, 2), (64, 64)]
    saves = {0: [16, 64, 65, 128, 130, 1], 2: [41, 48, 57], 3: [8, 23], 4: [1, 2], 5: [65, 128]}
    check(make(kernel_device, lengths, Sizes(), saves=saves))


def test_identical_keys(kernel_device: str) -> None:
    """The inverse of the system is small, but powers of it are not."""
    case = make(kernel_device, [(0, 70), (5, 64)], Sizes(key_heads=1, heads=3), alike=True)
    case.given["a"].fill_(-9.0)
    case.given["b"].fill_(9.0)
    check(case)


def test_the_forms_agree() -> None:
    case = make("cpu", [(4, 90)], Sizes())
    whole, after = run(reference, case, torch.float64)
    state = StateLayer(*(_to(part, torch.float64) for part in case.state))
    names = "mixed", "a", "b"
    parts = []
    for at in range(90):
        rows = case.rows._replace(
            ids=case.rows.ids[:1],
            query_start=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
            seq_lens=torch.tensor([5 + at, 0, 0], dtype=torch.int32),
        )
        one = (case.given[name][at : at + 1].double() for name in names)
        factors = (case.given[name].double() for name in ("a_log", "dt_bias"))
        parts.append(reference.gated_delta(*one, *factors, state, rows))
    torch.testing.assert_close(torch.cat(parts), whole[1][:90])
    torch.testing.assert_close(state.recurrent, after.recurrent)


def test_gates(kernel_device: str) -> None:
    given = make(kernel_device, [(0, 5)], Sizes(heads=10, key_heads=5)).given
    x = torch.randn(8, 10, 24).to(kernel_device)
    got = kernels.gated_rms_norm(x, given["z"], given["norm"], 1e-6)
    wide = [each.cpu().double() for each in (x, given["z"], given["norm"])]
    close(got.cpu(), reference.gated_rms_norm(*wide, 1e-6))
    got = kernels.sigmoid_gate(x.flatten(1), given["z"])
    close(got.cpu(), reference.sigmoid_gate(wide[0].flatten(1), wide[1]))


def test_the_same_bits_every_time(kernel_device: str) -> None:
    case = make(kernel_device, [(0, 130), (3, 1), (40, 17)], Sizes())
    first, second = run(kernels, case), run(kernels, case)
    parts = [[*outputs, *state[:2]] for outputs, state in (first, second)]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one[:148], other[:148])


@pytest.mark.parametrize("side", [kernels, reference], ids=["kernels", "twin"])
def test_deterministic_states_do_not_depend_on_the_cut(side: Any, kernel_device: str) -> None:
    """A row of 30 tokens, in one step and in three steps with other rows."""
    device = kernel_device if side is kernels else "cpu"
    case = make(device, [(4, 30), (9, 1), (2, 5)], Sizes())
    names = "mixed", "a", "b", "a_log", "dt_bias"
    with use_policy(Policy(deterministic=True)):
        (conv, whole), after = run(side, case)
        state, at, parts = StateLayer(*(_to(part, torch.float32) for part in case.state)), 0, []
        for count in (1, 20, 9):
            rows = case.rows._replace(
                ids=case.rows.ids[:count],
                query_start=torch.tensor([0, *[count] * 5], dtype=torch.int32).to(device),
                seq_lens=torch.tensor([4 + at + count, *[0] * 4], dtype=torch.int32).to(device),
                max_q_len=count,
            )
            given = {name: value[at : at + count] for name, value in case.given.items()}
            given |= {name: case.given[name] for name in ("weight", "a_log", "dt_bias")}
            one = side.short_conv(given["x"], given["weight"], state, rows)
            two = side.gated_delta(*(given[name] for name in names), state, rows)
            parts.append((one[:count], two[:count]))
            at += count
    slot = int(case.rows.table[int(case.rows.lanes[0]), 0])
    assert torch.equal(torch.cat([part[0] for part in parts]), conv[:30])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[:30])
    assert torch.equal(state.recurrent[slot], after.recurrent[slot])
    assert torch.equal(state.conv[slot], after.conv[slot])
