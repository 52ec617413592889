"""The chunked form of the gated delta rule, for rows of many tokens.

Two kernels: one program per chunk and value head solves the chunk's triangular system and computes
its attention within itself; then one program per row, value head and block of the head's width goes
through the row's chunks and carries the state in registers. So the state is read and written once,
and no state between chunks goes to memory.

Row r's chunks of 64 tokens have the numbers from query_start[r] // 64 + r on, which no other row's
have: so programs find their row by bisection, and nothing must be planned beforehand.

q and k stay as they are: that they are brought to unit length is a factor of products' rows and
columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.launch import launch, options, traits

CHUNK = 64
_VECTORS = 4
"""Vectors over a chunk that the first kernel leaves for the second: inverse lengths of q and k, the
running sum of the decay, the strength."""


@triton.jit
def find_row(query_start_ptr, chunk, num_rows, STEPS: tl.constexpr):
    """Returns the row of a chunk, and the chunk's number within it."""
    low = 0
    high = num_rows
    for _ in range(STEPS):
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) // 64 + middle
        below = (first <= chunk) & (middle > low)
        low = tl.where(below, middle, low)
        high = tl.where(below, high, tl.maximum(middle, low + 1))
    return low, chunk - (tl.load(query_start_ptr + low) // 64 + low)


@triton.jit
def _gates(
    mixed, key_dim, key_heads, key_head, a_ptr, b_ptr, a_factor, dt_bias, token, first, length,
    head, mixed_stride, gate_stride, DK: tl.constexpr,
):  # fmt: skip
    """Returns what a block of tokens needs: k, inverse lengths of q and k, decay and strength; of
    places behind the row's end they change nothing."""
    i = tl.arange(0, DK)
    real = token < length
    inside = real[:, None] & (i < key_dim)[None, :]
    at = mixed + token[:, None].to(tl.int64) * mixed_stride + i[None, :]
    q = tl.load(at + key_head * key_dim, mask=inside, other=0.0)
    k = tl.load(at + (key_heads + key_head) * key_dim, mask=inside, other=0.0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_inverse = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + 1e-6)
    k_inverse = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + 1e-6)
    gate = (first + token).to(tl.int64) * gate_stride + head
    x = tl.load(a_ptr + gate, mask=real, other=0.0).to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    decay = tl.where(real, a_factor * softplus, 0.0)
    strength = tl.sigmoid(tl.load(b_ptr + gate, mask=real, other=0.0).to(tl.float32))
    return k, q_inverse, k_inverse, decay, tl.where(real, strength, 0.0)


@triton.jit
def _block(
    k_row, k_column, row_factor, column_factor, row_sum, column_sum, PRECISION: tl.constexpr
):
    """Returns a block of the system: row_factor column_factor exp(differences) k kᵀ."""
    product = tl.dot(k_row, tl.trans(k_column), input_precision=PRECISION)
    grown = tl.exp(row_sum[:, None] - column_sum[None, :])
    return product * grown * row_factor[:, None] * column_factor[None, :]


