"""Kernels of low-rank adapters against their twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire import ops
from quire.ops import triton as backend
from quire.ops.adapters import HEAD, WORDS, AdapterRows, SlotWeights, padded_rank, scale_bits
from quire.ops.arguments import RmsScale
from quire.ops.reference import adapters as twins
from quire.ops.rows import StepRows
from quire.ops.triton.linear import linear
from quire.ops.triton.lora import adapters as kernels
from quire.ops.triton.lora.adapted_gemm import adapted_gemm
from quire.ops.triton.products.plan import GemmPlan
from quire.ops.triton.products.small import LinearArgs, run

Ranks = list[tuple[int, ...]]
"""By slot, the rank of each projection."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slot_weights(
    ranks: Ranks, sizes: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype, device: str
) -> SlotWeights:
    table = torch.zeros(len(ranks), HEAD + WORDS * len(sizes), dtype=torch.int32)
    memory = torch.zeros(len(ranks), (inputs + sum(sizes)) * 4 * padded_rank(rank) + 64)
    for slot, own in enumerate(ranks):
        at, first = 16 * slot, 0
        table[slot, :HEAD] = torch.tensor([at, sum(own)])
        weights = draw(sum(own), inputs, seed=slot) * inputs**-0.5
        memory[slot, at : at + weights.numel()] = weights.flatten()
        at += -(-weights.numel() // 16) * 16
        for place, (r, size) in enumerate(zip(own, sizes, strict=True)):
            line = torch.tensor([at, r, first, scale_bits(0.5 + place)])
            table[slot, HEAD + WORDS * place :][:WORDS] = line
            b = torch.zeros(size, padded_rank(r))
            b[:, :r] = draw(size, r, seed=99 + slot + place)
            memory[slot, at : at + b.numel()] = b.flatten()
            at += -(-b.numel() // 16) * 16
            first += r
    return SlotWeights(memory.to(dtype).to(device), table.to(device), sizes, inputs, rank)


def step_rows(q_lens: list[int], lanes: list[int], device: str) -> StepRows:
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    tensors = (lanes, starts, starts, [0] * len(lanes))
    return StepRows(*(torch.tensor(t, dtype=torch.int32, device=device) for t in tensors))


def rows_of(slots: list[int], device: str, module, num_slots: int) -> AdapterRows:  # type: ignore[no-untyped-def]
    """One token per row, lane i for row i."""
    rows = step_rows([1] * len(slots), list(range(len(slots))), device)
    column = torch.tensor(slots, dtype=torch.int32, device=device)
    return module.adapter_rows(rows, column, num_tokens=len(slots), num_slots=num_slots)


@pytest.mark.parametrize("lengths", [[3, 1, 40, 2, 0], [300, 1, 270, 5, 1]])
def test_tokens_are_grouped_by_slot(kernel_device: str, lengths: list[int]) -> None:
    lanes, column = [2, 0, 3, 1, -1], [4, -1, 0, 4]
    rows = step_rows(lengths, lanes, kernel_device)
    column_on = torch.tensor(column, dtype=torch.int32, device=kernel_device)
    padded = sum(lengths) + 7
    found = kernels.adapter_rows(rows, column_on, num_tokens=padded, num_slots=5)
    twin = twins.adapter_rows(rows, column_on, num_tokens=padded, num_slots=5)
    assert torch.equal(found.slots, twin.slots)
    used = (twin.slots >= 0).nonzero().flatten()
    expected = used[torch.argsort(twin.slots[used], stable=True)]
    assert torch.equal(found.order[: len(used)].long(), expected)
    tiles = found.tiles[: int(found.num_tiles[0])].tolist()
    covered = [(slot, int(found.order[first + i])) for slot, first, n, _ in tiles for i in range(n)]
    assert covered == [(int(twin.slots[t]), int(t)) for t in expected]
    assert all(0 < n <= found.tile for _, _, n, _ in tiles)
    slots = sorted(set(twin.slots.tolist()) - {-1})
    assert found.tiles[: len(slots), 3].tolist() == slots
    assert int(found.num_tiles[1]) == len(slots)


def test_a_step_without_adapters_has_no_tiles(kernel_device: str) -> None:
    found = rows_of([-1] * 5, kernel_device, kernels, 3)
    assert int(found.num_tiles[0]) == 0
    out = draw(5, 40).to(kernel_device)
    weights = slot_weights([(4,)] * 3, (40,), 64, 4, torch.float32, kernel_device)
    before = out.clone()
    kernels.add_adapters(out, draw(5, 64).to(kernel_device), weights, found)
    assert torch.equal(out, before)


@pytest.mark.parametrize(
    ("sizes", "inputs", "ranks"),
    [
        ((96, 32, 32), 64, [(4, 4, 4), (16, 0, 8), (0, 0, 0), (1, 3, 0)]),
        ((128, 256), 64, [(4, 0), (8, 8), (0, 0), (2, 3)]),
        ((200,), 272, [(16,), (7,), (64,), (0,)]),
        ((144, 144), 1024, [(8, 8), (24, 1), (3, 0), (0, 5)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_add_adapters(
    kernel_device: str,
    sizes: tuple[int, ...],
    inputs: int,
    ranks: Ranks,
    dtype: torch.dtype,
    normed: bool,
) -> None:
    slots = [0, -1, 1, 3, 0, 2, -1, 0, 1, 1]
    rank = max(max(own) for own in ranks)
    weights = slot_weights(ranks, sizes, inputs, rank, dtype, kernel_device)
    x = draw(len(slots), inputs, seed=5).to(dtype).to(kernel_device)
    out = draw(len(slots), sum(sizes), seed=6).to(dtype).to(kernel_device)
    norm = None
    if normed:
        norm = RmsScale((1 + 0.1 * draw(inputs, seed=7)).to(dtype).to(kernel_device), 1e-5)
    expected = twins.add_adapters(
        out.clone(), x, weights, rows_of(slots, kernel_device, twins, 4), norm
    )
    rows = rows_of(slots, kernel_device, kernels, 4)
    found = kernels.add_adapters(out.clone(), x, weights, rows, norm)
    base = torch.tensor(slots, device=kernel_device) < 0
    assert torch.equal(found[base], out[base])
    exact = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.float(), expected.float(), atol=exact, rtol=exact)


def test_tiles_of_many_tokens(kernel_device: str) -> None:
    slots = [i % 3 - 1 for i in range(290)]
    weights = slot_weights([(4,), (8,)], (48,), 64, 8, torch.float32, kernel_device)
    x, out = draw(290, 64).to(kernel_device), draw(290, 48, seed=1).to(kernel_device)
    rows = rows_of(slots, kernel_device, kernels, 2)
    assert rows.tile == 64
    twin_rows = rows_of(slots, kernel_device, twins, 2)
    expected = twins.add_adapters(out.clone(), x, weights, twin_rows)
    torch.testing.assert_close(
        kernels.add_adapters(out, x, weights, rows), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("act", [None, "silu_and_mul"])
@pytest.mark.parametrize(("rows", "deterministic"), [(3, False), (80, False), (80, True)])
def test_adapted_linear(
    kernel_device: str, act: ops.Activation | None, rows: int, deterministic: bool
) -> None:
    """Rows without an adapter get the bits of the layer alone, by kernels of any kind."""
    sizes, inputs = (48, 48), 64
    slots = [i * i % 4 - 1 for i in range(rows)]
    weights = slot_weights(
        [(8, 3), (0, 0), (2, 16)], sizes, inputs, 16, torch.float32, kernel_device
    )
    x = draw(rows, inputs).to(kernel_device)
    weight = ops.Weight.plain(draw(sum(sizes), inputs, seed=1).to(kernel_device) / 8)
    bias = draw(sum(sizes), seed=2).to(kernel_device)
    norm = RmsScale(1 + 0.1 * draw(inputs, seed=3).to(kernel_device), 1e-5)
    residual = None if act else draw(rows, sum(sizes), seed=4).to(kernel_device)

    def whole() -> Tensor | None:
        return None if residual is None else residual.clone()

    with ops.use_policy(ops.Policy(deterministic=deterministic)):
        own = rows_of(slots, kernel_device, kernels, 3)
        found = backend.adapted_linear(x, weight, bias, whole(), norm, act, weights, own)
        plain = linear(x, weight, bias, whole(), norm, act)
    expected = twins.adapted_linear(
        x, weight, bias, whole(), norm, act, weights, rows_of(slots, kernel_device, twins, 3)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    base = torch.tensor(slots, device=kernel_device) < 0
    # The interpreter's functions round differently by an element's position in an array.
    error = 0.0 if kernel_device == "cuda" else 1e-5
    torch.testing.assert_close(found[base], plain[base], atol=error, rtol=error)


PLAN = GemmPlan("skinny", bm=16, bn=32, bk=64, split_k=2)


@pytest.mark.parametrize(
    ("sizes", "inputs", "ranks", "act", "plan"),
    [
        ((96, 32, 32), 64, [(4, 4, 4), (16, 0, 8), (0, 0, 0)], None, replace(PLAN, bm=64)),
        ((72,), 272, [(16,), (7,), (80,)], None, PLAN),
        ((48, 48), 256, [(8, 8), (24, 1), (0, 5)], "silu_and_mul", PLAN),
        ((40, 24), 64, [(3, 200), (7, 0), (130, 9)], None, replace(PLAN, bn=64, swap=True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_in_the_layers_own_kernel(
    kernel_device: str,
    sizes: tuple[int, ...],
    inputs: int,
    ranks: Ranks,
    act: ops.Activation | None,
    plan: GemmPlan,
    dtype: torch.dtype,
) -> None:
    slots = [0, -1, 1, 2, 0, 2, -1, 0, 1, 1, 0, -1, 2, 0, 0, 1, 2, -1, 1]
    rank = max(max(own) for own in ranks)
    weights = slot_weights(ranks, sizes, inputs, rank, dtype, kernel_device)
    outputs = sum(sizes) // (2 if act else 1)
    x, bias, residual = (
        draw(*shape, seed=seed).to(dtype).to(kernel_device)
        for seed, shape in enumerate([(len(slots), inputs), (sum(sizes),), (len(slots), outputs)])
    )
    weight = ops.Weight.plain(
        (draw(sum(sizes), inputs, seed=9) * inputs**-0.5).to(dtype).to(kernel_device)
    )
    args = LinearArgs(x, weight, bias, None, residual, act)
    found = adapted_gemm(args, plan, weights, rows_of(slots, kernel_device, kernels, 3))
    twin_rows = rows_of(slots, kernel_device, twins, 3)
    expected = twins.adapted_linear(
        x, weight, bias, residual.clone(), None, act, weights, twin_rows
    )
    exact = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.float(), expected.float(), atol=exact, rtol=exact)
    base = torch.tensor(slots, device=kernel_device) < 0
    assert torch.equal(found[base], run(args, plan)[base])


@pytest.mark.parametrize(
    ("sizes", "act", "plan"),
    [
        ((48, 40), None, PLAN),
        ((64,), None, replace(PLAN, split_k=1)),
        ((48, 48), "silu_and_mul", replace(PLAN, split_k=1)),
    ],
)
def test_more_adapters_than_are_multiplied_at_once(
    kernel_device: str, sizes: tuple[int, ...], act: ops.Activation | None, plan: GemmPlan
) -> None:
    count, inputs = 19, 64
    slots = [*range(count), -1, 4, 18, -1]
    ranks = [tuple((3 * slot + 5 * p) % 17 for p in range(len(sizes))) for slot in range(count)]
    weights = slot_weights(ranks, sizes, inputs, 16, torch.float32, kernel_device)
    x = draw(len(slots), inputs).to(kernel_device)
    weight = ops.Weight.plain(draw(sum(sizes), inputs, seed=9).to(kernel_device) / 8)
    args = LinearArgs(x, weight, None, None, None, act)
    found = adapted_gemm(args, plan, weights, rows_of(slots, kernel_device, kernels, count))
    twin_rows = rows_of(slots, kernel_device, twins, count)
    expected = twins.adapted_linear(x, weight, None, None, None, act, weights, twin_rows)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    base = torch.tensor(slots, device=kernel_device) < 0
    assert torch.equal(found[base], run(args, plan)[base])
