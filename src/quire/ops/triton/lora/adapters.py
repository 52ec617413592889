"""Low-rank adapters on linear layers of any kind: a kernel after the layer's own.

Tokens are grouped by slot once for all layers, into tiles of one slot. Programs compute only tiles
that exist, so padding costs no time. A slot's weights are read once for each tile of its tokens.
`adapted_gemm` serves layers that need no separate kernel."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.adapters import AdapterRows, SlotWeights
from quire.ops.arguments import Activation, RmsScale
from quire.ops.choose import current_policy
from quire.ops.reference.quantized import dequantize
from quire.ops.rows import StepRows
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import linear, loads
from quire.ops.triton.lora.adapter_tiles import (
    HEAD_WORDS,
    PLACE_WORDS,
    READY,
    TURNS,
    await_tiles,
    end_wait,
    shrink,
)
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.products.plan import GemmPlan, shape_of
from quire.ops.triton.products.round_inputs import round_inputs
from quire.ops.triton.products.small import LinearArgs, choose, fuses_norm, run
from quire.ops.triton.products.table import BUCKETS, fixed_plan
from quire.ops.weight import Weight

_FEW_TOKENS = 256
"""Up to this number of tokens, tiles have the smallest size that tensor cores support, because most
tiles have few tokens."""
_OUTPUTS = 128
"""Outputs of a tile of `_adapt`."""
VALUES = 8192
"""Values of A that a step of `shrink` loads."""
STAGES = 4
"""Stages of the loop over these steps."""
_EXPANDERS = 2
"""Programs per multiprocessor that multiply by B."""
_FIXED = 8
"""Parts of the inputs under `--deterministic`."""
_MOST_COUNTERS = 1 << 16
_BLOCK = 256


@triton.jit
def _token_slots(
    lanes_ptr, query_start_ptr, column_ptr, slots_ptr, num_rows, num_tokens,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes each token's slot. Grid: (rows + 1). The last program marks the padding."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(query_start_ptr + row)
    end = num_tokens
    slot = -1
    if row < num_rows:
        end = tl.load(query_start_ptr + row + 1)
        lane = tl.load(lanes_ptr + row)
        if lane >= 0:
            slot = tl.load(column_ptr + lane)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        tl.store(slots_ptr + token, tl.zeros([BLOCK], tl.int32) + slot, mask=token < end)


@triton.jit
def _group_tokens(
    slots_ptr, order_ptr, counts_ptr, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Writes the tokens of one slot after the tokens of all earlier slots, and their number.

    Grid: (slots)."""
    slot = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_tokens, BLOCK):
        token = at + tl.arange(0, BLOCK)
        own = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        before += ((own >= 0) & (own < slot)).to(tl.int32)
    place = tl.sum(before, 0)
    first = place
    for at in range(0, num_tokens, BLOCK):
        token = at + tl.arange(0, BLOCK)
        own = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
        mine = (own == slot).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, token, mask=mine != 0)
        place += tl.sum(mine, 0)
    tl.store(counts_ptr + slot, place - first)


