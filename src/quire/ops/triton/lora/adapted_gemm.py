"""Linear layers with low-rank adapters for few rows: one kernel for both.

The kernel is `skinny_kernel` with more programs at the start, which multiply by A. Each program of
the layer adds B times their result to its tile, after its own sums are complete. So a layer with
adapters needs no more launches than one without. The layer's sums equal those of `skinny_kernel`,
so rows without an adapter keep their bits."""

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
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import linear, loads
from quire.ops.triton.lora.adapter_tiles import (
    TURNS,
    ask_for_a,
    cut,
    expand,
    expand_pair,
    find_b,
    projections_of,
    shrink,
    slots_of,
)
from quire.ops.triton.lora.adapters import (
    AdapterTiles,
    add_adapters,
    counters_of,
    preactivation,
    shrink_buffers,
)
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.common import (
    gdc_launch_dependents,
    prefetch_rows,
    tile_rows,
    wait_for_predecessor,
)
from quire.ops.triton.products.plan import GemmPlan, shape_of
from quire.ops.triton.products.quantized_tiles import Operands
from quire.ops.triton.products.skinny import MAX_SPLIT_TILES, product, reduce_split_k, store_tile
from quire.ops.triton.products.small import LinearArgs, choose, default_workspace
from quire.ops.triton.products.table import BUCKETS, fixed_plan
from quire.ops.weight import Weight

STAGES = 4
"""Stages of the loop over A."""
_WORKERS = 64
"""The most programs that multiply by A. They must all run on the device at once, because programs
of the layer wait for them."""
_PARTS = 8
"""The most parts of a tile's inputs."""
COLUMNS = 64
"""Ranks that a step of `expand` multiplies. The ranks of all slots are divided into such steps."""
GATED_COLUMNS = 32
"""Ranks that a step of `expand_pair` multiplies. It has no registers for more."""