@triton.jit
def _product(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _store_block(to, block, row: tl.constexpr, column: tl.constexpr):
    at = tl.arange(0, 16)
    place = (row * 16 + at)[:, None] * 64 + (column * 16 + at)[None, :]
    tl.store(to + place, block.to(to.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _solve(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, within_ptr, vectors_ptr, ids_ptr,
    lanes_ptr, query_start_ptr, num_rows, key_heads, heads, key_dim, mixed_stride, gate_stride,
    scale, shortest, DK: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, value heads). Leaves the inverse of a chunk's system, in 16 x 16 blocks (those
    on the diagonal by substitution, which is stable for any keys), and the factors of attention
    within the chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    a_factor = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, index = find_row(query_start_ptr, chunk, num_rows, STEPS)
    first = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - first
    base = index * 64
    if (tl.load(lanes_ptr + row) < 0) | (base >= length) | (length < shortest):
        return
    key_head = head // (heads // key_heads)
    mixed = mixed_ptr + first.to(tl.int64) * mixed_stride
    number = (chunk * heads + head).to(tl.int64)
    at = tl.arange(0, 16)
    k0, q_inv0, k_inv0, g0, beta0 = _gates(
        mixed, key_dim, key_heads, key_head, a_ptr, b_ptr, a_factor, dt_bias, base + at, first,
        length, head, mixed_stride, gate_stride, DK,
    )  # fmt: skip
    k1, q_inv1, k_inv1, g1, beta1 = _gates(
        mixed, key_dim, key_heads, key_head, a_ptr, b_ptr, a_factor, dt_bias, base + 16 + at, first,
        length, head, mixed_stride, gate_stride, DK,
    )  # fmt: skip
    k2, q_inv2, k_inv2, g2, beta2 = _gates(
        mixed, key_dim, key_heads, key_head, a_ptr, b_ptr, a_factor, dt_bias, base + 32 + at, first,
        length, head, mixed_stride, gate_stride, DK,
    )  # fmt: skip
    k3, q_inv3, k_inv3, g3, beta3 = _gates(
        mixed, key_dim, key_heads, key_head, a_ptr, b_ptr, a_factor, dt_bias, base + 48 + at, first,
        length, head, mixed_stride, gate_stride, DK,
    )  # fmt: skip
    sum0 = tl.cumsum(g0, 0)
    sum1 = tl.cumsum(g1, 0) + tl.sum(g0, 0)
    sum2 = tl.cumsum(g2, 0) + tl.sum(g0, 0) + tl.sum(g1, 0)
    sum3 = tl.cumsum(g3, 0) + tl.sum(g0, 0) + tl.sum(g1, 0) + tl.sum(g2, 0)
    vectors = vectors_ptr + number * 4 * 64
    tl.store(vectors + at, q_inv0)
    tl.store(vectors + 16 + at, q_inv1)
    tl.store(vectors + 32 + at, q_inv2)
    tl.store(vectors + 48 + at, q_inv3)
    tl.store(vectors + 64 + at, k_inv0)
    tl.store(vectors + 80 + at, k_inv1)
    tl.store(vectors + 96 + at, k_inv2)
    tl.store(vectors + 112 + at, k_inv3)
    tl.store(vectors + 128 + at, sum0)
    tl.store(vectors + 144 + at, sum1)
    tl.store(vectors + 160 + at, sum2)
    tl.store(vectors + 176 + at, sum3)
    tl.store(vectors + 192 + at, beta0)
    tl.store(vectors + 208 + at, beta1)
    tl.store(vectors + 224 + at, beta2)
    tl.store(vectors + 240 + at, beta3)

    f0, f1, f2, f3 = beta0 * k_inv0, beta1 * k_inv1, beta2 * k_inv2, beta3 * k_inv3
    lower = at[:, None] > at[None, :]
    # Above the diagonal the exponential may overflow; nothing of it is kept.
    d0 = -tl.where(lower, _block(k0, k0, f0, k_inv0, sum0, sum0, PRECISION), 0.0)
    d1 = -tl.where(lower, _block(k1, k1, f1, k_inv1, sum1, sum1, PRECISION), 0.0)
    d2 = -tl.where(lower, _block(k2, k2, f2, k_inv2, sum2, sum2, PRECISION), 0.0)
    d3 = -tl.where(lower, _block(k3, k3, f3, k_inv3, sum3, sum3, PRECISION), 0.0)
    for step in range(2, 16):
        # Row `step` becomes that of the inverse, from the rows above, which are already.
        now = at == step
        line0 = tl.sum(tl.where(now[:, None], d0, 0.0), 0)
        line1 = tl.sum(tl.where(now[:, None], d1, 0.0), 0)
        line2 = tl.sum(tl.where(now[:, None], d2, 0.0), 0)
        line3 = tl.sum(tl.where(now[:, None], d3, 0.0), 0)
        line0 += tl.sum(line0[:, None] * d0, 0)
        line1 += tl.sum(line1[:, None] * d1, 0)
        line2 += tl.sum(line2[:, None] * d2, 0)
        line3 += tl.sum(line3[:, None] * d3, 0)
        d0 = tl.where(now[:, None], line0[None, :], d0)
        d1 = tl.where(now[:, None], line1[None, :], d1)
        d2 = tl.where(now[:, None], line2[None, :], d2)
        d3 = tl.where(now[:, None], line3[None, :], d3)
    one = (at[:, None] == at[None, :]).to(tl.float32)
    d0, d1, d2, d3 = d0 + one, d1 + one, d2 + one, d3 + one
    a10 = _block(k1, k0, f1, k_inv0, sum1, sum0, PRECISION)
    a21 = _block(k2, k1, f2, k_inv1, sum2, sum1, PRECISION)
    a32 = _block(k3, k2, f3, k_inv2, sum3, sum2, PRECISION)
    a20 = _block(k2, k0, f2, k_inv0, sum2, sum0, PRECISION)
    a31 = _block(k3, k1, f3, k_inv1, sum3, sum1, PRECISION)
    a30 = _block(k3, k0, f3, k_inv0, sum3, sum0, PRECISION)
    x10 = -_product(d1, _product(a10, d0))
    x21 = -_product(d2, _product(a21, d1))
    x32 = -_product(d3, _product(a32, d2))
    x20 = -_product(d2, _product(a20, d0) + _product(a21, x10))
    x31 = -_product(d3, _product(a31, d1) + _product(a32, x21))
    x30 = -_product(d3, _product(a30, d0) + _product(a31, x10) + _product(a32, x20))
    to = inverse_ptr + number * 64 * 64
    _store_block(to, d0, 0, 0)
    _store_block(to, d1, 1, 1)
    _store_block(to, d2, 2, 2)
    _store_block(to, d3, 3, 3)
    _store_block(to, x10, 1, 0)
    _store_block(to, x21, 2, 1)
    _store_block(to, x32, 3, 2)
    _store_block(to, x20, 2, 0)
    _store_block(to, x31, 3, 1)
    _store_block(to, x30, 3, 0)

    place = tl.arange(0, 64)
    i = tl.arange(0, DK)
    token = base + place
    real = token < length
    inside = real[:, None] & (i < key_dim)[None, :]
    rows = mixed + token[:, None].to(tl.int64) * mixed_stride + i[None, :]
    q = tl.load(rows + key_head * key_dim, mask=inside, other=0.0)
    k = tl.load(rows + (key_heads + key_head) * key_dim, mask=inside, other=0.0)
    # What other threads have just stored.
    tl.debug_barrier()
    q_inverse = tl.load(vectors + place)
    k_inverse = tl.load(vectors + 64 + place)
    total = tl.load(vectors + 128 + place)
    seen = place[:, None] >= place[None, :]
    grown = tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    within = product * grown * (q_inverse * scale)[:, None] * k_inverse[None, :]
    within = tl.where(seen, within, 0.0).to(within_ptr.dtype.element_ty)
    tl.store(within_ptr + number * 64 * 64 + place[:, None] * 64 + place[None, :], within)


@triton.jit
def _scan(
    mixed_ptr, state_ptr, out_ptr, inverse_ptr, within_ptr, vectors_ptr, ids_ptr, lanes_ptr,
    query_start_ptr, seq_lens_ptr, table_ptr, base_ptr, key_heads, heads, key_dim, value_dim,
    mixed_stride, state_stride, table_stride, base_stride, scale, shortest,
    SAVES: tl.constexpr, DRAFTS: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a head's width, value heads, rows)."""
    head, row = tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, DK), tl.program_id(0) * BV + tl.arange(0, BV)
    place = tl.arange(0, 64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - first
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if (lane < 0) | (length < shortest):
        return
    if tl.load(ids_ptr + first) < 0:
        return
    kind = mixed_ptr.dtype.element_ty
    start = tl.load(seq_lens_ptr + row) - length
    table = table_ptr + lane * table_stride
    in_key, in_value = i < key_dim, j < value_dim
    at = head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    held = in_key[:, None] & in_value[None, :]
    slot_of_row = tl.load(table).to(tl.int64)
    own = state_ptr + slot_of_row * state_stride
    entry = 2 * key_heads * key_dim + heads * value_dim + head * value_dim + j
    pair = tl.arange(0, SAVES)
    saved = tl.load(table + 1 + 2 * pair) - start
    known_keys = (i < tl.where(start > 0, key_dim, 0))[:, None] & in_value[None, :]
    matrix = tl.load(own + at, mask=known_keys, other=0.0)
    key_head = head // (heads // key_heads)
    mixed = mixed_ptr + first.to(tl.int64) * mixed_stride
    number = ((first // 64 + row) * heads + head).to(tl.int64)
    seen = place[:, None] >= place[None, :]
    square = place[:, None] * 64 + place[None, :]
    for base in range(0, length, 64):
        token = base + place
        real = token < length
        keys = real[:, None] & in_key[None, :]
        rows = mixed + token[:, None].to(tl.int64) * mixed_stride
        q = tl.load(rows + (key_head * key_dim + i)[None, :], mask=keys, other=0.0)
        k = tl.load(rows + ((key_heads + key_head) * key_dim + i)[None, :], mask=keys, other=0.0)
        values = real[:, None] & in_value[None, :]
        of_head = 2 * key_heads * key_dim + head * value_dim
        v = tl.load(rows + (of_head + j)[None, :], mask=values, other=0.0).to(tl.float32)
        # Above the diagonal nothing was stored. A mask on the load gave wrong products in bf16.
        inverse = tl.load(inverse_ptr + number * 4096 + square)
        inverse = tl.where(seen, inverse, 0.0).to(kind)
        within = tl.load(within_ptr + number * 4096 + square)
        vectors = vectors_ptr + number * 256
        q_inverse = tl.load(vectors + place)
        k_inverse = tl.load(vectors + 64 + place)
        total = tl.load(vectors + 128 + place)
        strength = tl.load(vectors + 192 + place)
        grown = tl.exp(total)
        last = tl.sum(tl.where(place == 63, total, 0.0), 0)

        narrow = matrix.to(kind)
        known = tl.dot(k, narrow, input_precision=PRECISION)
        wanted = (v - known * (k_inverse * grown)[:, None]) * strength[:, None]
        new = tl.dot(inverse, wanted.to(kind), input_precision=PRECISION)
        out = tl.dot(q, narrow, input_precision=PRECISION)
        out = out * (q_inverse * scale * grown)[:, None]
        out += tl.dot(within, new.to(kind), input_precision=PRECISION)
        to = out_ptr + ((first + token)[:, None].to(tl.int64) * heads + head) * value_dim
        tl.store(to + j[None, :], out.to(kind), mask=values)

        here = (saved > base) & (saved <= base + 64) & (saved <= length)
        if tl.sum(here.to(tl.int32), 0) > 0:
            for each in range(SAVES):
                end = tl.load(table + 1 + 2 * each) - start - base
                if (end > 0) & (end <= 64) & (end + base <= length):
                    until = tl.sum(tl.where(place == end - 1, total, 0.0), 0)
                    left = tl.exp(tl.where(place < end, until - total, 0.0)) * k_inverse
                    left = tl.where(place < end, left, 0.0)
                    part = (new * left[:, None]).to(kind)
                    copy = tl.dot(tl.trans(k), part, input_precision=PRECISION)
                    copy += matrix * tl.exp(until)
                    slot = tl.load(table + 2 + 2 * each).to(tl.int64)
                    tl.store(state_ptr + slot * state_stride + at, copy, mask=held)
                    if DRAFTS:
                        known_until = base_ptr + slot * base_stride + entry
                        length_then = tl.zeros_like(j) + 2 * (start + base + end)
                        tl.store(known_until, length_then, mask=in_value)

        left = tl.exp(last - total) * k_inverse
        matrix = matrix * tl.exp(last)
        matrix += tl.dot(tl.trans(k), (new * left[:, None]).to(kind), input_precision=PRECISION)
        number += heads
    tl.store(own + at, matrix, mask=held)
    if DRAFTS:
        entries = base_ptr + slot_of_row * base_stride + entry
        tl.store(entries, tl.zeros_like(j) + 2 * (start + length), mask=in_value)


def chunked(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: StateLayer,
    rows: StateRows,
    out: Tensor,
    shortest: int,
) -> None:
    """Computes the rows of at least `shortest` tokens of `ops.gated_delta`, into `out`."""
    tokens, count, device = len(mixed), len(rows.lanes), mixed.device
    matrices = state.recurrent
    _, heads, key_dim, value_dim = matrices.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    chunks = tokens // CHUNK + count
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=mixed.dtype, device=device)
    within = torch.empty_like(inverse)
    vectors = torch.empty(chunks, heads, _VECTORS, CHUNK, dtype=torch.float32, device=device)
    width = max(16, triton.next_power_of_2(key_dim))
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    pdl = traits(device).pdl
    launch(_solve, (chunks, heads))(
        mixed, a, b, a_log, dt_bias, inverse, within, vectors, rows.ids, rows.lanes,
        rows.query_start, count, key_heads, heads, key_dim, mixed.stride(0), a.stride(0),
        key_dim**-0.5, shortest, DK=width, STEPS=count.bit_length() + 1, PRECISION=precision,
        PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    block_v = min(32, max(16, triton.next_power_of_2(value_dim)))
    # Triton 3.6 gives wrong copies in fp32 with two stages, and wrong products in 16 bits with one.
    stages = 1 if mixed.dtype == torch.float32 else 2
    launch(_scan, (triton.cdiv(value_dim, block_v), heads, count))(
        mixed, matrices, out, inverse, within, vectors, rows.ids, rows.lanes, rows.query_start,
        rows.seq_lens, rows.table, rows.lanes if state.base is None else state.base, key_heads,
        heads, key_dim, value_dim, mixed.stride(0), matrices.stride(0), rows.table.stride(0),
        0 if state.base is None else state.base.stride(0), key_dim**-0.5, shortest,
        SAVES=rows.table.shape[1] // 2, DRAFTS=state.base is not None, DK=width,
        BV=block_v, PRECISION=precision, PDL=pdl,
        **options(pdl, num_warps=4, num_stages=stages),
    )  # fmt: skip