@triton.jit
def _cut_tiles(
    counts_ptr, tiles_ptr, count_ptr, counters_ptr, num_slots, most,
    TILE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Cuts the tokens of each slot into tiles, and clears the counters of `TURNS`. Grid: (1)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(counters_ptr + TURNS + tl.arange(0, 2), tl.zeros([2], tl.int32))
    slot = tl.arange(0, SLOTS)
    tokens = tl.load(counts_ptr + slot, mask=slot < num_slots, other=0)
    starts = tl.cumsum(tokens, 0) - tokens
    tiles = (tokens + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    used = (tokens > 0).to(tl.int32)
    tl.store(count_ptr, total)
    tl.store(count_ptr + 1, tl.sum(used, 0))
    tl.store(tiles_ptr + (tl.cumsum(used, 0) - 1) * 4 + 3, slot, mask=tokens > 0)
    for at in range(0, total, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        own = slot[None, :] == owner[:, None]
        nth = tile - tl.sum(tl.where(own, (ends - tiles)[None, :], 0), 1)
        first = tl.sum(tl.where(own, starts[None, :], 0), 1) + nth * TILE
        left = tl.sum(tl.where(own, tokens[None, :], 0), 1) - nth * TILE
        there = (tile < total) & (tile < most)
        line = tiles_ptr + tile * 4
        tl.store(line, owner, mask=there)
        tl.store(line + 1, first, mask=there)
        tl.store(line + 2, tl.minimum(left, TILE), mask=there)


def adapter_rows(rows: StepRows, column: Tensor, *, num_tokens: int, num_slots: int) -> AdapterRows:
    """See `ops.reference.adapters.adapter_rows`."""
    device, pdl = column.device, traits(column.device).pdl
    few = num_tokens <= _FEW_TOKENS or current_policy().deterministic
    tile = 16 if few else 64
    most = min(num_tokens, num_slots + num_tokens // tile)
    sizes = [num_tokens, num_tokens, num_slots, 4 * most, 2]
    made = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    slots, order, counts, tiles, count = made.split(sizes)
    count_rows = len(rows.lanes)
    launch(_token_slots, (count_rows + 1,))(
        rows.lanes, rows.query_start, column, slots, count_rows, num_tokens,
        BLOCK=_BLOCK, PDL=pdl, **options(pdl, num_warps=1),
    )  # fmt: skip
    launch(_group_tokens, (num_slots,))(
        slots, order, counts, num_tokens, BLOCK=_BLOCK, PDL=pdl, **options(pdl, num_warps=4)
    )
    launch(_cut_tiles, (1,))(
        counts, tiles, count, counters_of(device).words, num_slots, most, TILE=tile,
        SLOTS=triton.next_power_of_2(num_slots), BLOCK=32, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return AdapterRows(slots, order, tiles.view(most, 4), count, tile)


@triton.jit
def _adapt(
    out_ptr, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, norm_ptr, inner_ptr,
    parts_ptr, counters_ptr, blocks_ptr, workers, K, num_blocks, slot_stride, table_stride,
    out_stride, x_stride, inner_stride, ranks, eps,
    SHRINK: tl.constexpr, EXPAND: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, EACH: tl.constexpr, PLACES: tl.constexpr,
    WIDTH: tl.constexpr, FIXED: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    NORM: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds B times the result of `shrink` to tiles of `out`, in one launch for both or in two.

    In a launch for both, the first `workers` programs shrink.

    Args:
        blocks_ptr: int32 [num_blocks, 4]. A line describes at most BN outputs of one projection:
            the projection's index, the first output in the projection, the first output in the
            layer, and the number of outputs.
        EVEN_N: all lines have BN outputs.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SHRINK and pid < workers:
        shrink(
            pid, workers, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, norm_ptr,
            inner_ptr, parts_ptr, counters_ptr, counters_ptr + READY, K, slot_stride, table_stride,
            x_stride, inner_stride, ranks, eps, 16, BM, BR, BK, PLACES, WIDTH, FIXED, EVEN_K, NORM,
            UPCAST, STAGES, EXPAND,
        )  # fmt: skip
    elif EXPAND:
        count = tl.load(count_ptr)
        start = pid
        programs = tl.num_programs(0)
        if SHRINK:
            start -= workers
            programs -= workers
            if count > 0:
                await_tiles(counters_ptr + READY, count, PDL)
                end_wait(counters_ptr, programs)
        for item in range(start, count * num_blocks, programs):
            tile = tiles_ptr + (item // num_blocks) * 4
            block = blocks_ptr + (item % num_blocks) * 4
            slot = tl.load(tile).to(tl.int64)
            place = tl.load(block)
            own = table_ptr + slot * table_stride + HEAD_WORDS + PLACE_WORDS * place
            rank = tl.load(own + 1)
            first = tl.load(tile + 1)
            tokens = tl.where(rank > 0, tl.load(tile + 2), 0)
            m = tl.arange(0, BM)
            token = tl.load(order_ptr + first + m, mask=m < tokens, other=0).to(tl.int64)
            n = tl.arange(0, BN)
            column = tl.load(block + 2)
            width = (rank + 7) // 8 * 8
            b_row = (tl.load(block + 1) + n) * width
            b_ptr = memory_ptr + slot * slot_stride + tl.multiple_of(tl.load(own), 16)
            at = out_ptr + token[:, None] * out_stride + (column + n)[None, :]
            mask = (m < tokens)[:, None]
            if EVEN_N:
                column = tl.multiple_of(column, 16)
            else:
                mask = mask & (n < tl.load(block + 3))[None, :]
            before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            acc = tl.zeros([BM, BN], tl.float32)
            for r0 in range(0, rank, EACH):
                r = r0 + tl.arange(0, EACH)
                kept = (m < tokens)[:, None] & (r < rank)[None, :]
                h_ptrs = inner_ptr + token[:, None] * inner_stride + (place * WIDTH + r)[None, :]
                h = tl.load(h_ptrs, mask=kept, other=0.0, cache_modifier=".cg")
                b_mask = (r < width)[:, None]
                if not EVEN_N:
                    b_mask = b_mask & (n < tl.load(block + 3))[None, :]
                b = tl.load(b_ptr + b_row[None, :] + r[:, None], mask=b_mask, other=0.0)
                if UPCAST:
                    h = h.to(tl.float32)
                    b = b.to(tl.float32)
                acc = tl.dot(h, b, acc, input_precision="ieee")
            tl.store(at, (before + acc).to(out_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=1024)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns `blocks_ptr` of `_adapt`."""
    found, start = [], 0
    for place, size in enumerate(sizes):
        for at in range(0, size, _OUTPUTS):
            found.append((place, at, start + at, min(_OUTPUTS, size - at)))
        start += size
    return torch.tensor(found, dtype=torch.int32, device=device)


@dataclass(slots=True)
class Counters:
    """Counters of the kernels that a thread launches on a device, zero at first.

    Attributes:
        words: the counters, int32.
        turn: 0 or 1, selects the counter of `TURNS` that the next kernel uses.
    """

    words: Tensor
    turn: int = 0

    def take_turn(self) -> int:
        self.turn = 1 - self.turn
        return self.turn


@functools.lru_cache(maxsize=64)
def _counters(device: torch.device, thread: int) -> Counters:
    return Counters(torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device))


def counters_of(device: torch.device) -> Counters:
    """Returns this thread's counters. The first call must not be made during a graph capture."""
    return _counters(device, threading.get_ident())


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Tile sizes and a buffer for the adapters of a layer.

    Attributes:
        width: columns of a projection in `inner`.
        br: rows of a tile of A.
        bk: inputs of a tile of A.
        inner: [T, projections * width], the product with A.
    """

    width: int
    br: int
    bk: int
    inner: Tensor

    @classmethod
    def choose(cls, x: Tensor, weights: SlotWeights, most_inputs: int = VALUES) -> AdapterTiles:
        places, device = len(weights.sizes), x.device
        width = triton.next_power_of_2(max(16, weights.rank))
        br = min(64, max(16, triton.next_power_of_2(weights.rows)))
        bk = min(most_inputs, VALUES // br, max(64, triton.next_power_of_2(weights.inputs)))
        inner = torch.empty(len(x), places * width, dtype=x.dtype, device=device)
        return cls(width, br, bk, inner)


def shrink_buffers(
    x: Tensor, weights: SlotWeights, rows: AdapterRows, tiles: AdapterTiles, most: int
) -> tuple[int, int, Tensor]:
    """Returns the number of programs of `shrink`, the fixed number of parts (or 0), and the memory
    for parts. There are at most `most` programs."""
    steps, count = triton.cdiv(weights.inputs, tiles.bk), len(rows.tiles)
    fixed = min(_FIXED, steps) if current_policy().deterministic else 0
    workers = max(1, min(most, count * (fixed or steps)))
    size = max(workers, count * fixed) * rows.tile * (weights.rows + 1)
    return workers, fixed, torch.empty(size, dtype=torch.float32, device=x.device)


def add_adapters(
    out: Tensor, x: Tensor, weights: SlotWeights, rows: AdapterRows, norm: RmsScale | None = None
) -> Tensor:
    """See `ops.reference.adapters.add_adapters`. The norm's scale is applied to the sums."""
    if norm is not None and x.dtype == torch.float16:
        # The norm is applied first, because x * weight without its scale may overflow fp16.
        x, norm = rms_norm(x, *norm), None
    memory, table, card = weights.memory, weights.table, traits(x.device)
    blocks, most = _blocks(weights.sizes, x.device), len(rows.tiles)
    tiles, few = AdapterTiles.choose(x, weights), len(x) <= _FEW_TOKENS
    workers, fixed, sums = shrink_buffers(x, weights, rows, tiles, card.num_sms)
    counters = counters_of(x.device).words
    expanders = min(most * len(blocks), (_EXPANDERS if few else 16) * card.num_sms)

    def start(programs: int, *, shrink: bool, expand: bool) -> None:
        launch(_adapt, (programs,))(
            out, x, memory, table, rows.order, rows.tiles, rows.num_tiles,
            x if norm is None else norm.weight, tiles.inner, sums, counters, blocks,
            workers, weights.inputs, len(blocks), memory.stride(0), table.stride(0),
            out.stride(0), x.stride(0), tiles.inner.stride(0), weights.rows,
            0.0 if norm is None else norm.eps, SHRINK=shrink, EXPAND=expand, BM=rows.tile,
            BR=tiles.br, BK=tiles.bk, BN=_OUTPUTS, EACH=min(64, tiles.width),
            PLACES=len(weights.sizes), WIDTH=tiles.width, FIXED=fixed,
            EVEN_K=weights.inputs % tiles.bk == 0,
            EVEN_N=all(size % _OUTPUTS == 0 for size in weights.sizes), NORM=norm is not None,
            UPCAST=x.dtype == torch.bfloat16 and not card.bf16, STAGES=STAGES, PDL=card.pdl,
            **options(card.pdl, num_warps=4),
        )  # fmt: skip

    if few:
        start(workers + expanders, shrink=True, expand=True)
    else:
        # With many tokens, waiting programs would occupy multiprocessors that others need.
        start(workers, shrink=True, expand=False)
        start(expanders, shrink=False, expand=True)
    return out


def preactivation(
    x: Tensor, weight: Weight, bias: Tensor | None, norm: RmsScale | None, act: Activation
) -> Tensor:
    """Returns the layer's fp32 sums before the activation.

    It uses the kernel and tiles in which `linear` would apply the activation."""
    if weight.format.inputs != "none":
        if norm is not None:
            x, norm = rms_norm(x, *norm), None
        x = round_inputs(x, weight)
    if weight.scales is not None and not loads(weight):
        weight = Weight.plain(dequantize(weight, x.dtype))
    args = LinearArgs(x, weight, bias, norm, None, act)
    plan = _plan(args)
    if plan is None:
        return linear(x, weight, bias, None, norm)
    if norm is not None and not fuses_norm(args, plan):
        args = replace(args, x=rms_norm(x, *norm), norm=None)
    sums = replace(args, apart=True) if args.gated else replace(args, act=None)
    return run(sums, plan, out_dtype=torch.float32)


def _plan(args: LinearArgs) -> GemmPlan | None:
    """Returns the plan by which `linear` applies the activation in a kernel of this package, or
    None."""
    policy = current_policy()
    if policy.deterministic:
        return fixed_plan(shape_of(args))
    few = len(args.x) <= BUCKETS[-1]
    if not few or "fusions" in policy.disabled or "skinny" in policy.disabled:
        return None
    plan = choose(args)
    return None if plan.kernel == "torch" else plan
