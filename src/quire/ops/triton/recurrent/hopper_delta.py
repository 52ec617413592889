"""The scan over chunks of the gated delta rule on Hopper cards, see `gated_delta_chunks.py`.

A program has three warpgroups. The first advances the state of 64 of a head's columns. The
transposed columns are the rows of wgmma's left operand, in registers. The tokens' proposed and
actual writes are held in the same way. The second warpgroup computes outputs from the states and
writes that the first leaves in shared memory. The third copies chunks into rings, ahead of both. So
the first warpgroup does only the work for which the next chunk waits."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.ops.triton.hopper_common import (
    barrier,
    copy_async,
    sums_layout,
    wait_and_release,
)

BV = gl.constexpr(64)
"""Columns of a program."""
STAGES = gl.constexpr(3)
"""Number of chunks in shared memory."""
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""The layout of copies of [64, 64], 16 bytes per thread."""


def takes(mixed: Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether the scan supports heads of these dimensions. It needs 16 bits and whole tiles."""
    whole = key_dim in (64, 128) and value_dim % 64 == 0 and mixed.stride(0) % 16 == 0
    return whole and mixed.dtype in (torch.bfloat16, torch.float16)


@gluon.jit
def _copy_chunk(
    queries, values, inverses, withins, vectors, left, key_step, mixed_stride, rings, stage,
    DK: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk. Tokens past the row's `left` remaining ones become zeros."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    q_ring, k_ring, v_ring, inverse_ring, within_ring, vector_ring = rings
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    column = gl.arange(0, DK, layout=gl.SliceLayout(0, wide))
    at = token[:, None] * mixed_stride + column[None, :]
    here = (token < left)[:, None] & (column < DK)[None, :]
    copy_async(k_ring.index(stage), queries + key_step + at, mask=here)
    copy_async(q_ring.index(stage), queries + at, mask=here)
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, _ROWS))
    at = token[:, None] * mixed_stride + column[None, :]
    here = (token < left)[:, None] & (column < 64)[None, :]
    copy_async(v_ring.index(stage), values + at, mask=here)
    at = token[:, None] * 64 + column[None, :]
    here = (token < left * 64)[:, None] & (column < 64)[None, :]
    copy_async(inverse_ring.index(stage), inverses + at, mask=here)
    copy_async(within_ring.index(stage), withins + at, mask=here)
    place = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [4], [0]))
    here = place < left * 256
    copy_async(vector_ring.index(stage), vectors + place, mask=here)
    async_copy.commit_group()


@gluon.jit
def _copy_chunks(
    queries, values, inverses, withins, vectors, length, heads, key_step, mixed_stride, rings,
    ready, empty, COUNT: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Copies chunks into the rings. Each copy waits until the third last chunk has been used, and
    signals that the previous chunk has arrived."""
    stage = 0
    last = 0
    turn = 1
    for base in range(0, length, 64):
        mbarrier.wait(empty.index(stage), turn)
        _copy_chunk(
            queries, values, inverses, withins, vectors, length - base, key_step, mixed_stride,
            rings, stage, DK,
        )  # fmt: skip
        if base > 0:
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready.index(last))
        last = stage
        turn = gl.where(stage == STAGES - 1, turn ^ 1, turn)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        queries += 64 * mixed_stride
        values += 64 * mixed_stride
        inverses += heads * 4096
        withins += heads * 4096
        vectors += heads * COUNT * 64
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready.index(last), pred=length > 0)


