"""Low-rank adapters on linear layers: two kernels for each layer of a step that has any.

Tokens are grouped by their slot once for all layers, into tiles of one slot. The first kernel
multiplies tiles with A, cut along the inputs so that few tiles fill the card; the second adds the
parts up, multiplies with B and adds to the layer's result (Chen et al. 2023, "Punica"; Sheng et al.
2023, "S-LoRA"). Each program walks over the tiles that there are, so padding costs nothing, and a
slot's weights are read once for each tile of its tokens.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.adapters import HEAD, WORDS, AdapterRows, SlotWeights
from quire.ops.arguments import Activation, RmsScale
from quire.ops.choose import current_policy
from quire.ops.reference.quantized import dequantize
from quire.ops.rows import StepRows
from quire.ops.triton.gemm import LinearArgs, choose, run
from quire.ops.triton.gemm_plan import GemmPlan, shape_of
from quire.ops.triton.gemm_table import BUCKETS, fixed_plan
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.linear import linear, loads
from quire.ops.triton.norm import rms_norm
from quire.ops.triton.round_inputs import round_inputs
from quire.ops.weight import Weight

_FEW_TOKENS = 256
"""Up to here tiles are as small as tensor cores take them: most hold few tokens."""
_OUTPUTS = 128
"""Outputs of a tile of the second kernel."""
_INPUTS = 128
"""Inputs that the first kernel multiplies at once."""
_BLOCK = 256


@triton.jit
def _token_slots(
    lanes_ptr, query_start_ptr, column_ptr, slots_ptr, num_rows, num_tokens,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes each token's slot. Grid (rows + 1); the last program marks the padding."""
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
    """Writes the tokens of one slot behind those of all slots before it, and their number. Grid
    (slots)."""
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
    counts_ptr, tiles_ptr, count_ptr, num_slots, most,
    TILE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Cuts the tokens of each slot into tiles. Grid (1)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.arange(0, SLOTS)
    tokens = tl.load(counts_ptr + slot, mask=slot < num_slots, other=0)
    starts = tl.cumsum(tokens, 0) - tokens
    tiles = (tokens + TILE - 1) // TILE
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tl.store(count_ptr, total)
    for at in range(0, total, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        own = slot[None, :] == owner[:, None]
        nth = tile - tl.sum(tl.where(own, (ends - tiles)[None, :], 0), 1)
        first = tl.sum(tl.where(own, starts[None, :], 0), 1) + nth * TILE
        left = tl.sum(tl.where(own, tokens[None, :], 0), 1) - nth * TILE
        there = (tile < total) & (tile < most)
        line = tiles_ptr + tile * 3
        tl.store(line, owner, mask=there)
        tl.store(line + 1, first, mask=there)
        tl.store(line + 2, tl.minimum(left, TILE), mask=there)


def adapter_rows(rows: StepRows, column: Tensor, *, num_tokens: int, num_slots: int) -> AdapterRows:
    """See `ops.reference.adapters.adapter_rows`."""
    device, pdl = column.device, traits(column.device).pdl
    few = num_tokens <= _FEW_TOKENS or current_policy().deterministic
    tile = 16 if few else 64
    most = min(num_tokens, num_slots + num_tokens // tile)
    made = torch.empty(2 * num_tokens + num_slots + 3 * most + 1, dtype=torch.int32, device=device)
    slots, order, counts, tiles, count = made.split(
        [num_tokens, num_tokens, num_slots, 3 * most, 1]
    )
    count_rows = len(rows.lanes)
    launch(_token_slots, (count_rows + 1,))(
        rows.lanes, rows.query_start, column, slots, count_rows, num_tokens,
        BLOCK=_BLOCK, PDL=pdl, **options(pdl, num_warps=1),
    )  # fmt: skip
    launch(_group_tokens, (num_slots,))(
        slots, order, counts, num_tokens, BLOCK=_BLOCK, PDL=pdl, **options(pdl, num_warps=4)
    )
    launch(_cut_tiles, (1,))(
        counts, tiles, count, num_slots, most, TILE=tile,
        SLOTS=triton.next_power_of_2(num_slots), BLOCK=32, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return AdapterRows(slots, order, tiles.view(most, 3), count, tile)


@triton.jit
def _shrink(
    x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, norm_ptr, inner_ptr, squares_ptr,
    T, K, slot_stride, table_stride, x_stride, inner_width, part,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiplies tiles of x [T, K], or of x times a norm's weight, with A of their slot: sums over
    each of SPLITS parts of K, fp32 [SPLITS, T, inner_width]. With NORM also the sums of squares of
    x, [SPLITS, T]. part: of K, a multiple of BK. EVEN: the parts are equal."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    items = tl.load(count_ptr) * SPLITS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = tiles_ptr + (item // SPLITS) * 3
        split = item % SPLITS
        slot = tl.load(tile).to(tl.int64)
        first = tl.load(tile + 1)
        tokens = tl.load(tile + 2)
        line = table_ptr + slot * table_stride
        total = tl.load(line + 1)
        m = tl.arange(0, BM)
        token = tl.load(order_ptr + first + m, mask=m < tokens, other=0).to(tl.int64)
        a_ptr = memory_ptr + slot * slot_stride + tl.multiple_of(tl.load(line), 16)
        begin = split * part
        end = begin + part
        if not EVEN:
            end = tl.minimum(K, end)
        for r0 in range(0, total, BR):
            r = r0 + tl.arange(0, BR)
            acc = tl.zeros([BM, BR], tl.float32)
            squares = tl.zeros([BM], tl.float32)
            for k0 in range(begin, end, BK):
                k = k0 + tl.arange(0, BK)
                x_mask = (m < tokens)[:, None]
                a_mask = (r < total)[None, :]
                if not EVEN:
                    x_mask = x_mask & (k < end)[None, :]
                    a_mask = a_mask & (k < end)[:, None]
                x = tl.load(x_ptr + token[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
                a = tl.load(a_ptr + r[None, :] * K + k[:, None], mask=a_mask, other=0.0)
                if NORM:
                    xf = x.to(tl.float32)
                    squares += tl.sum(xf * xf, 1)
                    g = tl.load(norm_ptr + k, mask=k < end, other=0.0).to(tl.float32)
                    x = (xf * g[None, :]).to(x.dtype)
                if UPCAST:
                    x = x.to(tl.float32)
                    a = a.to(tl.float32)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            line_of = split * T + token
            tl.store(
                inner_ptr + line_of[:, None] * inner_width + r[None, :], acc,
                mask=(m < tokens)[:, None] & (r < total)[None, :],
            )  # fmt: skip
            if NORM:
                tl.store(squares_ptr + line_of, squares, mask=m < tokens)


@triton.jit
def _expand(
    out_ptr, inner_ptr, squares_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr,
    blocks_ptr, T, K, num_blocks, slot_stride, table_stride, out_stride, inner_width,
    inner_stride, eps,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, HEAD: tl.constexpr, WORDS: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds scale * B times the sums of `_shrink` to tiles of `out`. blocks: int32 [num_blocks, 4],
    runs of at most BN outputs of one projection: its place, the first output in the projection,
    the first in the layer, how many. EVEN: all are of BN outputs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    items = tl.load(count_ptr) * num_blocks
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        tile = tiles_ptr + (item // num_blocks) * 3
        block = blocks_ptr + (item % num_blocks) * 4
        slot = tl.load(tile).to(tl.int64)
        line = table_ptr + slot * table_stride
        own = line + HEAD + WORDS * tl.load(block)
        rank = tl.load(own + 1)
        if rank > 0:
            first = tl.load(tile + 1)
            tokens = tl.load(tile + 2)
            m = tl.arange(0, BM)
            token = tl.load(order_ptr + first + m, mask=m < tokens, other=0).to(tl.int64)
            n = tl.arange(0, BN)
            column = tl.load(block + 2)
            if EVEN:
                column = tl.multiple_of(column, 16)
            width = tl.multiple_of((rank + 7) // 8 * 8, 8)
            b_row = (tl.load(block + 1) + n) * width
            b_ptr = memory_ptr + slot * slot_stride + tl.multiple_of(tl.load(own), 16)
            inner = inner_ptr + token[:, None] * inner_width + tl.load(own + 2)
            acc = tl.zeros([BM, BN], tl.float32)
            for r0 in range(0, rank, BR):
                r = r0 + tl.arange(0, BR)
                kept = (m < tokens)[:, None] & (r < rank)[None, :]
                h = tl.zeros([BM, BR], tl.float32)
                for split in tl.static_range(SPLITS):
                    h += tl.load(inner + split * inner_stride + r[None, :], mask=kept, other=0.0)
                b_mask = (r < width)[:, None]
                if not EVEN:
                    b_mask = b_mask & (n < tl.load(block + 3))[None, :]
                b = tl.load(b_ptr + b_row[None, :] + r[:, None], mask=b_mask, other=0.0)
                if NORM:
                    squares = tl.zeros([BM], tl.float32)
                    for split in tl.static_range(SPLITS):
                        squares += tl.load(
                            squares_ptr + split * T + token, mask=m < tokens, other=0.0
                        )
                    h *= tl.rsqrt(squares / K + eps)[:, None]
                if UPCAST:
                    b = b.to(tl.float32)
                acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
            scale = tl.load(own + 3).to(tl.float32, bitcast=True)
            at = out_ptr + token[:, None] * out_stride + (column + n)[None, :]
            mask = (m < tokens)[:, None]
            if not EVEN:
                mask = mask & (n < tl.load(block + 3))[None, :]
            before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, (before + scale * acc).to(out_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=1024)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the runs of outputs that the second kernel takes one by one."""
    found, start = [], 0
    for place, size in enumerate(sizes):
        for at in range(0, size, _OUTPUTS):
            found.append((place, at, start + at, min(_OUTPUTS, size - at)))
        start += size
    return torch.tensor(found, dtype=torch.int32, device=device)


def _splits(tokens: int, inputs: int) -> int:
    """Returns into how many parts the inputs are cut: many where tiles may be few."""
    wanted = 8 if tokens <= 64 or current_policy().deterministic else 4 if tokens <= 256 else 1
    while wanted > 1 and wanted * _INPUTS > inputs:
        wanted //= 2
    return wanted


def _width(rows: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rows)))


def add_adapters(
    out: Tensor, x: Tensor, weights: SlotWeights, rows: AdapterRows, norm: RmsScale | None = None
) -> Tensor:
    """See `ops.reference.adapters.add_adapters`. The norm's scale is applied to the sums."""
    tokens, device = len(x), x.device
    if norm is not None and x.dtype == torch.float16:
        # An unscaled x * weight may exceed fp16.
        x, norm = rms_norm(x, *norm), None
    inputs, memory, table = weights.inputs, weights.memory, weights.table
    splits, card = _splits(tokens, inputs), traits(device)
    part = triton.cdiv(triton.cdiv(inputs, splits), _INPUTS) * _INPUTS
    most, width = len(rows.tiles), weights.rows
    inner = torch.empty(splits * tokens * (width + 1), dtype=torch.float32, device=device)
    squares = inner[splits * tokens * width :]
    upcast = x.dtype == torch.bfloat16 and not card.bf16
    common = {
        "BM": rows.tile, "SPLITS": splits, "NORM": norm is not None, "UPCAST": upcast,
        "PDL": card.pdl,
    }  # fmt: skip
    launch(_shrink, (min(most * splits, 4 * card.num_sms),))(
        x, memory, table, rows.order, rows.tiles, rows.num_tiles,
        x if norm is None else norm.weight, inner, squares, tokens, inputs, memory.stride(0),
        table.stride(0), x.stride(0), width, part,
        BR=_width(width), BK=_INPUTS, EVEN=part * splits == inputs, **common,
        **options(card.pdl, num_warps=4, num_stages=3),
    )  # fmt: skip
    blocks = _blocks(weights.sizes, device)
    launch(_expand, (min(most * len(blocks), 16 * card.num_sms),))(
        out, inner, squares, memory, table, rows.order, rows.tiles, rows.num_tiles, blocks, tokens,
        inputs, len(blocks), memory.stride(0), table.stride(0), out.stride(0), width,
        tokens * width, 0.0 if norm is None else norm.eps,
        BN=_OUTPUTS, BR=_width(weights.rank),
        EVEN=all(size % _OUTPUTS == 0 for size in weights.sizes), HEAD=HEAD, WORDS=WORDS, **common,
        **options(card.pdl, num_warps=4, num_stages=2),
    )  # fmt: skip
    return out


def preactivation(
    x: Tensor, weight: Weight, bias: Tensor | None, norm: RmsScale | None, act: Activation
) -> Tensor:
    """See `ops.reference.adapters.preactivation`: sums of the same kernel and tiles that `linear`
    would apply the activation in, fp32."""
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
    if norm is not None and plan.norm == "separate":
        args = replace(args, x=rms_norm(x, *norm), norm=None)
    sums = replace(args, apart=True) if args.gated else replace(args, act=None)
    return run(sums, plan, out_dtype=torch.float32)


def _plan(args: LinearArgs) -> GemmPlan | None:
    """Returns the plan by which `linear` applies the activation in a kernel of ours, if it does."""
    policy = current_policy()
    if policy.deterministic:
        return fixed_plan(shape_of(args))
    few = len(args.x) <= BUCKETS[-1]
    if not few or "fusions" in policy.disabled or "skinny" in policy.disabled:
        return None
    plan = choose(args)
    return None if plan.kernel == "torch" else plan
