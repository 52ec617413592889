"""Linear layers with low-rank adapters for few rows: one kernel for both.

The kernel is `skinny_kernel` with more programs before its own. These multiply by A, wait for each
other, and multiply by B, beside the others, and write what is to be added; a program of the layer
adds it to its sums once they are whole. So a layer with adapters has as many
launches as one without, and both read at once. Sums are those of `skinny_kernel`: rows without an
adapter keep their bits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.adapters import AdapterRows, SlotWeights
from quire.ops.arguments import Activation, RmsScale
from quire.ops.choose import current_policy
from quire.ops.triton.activation import run as activate
from quire.ops.triton.adapter_tiles import TURNS, await_tiles, expand, parts_of_tiles, shrink
from quire.ops.triton.adapters import (
    AdapterTiles,
    add_adapters,
    counters_of,
    preactivation,
    shrink_buffers,
)
from quire.ops.triton.gemm import LinearArgs, choose, default_workspace
from quire.ops.triton.gemm_common import (
    gdc_launch_dependents,
    prefetch_rows,
    tile_rows,
    wait_for_predecessor,
)
from quire.ops.triton.gemm_plan import GemmPlan, shape_of
from quire.ops.triton.gemm_table import BUCKETS, fixed_plan
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import linear, loads
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.quantized_tiles import Operands
from quire.ops.triton.skinny_gemm import MAX_SPLIT_TILES, meet, product, store_tile
from quire.ops.weight import Weight

_WORKERS = 64
"""Programs that multiply by A and B."""
STAGES = 4
"""Stages of the loops over A and B."""


@triton.jit(do_not_specialize=["M", "prefetch_k", "steps_per_split", "workers", "turn"])
def _adapted_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    slots_ptr, order_ptr, tiles_ptr, count_ptr, memory_ptr, table_ptr, starts_ptr, inner_ptr,
    inner_parts_ptr, delta_ptr, tile_counters_ptr,
    M, N, K, stride_xm, stride_wn, stride_sn, stride_rm, stride_ym, steps_per_split, prefetch_k,
    workers, turn, tiles_n, splits, slot_stride, table_stride, inner_stride, delta_stride, ranks,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr, EAGER: tl.constexpr, PREFETCH: tl.constexpr,
    TILE: tl.constexpr, BR: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    PLACES: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, FIXED: tl.constexpr,
    EVEN_INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] as `skinny_kernel` does of x whose norm, if any, is applied, with
    adapters. Grid: `workers` that adapt, then N tiles, K splits, M tiles. turn: see
    TURNS."""
    if PDL and EAGER:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < workers:
        if PDL:
            wait_for_predecessor(EAGER)
        if pid == 0:
            tl.store(tile_counters_ptr + TURNS + 2 * (1 - turn) + tl.arange(0, 2), 0)
        ready_ptr = tile_counters_ptr + TURNS + 2 * turn
        shrink(
            pid, workers, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, x_ptr,
            inner_ptr, inner_parts_ptr, tile_counters_ptr, ready_ptr, K, slot_stride, table_stride,
            stride_xm, inner_stride, ranks, 0.0, TILE, BR, INPUTS, PLACES, WIDTH, FIXED,
            EVEN_INPUTS, False, UPCAST, STAGES, True,
        )  # fmt: skip
        count = tl.load(count_ptr)
        if count > 0:
            await_tiles(ready_ptr, count, PDL)
            expand(
                pid, workers, count, memory_ptr, table_ptr, order_ptr, tiles_ptr, inner_ptr,
                delta_ptr, starts_ptr, ready_ptr + 1, slot_stride, table_stride, inner_stride,
                delta_stride, TILE, OUTPUTS, PLACES, RANK, WIDTH, UPCAST, STAGES,
            )  # fmt: skip
    else:
        pid -= workers
        R: tl.constexpr = 2 * BN if GLU else BN
        pid_n = pid % tiles_n
        pid_k = pid // tiles_n % splits
        pid_m = pid // tiles_n // splits
        rows = tile_rows(pid_n, N, BN, GLU)
        cols = pid_n * BN + tl.arange(0, BN)
        ms = pid_m * BM + tl.arange(0, BM)
        k_begin = pid_k * steps_per_split * BK
        k_end = tl.minimum(K, k_begin + steps_per_split * BK)
        if PREFETCH:
            STEP: tl.constexpr = 8 if BITS == 4 else 1
            first = k_begin // STEP
            last_k = tl.minimum(k_end // STEP, first + prefetch_k)
            prefetch_rows(w_ptr, rows, stride_wn, first, last_k)
        # Here, and not where they are needed, as nothing hides their latency there.
        count = tl.load(count_ptr)
        own = tl.load(slots_ptr + ms, mask=ms < M, other=-1)
        if PDL:
            wait_for_predecessor(EAGER)
        x_ptrs = x_ptr + tl.minimum(ms, M - 1).to(tl.int64)[:, None] * stride_xm
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
        s_ptrs = w_scale_ptr + rows.to(tl.int64)[:, None] * stride_sn
        z_ptrs = w_zero_ptr + rows.to(tl.int64)[:, None] * stride_sn
        scale = tl.full([BM], 1.0, tl.float32)
        acc = product(
            x_ptrs, w_ptrs, s_ptrs, z_ptrs, x_ptr, scale, k_begin, k_end, K, 0.0, BM, R, BK, EVEN,
            "none", SWAP, UPCAST, BITS, GROUP, HAS_ZEROS,
        )  # fmt: skip
        last = True
        if SPLIT:
            tile = pid_m * tiles_n + pid_n
            acc, last = meet(acc, parts_ptr, counters_ptr, tile, pid_k, splits, BM, R)
        if last:
            if HAS_SCALES:
                acc *= tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)[None, :]
            if count > 0:
                parts = count * parts_of_tiles(workers, count)
                await_tiles(tile_counters_ptr + TURNS + 2 * turn + 1, parts, PDL)
                mask = (own >= 0)[:, None] & (rows >= 0)[None, :]
                at = delta_ptr + ms.to(tl.int64)[:, None] * delta_stride + rows[None, :]
                acc += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
            store_tile(
                acc, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn,
                stride_rm, stride_ym, GLU, ACT, False, HAS_BIAS, HAS_RES, False,
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns where the projections of a layer begin, and where the last ends."""
    starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def adapted_gemm(
    args: LinearArgs, plan: GemmPlan, weights: SlotWeights, rows: AdapterRows
) -> Tensor:
    """Returns the layer of `args`, without a norm, with adapters, by a plan of `skinny_gemm`."""
    m, k, n = args.x.shape[0], args.k, args.n
    x, operands, res, card = args.x, Operands(args.weight), args.residual, traits(args.x.device)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    workspace = default_workspace(x.device)
    tiles_n, tiles_m = triton.cdiv(n, plan.bn), triton.cdiv(m, plan.bm)
    steps = triton.cdiv(k, plan.bk)
    wanted = plan.split_k if tiles_n * tiles_m <= MAX_SPLIT_TILES else 1
    per_split = triton.cdiv(steps, wanted)
    splits = triton.cdiv(steps, per_split)
    r = plan.bn * (2 if args.gated else 1)
    parts = workspace.counters
    if splits > 1:
        size = tiles_n * tiles_m * splits * plan.bm * r
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    tiles = AdapterTiles.of(x, weights)
    delta = torch.empty(m, args.weight.outputs, dtype=torch.float32, device=x.device)
    counters = counters_of(x.device)
    # All must fit on the device at once, as they wait for each other. The interpreter runs programs
    # one after the other.
    most = min(_WORKERS, card.num_sms) if x.device.type == "cuda" else 1
    workers, fixed, sums = shrink_buffers(x, weights, rows, tiles, most)
    launch(_adapted_kernel, (workers + tiles_n * splits * tiles_m,))(
        x, operands.values, operands.scales, operands.zeros, x if args.bias is None else args.bias,
        x if res is None else res, out, parts, workspace.counters, rows.slots, rows.order,
        rows.tiles, rows.num_tiles, weights.memory, weights.table,
        _starts(weights.sizes, x.device), tiles.inner, sums, delta, counters.words,
        m, n, k, x.stride(0), operands.values.stride(0), operands.scales.stride(0),
        0 if res is None else res.stride(0), out.stride(0), per_split,
        plan.prefetch // operands.values.element_size(), workers, counters.take_turn(),
        tiles_n, splits, weights.memory.stride(0), weights.table.stride(0),
        tiles.inner.stride(0), delta.stride(0), weights.rows,
        BM=plan.bm, BN=plan.bn, BK=plan.bk, SPLIT=splits > 1, SWAP=plan.swap,
        EVEN=k % plan.bk == 0, GLU=args.gated, ACT=args.act_name,
        HAS_SCALES=operands.has_scales, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        BITS=operands.bits, GROUP=operands.group, HAS_ZEROS=operands.has_zeros,
        UPCAST=x.dtype == torch.bfloat16 and not card.bf16, PDL=card.pdl, EAGER=plan.eager,
        PREFETCH=card.pdl, TILE=rows.tile, BR=tiles.br, INPUTS=tiles.bk, OUTPUTS=tiles.bn,
        PLACES=len(weights.sizes), RANK=weights.rank, WIDTH=tiles.width,
        FIXED=fixed, EVEN_INPUTS=k % tiles.bk == 0, STAGES=STAGES,
        **options(card.pdl, num_warps=plan.warps, num_stages=plan.stages),
    )  # fmt: skip
    return out


def adapted_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: RmsScale | None,
    act: Activation | None,
    weights: SlotWeights,
    rows: AdapterRows,
) -> Tensor:
    """See `ops.reference.adapters.adapted_linear`."""
    args = LinearArgs(x, weight, bias, norm, residual, act)
    plan = _plan(args)
    if plan is not None:
        if norm is not None:
            args = replace(args, x=rms_norm(x, *norm), norm=None)
        return adapted_gemm(args, plan, weights, rows)
    if act is None:
        return add_adapters(linear(x, weight, bias, residual, norm), x, weights, rows, norm)
    out = add_adapters(preactivation(x, weight, bias, norm, act), x, weights, rows, norm)
    out = activate(out, act, x.dtype)
    return out if residual is None else out.add_(residual)


def _plan(args: LinearArgs) -> GemmPlan | None:
    """Returns the plan by which `linear` has one kernel for the layer that adapters fit into."""
    policy, weight = current_policy(), args.weight
    if weight.format.inputs != "none" or not loads(weight):
        return None
    if policy.deterministic:
        return fixed_plan(shape_of(args))
    fused = not ({"fusions", "skinny"} & policy.disabled)
    if len(args.x) > BUCKETS[-1] or not fused:
        return None
    plan = choose(args)
    apart = args.norm is None or plan.norm == "separate"
    return plan if plan.kernel == "skinny" and apart else None