@triton.jit(
    do_not_specialize=[
        "M", "prefetch_k", "steps_per_split", "workers", "most_parts", "turn",
    ]
)  # fmt: skip
def _adapted_kernel(
    x_ptr, w_ptr, w_scale_ptr, w_zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    slots_ptr, order_ptr, tiles_ptr, count_ptr, memory_ptr, table_ptr, starts_ptr, inner_ptr,
    inner_parts_ptr, tile_counters_ptr,
    M, N, K, stride_xm, stride_wn, stride_sn, stride_rm, stride_ym, steps_per_split, prefetch_k,
    workers, most_parts, turn, tiles_n, splits, slot_stride, table_stride,
    inner_stride, ranks,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, UPCAST: tl.constexpr,
    PDL: tl.constexpr, EAGER: tl.constexpr, PREFETCH: tl.constexpr,
    TILE: tl.constexpr, BR: tl.constexpr, INPUTS: tl.constexpr,
    PLACES: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    FIXED: tl.constexpr, EVEN_INPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes y [M, N] as `skinny_kernel` does, plus adapters. The norm of x was applied before.

    Grid: `workers` programs that multiply by A, then N tiles, K splits, M tiles. For `turn` see
    TURNS."""
    if PDL and EAGER:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    item = tl.maximum(pid - workers, 0)
    R: tl.constexpr = 2 * BN if GLU else BN
    pid_n = item % tiles_n
    pid_k = item // tiles_n % splits
    pid_m = item // tiles_n // splits
    rows = tile_rows(pid_n, N, BN, GLU)
    ms = pid_m * BM + tl.arange(0, BM)
    k_begin = pid_k * steps_per_split * BK
    k_end = tl.minimum(K, k_begin + steps_per_split * BK)
    count = tl.load(count_ptr)
    # The slots are loaded early, because no work would hide their latency where they are used.
    own = tl.load(slots_ptr + ms, mask=ms < M, other=-1)
    # A tile's programs share the work for its adapters, unless the layer's scales would then be
    # applied to the adapters' sums too.
    SHARED: tl.constexpr = SPLIT and not HAS_SCALES
    part = 0
    parts = 1
    if SHARED:
        part = pid_k
        parts = splits
    used = tl.load(count_ptr + 1)
    EACH: tl.constexpr = WIDTH if WIDTH < COLUMNS else COLUMNS
    SLOTS: tl.constexpr = COLUMNS // EACH
    CHUNKS: tl.constexpr = (RANK + EACH - 1) // EACH
    if PREFETCH:
        if pid >= workers:
            STEP: tl.constexpr = 8 if BITS == 4 else 1
            first = k_begin // STEP
            last_k = tl.minimum(k_end // STEP, first + prefetch_k)
            prefetch_rows(w_ptr, rows, stride_wn, first, last_k)
        if pid < workers:
            ask_for_a(
                pid, workers, count, memory_ptr, table_ptr, tiles_ptr, K, slot_stride,
                table_stride, most_parts, BR, INPUTS, FIXED, 4,
            )  # fmt: skip
    # The addresses of B are loaded early as well.
    slot = slots_of(part, used, tiles_ptr, SLOTS, CHUNKS)
    slot1 = slots_of(part + parts, used, tiles_ptr, SLOTS, CHUNKS)
    slot2 = slots_of(part + 2 * parts, used, tiles_ptr, SLOTS, CHUNKS)
    place = 0
    if not GLU:
        place, last_place, start, end = projections_of(pid_n * BN, starts_ptr, BN, PLACES)
    at, rank = find_b(slot, place, table_ptr, table_stride)
    at1, rank1 = find_b(slot1, place, table_ptr, table_stride)
    if GLU:
        up_at, up_rank = find_b(slot, 1, table_ptr, table_stride)
        up_at1, up_rank1 = find_b(slot1, 1, table_ptr, table_stride)
    if PDL:
        if pid >= workers:
            wait_for_predecessor(EAGER)
        else:
            _, pieces = cut(count, K, workers, most_parts, INPUTS, FIXED)
            # Workers without work do not wait, because they would occupy multiprocessors that
            # programs with a tile need.
            if pid < tl.maximum(1, count * pieces):
                wait_for_predecessor(EAGER)
    if pid == 0:
        tl.store(tile_counters_ptr + TURNS + 1 - turn, 0)
    ready_ptr = tile_counters_ptr + TURNS + turn
    if pid < workers:
        shrink(
            pid, workers, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr,
            x_ptr, inner_ptr, inner_parts_ptr, tile_counters_ptr, ready_ptr, K, slot_stride,
            table_stride, stride_xm, inner_stride, ranks, 0.0, most_parts, TILE, BR, INPUTS,
            PLACES, WIDTH, FIXED, EVEN_INPUTS, False, UPCAST, STAGES, True,
        )  # fmt: skip
    if pid >= workers:
        cols = pid_n * BN + tl.arange(0, BN)
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
        if SPLIT and not SHARED:
            tile = pid_m * tiles_n + pid_n
            acc, last = reduce_split_k(acc, parts_ptr, counters_ptr, tile, pid_k, splits, BM, R)
        if last:
            if HAS_SCALES:
                acc *= tl.load(w_scale_ptr + rows * stride_sn).to(tl.float32)[None, :]
            if count > 0:
                if GLU:
                    added = expand_pair(
                        tl.minimum(cols, N - 1), ms, own, part, parts, used, slot, at, rank, slot1,
                        at1, rank1, slot2, up_at, up_rank, up_at1, up_rank1, ready_ptr, count,
                        memory_ptr, table_ptr, tiles_ptr, inner_ptr, slot_stride, table_stride,
                        inner_stride, BM, BN, RANK, WIDTH, COLUMNS, UPCAST, PDL,
                    )  # fmt: skip
                else:
                    added = expand(
                        rows, place, last_place, start, end, ms, own, part, parts, used, slot, at,
                        rank, slot1, at1, rank1, slot2, ready_ptr, count, memory_ptr, table_ptr,
                        tiles_ptr, inner_ptr, starts_ptr, slot_stride, table_stride, inner_stride,
                        BM, BN, PLACES, RANK, WIDTH, COLUMNS, UPCAST, PDL,
                    )  # fmt: skip
                acc = tl.where((own >= 0)[:, None], acc + added, acc)
        if SHARED:
            tile = pid_m * tiles_n + pid_n
            acc, last = reduce_split_k(acc, parts_ptr, counters_ptr, tile, pid_k, splits, BM, R)
        if last:
            store_tile(
                acc, w_scale_ptr, bias_ptr, res_ptr, y_ptr, rows, ms, cols, M, N, stride_sn,
                stride_rm, stride_ym, GLU, ACT, False, HAS_BIAS, HAS_RES, False,
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _starts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the first output of each of a layer's projections, then the end of the last one."""
    starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def adapted_gemm(
    args: LinearArgs, plan: GemmPlan, weights: SlotWeights, rows: AdapterRows
) -> Tensor:
    """Returns the layer `args`, which has no norm, with adapters, by a plan of `skinny_gemm`."""
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
    tiles = AdapterTiles.choose(x, weights, most_inputs=256)
    counters = counters_of(x.device)
    # The interpreter runs programs one after the other, so the first program must do all work for
    # which others wait.
    most = _WORKERS if x.device.type == "cuda" else 1
    workers, fixed, sums = shrink_buffers(x, weights, rows, tiles, most)
    values = operands.values
    launch(_adapted_kernel, (workers + tiles_n * splits * tiles_m,))(
        x, values, operands.scales, operands.zeros, x if args.bias is None else args.bias,
        x if res is None else res, out, parts, workspace.counters, rows.slots, rows.order,
        rows.tiles, rows.num_tiles, weights.memory, weights.table,
        _starts(weights.sizes, x.device), tiles.inner, sums, counters.words,
        m, n, k, x.stride(0), values.stride(0), operands.scales.stride(0),
        0 if res is None else res.stride(0), out.stride(0), per_split,
        plan.prefetch // values.element_size(), workers, _PARTS, counters.take_turn(),
        tiles_n, splits, weights.memory.stride(0), weights.table.stride(0), tiles.inner.stride(0),
        weights.rows,
        BM=plan.bm, BN=plan.bn, BK=plan.bk, SPLIT=splits > 1, SWAP=plan.swap,
        EVEN=k % plan.bk == 0, GLU=args.gated, ACT=args.act_name,
        HAS_SCALES=operands.has_scales, HAS_BIAS=args.bias is not None, HAS_RES=res is not None,
        BITS=operands.bits, GROUP=operands.group, HAS_ZEROS=operands.has_zeros,
        UPCAST=x.dtype == torch.bfloat16 and not card.bf16, PDL=card.pdl, EAGER=plan.eager,
        PREFETCH=card.pdl, TILE=rows.tile, BR=tiles.br, INPUTS=tiles.bk,
        PLACES=len(weights.sizes), RANK=weights.rank, WIDTH=tiles.width,
        COLUMNS=GATED_COLUMNS if args.gated else COLUMNS, FIXED=fixed,
        EVEN_INPUTS=k % tiles.bk == 0, STAGES=STAGES,
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
    """Returns the plan by which `linear` runs the layer in one kernel that can include adapters, or
    None."""
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