@gluon.jit
def _compute_outputs(
    outputs, length, heads, value_dim, rings, narrow, new, turned, ready, empty, bars,
    DK: gl.constexpr,
):  # fmt: skip
    """Computes the transposed outputs from a chunk's queries, the state before the chunk, and its
    tokens' writes."""
    kind: gl.constexpr = narrow.dtype
    sums: gl.constexpr = sums_layout(64)
    q_ring, within_ring, vector_ring = rings
    narrow_full, narrow_free, new_full, new_free = bars
    token = gl.arange(0, 64, layout=gl.SliceLayout(1, _ROWS))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, _ROWS))
    of_outputs = token[:, None] * (heads * value_dim) + column[None, :]
    zeros = gl.zeros([64, 64], gl.float32, sums)
    stage = 0
    turn = 0
    side = 0
    for base in range(0, length, 64):
        mbarrier.wait(ready.index(stage), turn)
        mbarrier.wait(narrow_full, side)
        q = q_ring.index(stage).permute((1, 0))
        out = warpgroup_mma(narrow, q, zeros, use_acc=False, is_async=True)
        factor = vector_ring.index(stage).slice(64, 64).load(gl.SliceLayout(0, sums))
        out = warpgroup_mma_wait(0, deps=[out])
        barrier()
        mbarrier.arrive(narrow_free)
        out = out * factor[None, :]
        mbarrier.wait(new_full, side)
        within = within_ring.index(stage).permute((1, 0))
        out = warpgroup_mma(new, within, out, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        turned.permute((1, 0)).store(out.to(kind))
        barrier()
        mbarrier.arrive(new_free)
        mbarrier.arrive(empty.index(stage))
        gl.store(outputs + of_outputs, turned.load(_ROWS), mask=(base + token < length)[:, None])
        outputs += 64 * heads * value_dim
        side ^= 1
        turn = gl.where(stage == STAGES - 1, turn ^ 1, turn)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def _advance(
    state_ptr, base_ptr, table, remaining, length, start, active, head, block, key_heads, heads,
    value_dim, state_stride, base_stride, rings, narrow, new_shared, ready, empty, bars,
    COUNT: gl.constexpr, SAVES: gl.constexpr, DRAFTS: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Advances the state from chunk to chunk.

    It stores the previous state and the tokens' writes for `_compute_outputs`, in 16 bits. Each
    barrier of `bars` is used once per chunk."""
    kind: gl.constexpr = narrow.dtype
    sums: gl.constexpr = sums_layout(64)
    state_layout: gl.constexpr = sums_layout(DK)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    state_operand: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    tokens: gl.constexpr = gl.SliceLayout(0, sums)
    k_ring, v_ring, inverse_ring, vector_ring = rings
    narrow_full, narrow_free, new_full, new_free = bars
    slot_of_row = gl.load(table).to(gl.int64)
    i = gl.arange(0, DK, layout=gl.SliceLayout(0, state_layout))
    j = block * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, state_layout))
    at = head * DK * value_dim + i[None, :] * value_dim + j[:, None]
    entry = 2 * key_heads * DK + heads * value_dim + head * value_dim + j
    known_keys = (i < gl.where(active & (start > 0), DK, 0))[None, :] & (j < value_dim)[:, None]
    matrix = gl.load(state_ptr + slot_of_row * state_stride + at, mask=known_keys, other=0.0)
    remains = gl.load(remaining, mask=length > 0, other=0.0)
    zeros = gl.zeros([64, 64], gl.float32, sums)
    stage = 0
    turn = 0
    side = 0
    before = 0
    begin = 0
    while begin < length:
        # The saved state is that before the copy's chunk. `_advance_copies` adds the chunk's
        # tokens.
        until = length
        for each in range(SAVES):
            end = gl.load(table + 1 + 2 * each) - start
            if (end > begin) & (end <= gl.minimum(begin + 64, length)):
                slot = gl.load(table + 2 + 2 * each).to(gl.int64)
                gl.store(state_ptr + slot * state_stride + at, matrix)
                if DRAFTS:
                    gl.store(base_ptr + slot * base_stride + entry, 2 * (start + end))
            chunk = (end - 1) // 64 * 64
            until = gl.where((end > 0) & (chunk > begin), gl.minimum(until, chunk), until)
        for base in range(begin, until, 64):
            remaining += heads * COUNT * 64
            next_remains = gl.load(remaining, mask=base + 64 < length, other=0.0)
            mbarrier.wait(ready.index(stage), turn)
            k, factors = k_ring.index(stage), vector_ring.index(stage)
            rounded = matrix.to(kind)
            known = warpgroup_mma(
                gl.convert_layout(rounded, operand), k.permute((1, 0)), zeros, use_acc=False,
                is_async=True,
            )  # fmt: skip
            mbarrier.wait(narrow_free, side ^ 1)
            narrow.store(rounded)
            fence_async_shared()
            barrier()
            mbarrier.arrive(narrow_full)
            mbarrier.arrive(empty.index(before), pred=base > 0)
            v = v_ring.index(stage).permute((1, 0)).load(sums).to(gl.float32)
            known_factor = factors.slice(0, 64).load(tokens)
            known = warpgroup_mma_wait(0, deps=[known])
            wanted = gl.convert_layout((v - known * known_factor[None, :]).to(kind), operand)
            inverse = inverse_ring.index(stage).permute((1, 0))
            new = warpgroup_mma(wanted, inverse, zeros, use_acc=False, is_async=True)
            left = factors.slice(128, 64).load(tokens)
            matrix = matrix * remains
            new = warpgroup_mma_wait(0, deps=[new])
            part = gl.convert_layout((new * left[None, :]).to(kind), state_operand)
            matrix = warpgroup_mma(part, k, matrix, is_async=True)
            mbarrier.wait(new_free, side ^ 1)
            new_shared.store(new.to(kind))
            fence_async_shared()
            barrier()
            mbarrier.arrive(new_full)
            matrix = warpgroup_mma_wait(0, deps=[matrix])
            remains = next_remains
            before = stage
            side ^= 1
            turn = gl.where(stage == STAGES - 1, turn ^ 1, turn)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        begin = until
    here = (i < gl.where(active, DK, 0))[None, :] & (j < value_dim)[:, None]
    gl.store(state_ptr + slot_of_row * state_stride + at, matrix, mask=here)
    if DRAFTS:
        if active:
            gl.store(base_ptr + slot_of_row * base_stride + entry, 2 * (start + length))


@gluon.jit
def delta_scan(
    mixed_ptr, state_ptr, out_ptr, inverse_ptr, within_ptr, vectors_ptr, ids_ptr, lanes_ptr,
    query_start_ptr, seq_lens_ptr, table_ptr, base_ptr, key_heads, heads, key_dim, value_dim,
    mixed_stride, state_stride, table_stride, base_stride, shortest,
    COUNT: gl.constexpr, SAVES: gl.constexpr, DRAFTS: gl.constexpr, DK: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes outputs and the new state, see `gated_delta_chunks._scan`.

    Grid: (blocks of a head's width, value heads, rows)."""
    block, head, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    kind: gl.constexpr = mixed_ptr.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(kind, [STAGES, 64, DK], shared)
    k_ring = gl.allocate_shared_memory(kind, [STAGES, 64, DK], shared)
    v_ring = gl.allocate_shared_memory(kind, [STAGES, 64, BV], shared)
    inverse_ring = gl.allocate_shared_memory(kind, [STAGES, 64, 64], shared)
    within_ring = gl.allocate_shared_memory(kind, [STAGES, 64, 64], shared)
    vector_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 256], flat)
    turned = gl.allocate_shared_memory(kind, [64, BV], shared)
    narrow = gl.allocate_shared_memory(kind, [BV, DK], shared)
    new = gl.allocate_shared_memory(kind, [BV, 64], shared)
    rings = (q_ring, k_ring, v_ring, inverse_ring, within_ring, vector_ring)
    # `ready` signals that a chunk has arrived, and `empty` that both readers have finished with it.
    # `handed` signals that the state and the writes are ready, and that they have been read.
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    handed = gl.allocate_shared_memory(gl.int64, [4, 1], bar)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for each in gl.static_range(4):
        mbarrier.init(handed.index(each), count=1)
    bars = (handed.index(0), handed.index(1), handed.index(2), handed.index(3))
    fence_async_shared()
    barrier()
    if PDL:
        wait_and_release()
    first = gl.load(query_start_ptr + row)
    length = gl.load(query_start_ptr + row + 1) - first
    lane = gl.load(lanes_ptr + row).to(gl.int64)
    active = (lane >= 0) & (length >= shortest)
    active = active & (gl.load(ids_ptr + first, mask=active, other=-1) >= 0)
    start = gl.load(seq_lens_ptr + row) - length
    length = gl.where(active, length, 0)
    lane = gl.where(active, lane, 0)
    table = table_ptr + lane * table_stride
    key_head = head // (heads // key_heads)
    of_row = mixed_ptr + first.to(gl.int64) * mixed_stride
    queries = of_row + key_head * DK
    values = of_row + 2 * key_heads * DK + head * value_dim + block * BV
    outputs = out_ptr + (first.to(gl.int64) * heads + head) * value_dim + block * BV
    number = ((first // 64 + row) * heads + head).to(gl.int64)
    inverses, withins = inverse_ptr + number * 4096, within_ptr + number * 4096
    vectors = vectors_ptr + number * COUNT * 64
    gl.warp_specialize(
        [
            (_advance, (
                state_ptr, base_ptr, table, vectors + 192, length, start, active, head, block,
                key_heads, heads, value_dim, state_stride, base_stride,
                (k_ring, v_ring, inverse_ring, vector_ring), narrow, new, ready, empty, bars,
                COUNT, SAVES, DRAFTS, DK,
            )),
            (_compute_outputs, (
                outputs, length, heads, value_dim, (q_ring, within_ring, vector_ring), narrow, new,
                turned, ready, empty, bars, DK,
            )),
            (_copy_chunks, (
                queries, values, inverses, withins, vectors, length, heads, key_heads * DK,
                mixed_stride, rings, ready, empty, COUNT, DK,
            )),
        ],
        [4, 4], [120, 88],
    )  # fmt: skip
