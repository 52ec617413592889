"""The chunked form of the gated delta rule, for rows of many tokens.

It takes three kernels. The first has one program per chunk and value head. It inverts the chunk's
triangular system and computes the attention within the chunk. The second has one program per row,
value head and block of the head's width. It goes through the row's chunks and keeps the state in
registers, so states between chunks are not written to memory. The third writes the copies of states
that a row saves within a chunk. It starts from the state before the chunk, which the second stores.

In the second kernel a chunk's products wait for the products of the previous chunk. It holds all
matrices transposed, [width, tokens], so that the registers of one product's result are the next
product's left operand. Hopper cards have a separate kernel for this part (`hopper_delta.py`).

Row r's chunks of 64 tokens have the numbers from query_start[r] // 64 + r on, so no two rows share
a number. Programs find their row by bisection, and the host plans nothing.

q and k stay unnormalized in memory. The products' rows and columns are multiplied by the factors
that scale them to unit length."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.launch import DeviceTraits, launch, options, traits

CHUNK = 64
VECTORS = 6
"""Number of vectors over a chunk that the first kernel stores for the others. In order they are:

* Factors of keys times the state.
* Factors of queries times the state.
* Factors of keys times the writes.
* The decay of the state over the chunk, 64 times.
* The inverse lengths of keys.
* The running sum of the decay, as an exponent of 2.
"""


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
def _joined(inverse, system, apart, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverses of a system's diagonal blocks of 2 SIZE tokens, from the inverses of its
    blocks of SIZE.

    `apart` is row ^ column. Below the diagonal the result is -D A C. C and D are the inverses of
    two neighbouring diagonal blocks, and A is the block below the first and left of the second. All
    of them are small for any keys, so precision is not lost."""
    below = tl.where(apart // SIZE == 1, system, 0.0).to(system.dtype)
    narrow = inverse.to(system.dtype)
    part = tl.dot(below, narrow, input_precision=PRECISION).to(system.dtype)
    return inverse - tl.dot(narrow, part, input_precision=PRECISION)


@triton.jit
def _inverse(system, apart, PRECISION: tl.constexpr):
    """Returns the inverse of 1 + the part of `system` [64, 64] below the diagonal."""
    # Blocks of 16 come first, because each is in the registers of a warp.
    block, place = tl.arange(0, 4), tl.arange(0, 16)
    own = block[:, None, None, None] == block[None, None, :, None]
    near = place[None, :, None] ^ place[None, None, :]
    blocks = tl.reshape(system.to(tl.float32), [4, 16, 4, 16])
    blocks = tl.sum(tl.where(own, blocks, 0.0), 2).to(system.dtype)
    inverse = tl.where(near == 1, -blocks.to(tl.float32), 0.0)
    inverse = tl.where(near == 0, 1.0, inverse)
    inverse = _joined(inverse, blocks, near, 2, PRECISION)
    inverse = _joined(inverse, blocks, near, 4, PRECISION)
    inverse = _joined(inverse, blocks, near, 8, PRECISION)
    inverse = tl.where(own, tl.reshape(inverse, [4, 16, 1, 16]), 0.0)
    inverse = tl.reshape(inverse, [64, 64])
    inverse = _joined(inverse, system, apart, 16, PRECISION)
    return _joined(inverse, system, apart, 32, PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def _solve(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, within_ptr, vectors_ptr,
    lanes_ptr, query_start_ptr, num_rows, key_heads, heads, key_dim, mixed_stride, gate_stride,
    scale, shortest, COUNT: tl.constexpr, DK: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Solves a chunk's triangular system. Grid: (value heads, chunks).

    It stores the inverse of the system with columns multiplied by the tokens' strengths, the
    factors of attention within the chunk, and COUNT vectors."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    # From here on decays are exponents of 2.
    a_factor = -1.4426950408889634 * tl.exp(tl.load(a_log_ptr + head))
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
    queries = mixed_ptr + (first + base).to(tl.int64) * mixed_stride + key_head * key_dim
    keys = queries + key_heads * key_dim
    number = (chunk * heads + head).to(tl.int64)
    kind = inverse_ptr.dtype.element_ty

    place, i = tl.arange(0, 64), tl.arange(0, DK)
    real = base + place < length
    inside = real[:, None] & (i < key_dim)[None, :]
    at = place[:, None] * mixed_stride + i[None, :]
    q = tl.load(queries + at, mask=inside, other=0.0)
    k = tl.load(keys + at, mask=inside, other=0.0)
    gate = (first + base + place).to(tl.int64) * gate_stride + head
    x = tl.load(a_ptr + gate, mask=real, other=0.0).to(tl.float32) + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    decay = tl.where(real, a_factor * softplus, 0.0)
    strength = tl.sigmoid(tl.load(b_ptr + gate, mask=real, other=0.0).to(tl.float32))
    strength = tl.where(real, strength, 0.0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_inverse = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + 1e-6) * scale
    k_inverse = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + 1e-6)
    total = tl.cumsum(decay, 0)
    last = tl.sum(decay, 0)
    vectors = vectors_ptr + number * COUNT * 64 + place
    tl.store(vectors, k_inverse * tl.exp2(total))
    tl.store(vectors + 64, q_inverse * tl.exp2(total))
    tl.store(vectors + 128, k_inverse * tl.exp2(last - total))
    tl.store(vectors + 192, tl.exp2(last) + tl.zeros_like(total))
    tl.store(vectors + 256, k_inverse)
    tl.store(vectors + 320, total)

    # Above the diagonal the power might overflow. It is masked.
    seen = place[:, None] >= place[None, :]
    grown = tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
    grown = tl.where(seen, grown * k_inverse[None, :], 0.0)
    square = number * 4096 + place[:, None] * 64 + place[None, :]
    within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * grown * q_inverse[:, None]
    tl.store(within_ptr + square, within.to(kind))
    # With keys of unit length, systems and inverses are at most 1, for which fp16 is more precise
    # than bf16.
    exact: tl.constexpr = tl.float32 if kind == tl.float32 else tl.float16
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * grown
    system = (system * (k_inverse * strength)[:, None]).to(exact)
    inverse = _inverse(system, place[:, None] ^ place[None, :], PRECISION)
    tl.store(inverse_ptr + square, (inverse * strength[None, :]).to(kind))


@triton.jit
def _scan(
    mixed_ptr, state_ptr, out_ptr, inverse_ptr, within_ptr, vectors_ptr, ids_ptr, lanes_ptr,
    query_start_ptr, seq_lens_ptr, table_ptr, base_ptr, key_heads, heads, key_dim, value_dim,
    mixed_stride, state_stride, table_stride, base_stride, shortest,
    COUNT: tl.constexpr, SAVES: tl.constexpr, DRAFTS: tl.constexpr, DK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes outputs and the new state. Grid: (blocks of a head's width, value heads, rows)."""
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
    at = head * key_dim * value_dim + i[None, :] * value_dim + j[:, None]
    held = in_key[None, :] & in_value[:, None]
    slot_of_row = tl.load(table).to(tl.int64)
    own = state_ptr + slot_of_row * state_stride
    entry = 2 * key_heads * key_dim + heads * value_dim + head * value_dim + j
    saved = tl.load(table + 1 + 2 * tl.arange(0, SAVES)) - start
    saved = tl.where((saved > 0) & (saved <= length), (saved - 1) // 64 * 64, length)
    known_keys = (i < tl.where(start > 0, key_dim, 0))[None, :] & in_value[:, None]
    matrix = tl.load(own + at, mask=known_keys, other=0.0)
    key_head = head // (heads // key_heads)
    queries = mixed_ptr + first.to(tl.int64) * mixed_stride + key_head * key_dim
    values = mixed_ptr + first.to(tl.int64) * mixed_stride
    values += 2 * key_heads * key_dim + head * value_dim
    outputs = out_ptr + (first.to(tl.int64) * heads + head) * value_dim
    of_keys = place[:, None] * mixed_stride + i[None, :]
    of_values = place[:, None] * mixed_stride + j[None, :]
    of_outputs = place[None, :] * (heads * value_dim) + j[:, None]
    square = place[:, None] * 64 + place[None, :]
    number = ((first // 64 + row) * heads + head).to(tl.int64)
    inverses, withins = inverse_ptr + number * 4096, within_ptr + number * 4096
    vectors = vectors_ptr + number * COUNT * 64
    remains = tl.load(vectors + 192)
    one = (place[:, None] == place[None, :]).to(kind)
    # The saved state is that before the copy's chunk. `_advance_copies` adds the chunk's tokens.
    begin = 0
    while begin < length:
        for each in range(SAVES):
            end = tl.load(table + 1 + 2 * each) - start
            if (end > begin) & (end <= tl.minimum(begin + 64, length)):
                slot = tl.load(table + 2 + 2 * each).to(tl.int64)
                tl.store(state_ptr + slot * state_stride + at, matrix, mask=held)
                if DRAFTS:
                    known_until = base_ptr + slot * base_stride + entry
                    tl.store(known_until, tl.zeros_like(j) + 2 * (start + end), mask=in_value)
        end = tl.min(tl.where(saved > begin, saved, length), 0)
        for base in range(begin, end, 64):
            real = base + place < length
            keys = queries + key_heads * key_dim
            q = tl.load(queries + of_keys, mask=real[:, None] & in_key[None, :], other=0.0)
            k = tl.load(keys + of_keys, mask=real[:, None] & in_key[None, :], other=0.0)
            v = tl.load(values + of_values, mask=real[:, None] & in_value[None, :], other=0.0)
            inverse = tl.load(inverses + square)
            within = tl.load(withins + square)
            known_factor = tl.load(vectors + place)
            out_factor = tl.load(vectors + 64 + place)
            left = tl.load(vectors + 128 + place)
            next_remains = tl.load(
                vectors + heads * COUNT * 64 + 192, mask=base + 64 < length, other=0.0
            )

            narrow = matrix.to(kind)
            known = tl.dot(narrow, tl.trans(k), input_precision=PRECISION)
            # A product with the identity transposes v in the layout of the tensor cores.
            v = tl.trans(v)
            if kind != tl.float32:
                v = tl.dot(v, one)
            wanted = v - known * known_factor[None, :]
            new = tl.dot(wanted.to(kind), tl.trans(inverse), input_precision=PRECISION)
            out = tl.dot(narrow, tl.trans(q), input_precision=PRECISION) * out_factor[None, :]
            out = tl.dot(new.to(kind), tl.trans(within), out, input_precision=PRECISION)
            tl.store(outputs + of_outputs, out.to(kind), mask=real[None, :] & in_value[:, None])

            part = (new * left[None, :]).to(kind)
            matrix = tl.dot(part, k, matrix * remains, input_precision=PRECISION)
            remains = next_remains
            queries += 64 * mixed_stride
            values += 64 * mixed_stride
            outputs += 64 * heads * value_dim
            inverses += heads * 4096
            withins += heads * 4096
            vectors += heads * COUNT * 64
        begin = end
    tl.store(own + at, matrix, mask=held)
    if DRAFTS:
        entries = base_ptr + slot_of_row * base_stride + entry
        tl.store(entries, tl.zeros_like(j) + 2 * (start + length), mask=in_value)


@triton.jit
def _advance_copies(
    mixed_ptr, state_ptr, inverse_ptr, vectors_ptr, ids_ptr, lanes_ptr, query_start_ptr,
    seq_lens_ptr, table_ptr, key_heads, heads, key_dim, value_dim, mixed_stride, state_stride,
    table_stride, shortest, COUNT: tl.constexpr, SAVES: tl.constexpr, DK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advances saved states from before a chunk to the position of the copy within the chunk.

    Grid: (blocks of a head's width, value heads, rows)."""
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
    start = tl.load(seq_lens_ptr + row) - length
    table = table_ptr + lane * table_stride
    kind = mixed_ptr.dtype.element_ty
    in_key, in_value = i < key_dim, j < value_dim
    at = head * key_dim * value_dim + i[None, :] * value_dim + j[:, None]
    held = in_key[None, :] & in_value[:, None]
    of_key = (key_heads + head // (heads // key_heads)) * key_dim + i
    of_value = 2 * key_heads * key_dim + head * value_dim + j
    for pair in range(SAVES):
        end = tl.load(table + 1 + 2 * pair) - start
        if (end > 0) & (end <= length):
            chunk = (end - 1) // 64
            end -= chunk * 64
            slot = tl.load(table + 2 + 2 * pair).to(tl.int64)
            copy = state_ptr + slot * state_stride + at
            matrix = tl.load(copy, mask=held, other=0.0)
            # Tokens past the copy's position do not change the state at the position.
            seen = place < end
            token = mixed_ptr + (first + chunk * 64 + place).to(tl.int64) * mixed_stride
            keys = token[:, None] + of_key[None, :]
            k = tl.load(keys, mask=seen[:, None] & in_key[None, :], other=0.0)
            values = token[None, :] + of_value[:, None]
            v = tl.load(values, mask=seen[None, :] & in_value[:, None], other=0.0)
            number = ((first // 64 + row + chunk) * heads + head).to(tl.int64)
            square = number * 4096 + place[:, None] * 64 + place[None, :]
            inverse = tl.load(inverse_ptr + square)
            vectors = vectors_ptr + number * COUNT * 64
            known_factor = tl.load(vectors + place)
            k_inverse = tl.load(vectors + 256 + place)
            total = tl.load(vectors + 320 + place)
            until = tl.load(vectors + 320 + end - 1)
            left = tl.exp2(tl.where(seen, until - total, 0.0)) * k_inverse

            known = tl.dot(matrix.to(kind), tl.trans(k), input_precision=PRECISION)
            wanted = v.to(tl.float32) - known * known_factor[None, :]
            new = tl.dot(wanted.to(kind), tl.trans(inverse), input_precision=PRECISION)
            part = new * tl.where(seen, left, 0.0)[None, :]
            matrix = matrix * tl.exp2(until)
            matrix += tl.dot(part.to(kind), k, input_precision=PRECISION)
            tl.store(copy, matrix, mask=held)


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
    """Computes rows of at least `shortest` tokens, and writes their outputs to `out`.

    For the arguments see `ops.gated_delta`."""
    tokens, count, device = len(mixed), len(rows.lanes), mixed.device
    matrices = state.recurrent
    _, heads, key_dim, value_dim = matrices.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    chunks = tokens // CHUNK + count
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=mixed.dtype, device=device)
    within = torch.empty_like(inverse)
    vectors = torch.empty(chunks, heads, VECTORS, CHUNK, dtype=torch.float32, device=device)
    width = max(16, triton.next_power_of_2(key_dim))
    single = mixed.dtype == torch.float32
    precision = "tf32x3" if single else "tf32"
    pdl = traits(device).pdl
    # With 168 registers per thread, three programs run on a multiprocessor.
    launch(_solve, (heads, chunks))(
        mixed, a, b, a_log, dt_bias, inverse, within, vectors, rows.lanes, rows.query_start, count,
        key_heads, heads, key_dim, mixed.stride(0), a.stride(0), key_dim**-0.5, shortest,
        COUNT=VECTORS, DK=width, STEPS=count.bit_length() + 1, PRECISION=precision, PDL=pdl,
        **options(pdl, num_warps=4, maxnreg=None if single else 168),
    )  # fmt: skip
    block_v = min(64, max(16, triton.next_power_of_2(value_dim)))
    copies = rows.table.shape[1] // 2
    blocks = triton.cdiv(value_dim, block_v)
    given = (
        mixed, matrices, out, inverse, within, vectors, rows.ids, rows.lanes, rows.query_start,
        rows.seq_lens, rows.table, rows.lanes if state.base is None else state.base, key_heads,
        heads, key_dim, value_dim, mixed.stride(0), matrices.stride(0), rows.table.stride(0),
        0 if state.base is None else state.base.stride(0), shortest,
    )  # fmt: skip
    shape = {"COUNT": VECTORS, "SAVES": copies, "DRAFTS": state.base is not None, "DK": width}
    hopper = _hopper_delta(traits(device))
    if hopper is not None and hopper.takes(mixed, key_dim, value_dim):
        launch(hopper.delta_scan, (blocks, heads, count))(
            *given, **shape, PDL=pdl, **options(pdl, num_warps=4)
        )
    else:
        launch(_scan, (blocks, heads, count))(
            *given, **shape, BV=block_v, PRECISION=precision, PDL=pdl,
            **options(pdl, num_warps=4, num_stages=1 if single else 3),
        )  # fmt: skip
    launch(_advance_copies, (blocks, heads, count))(
        mixed, matrices, inverse, vectors, rows.ids, rows.lanes, rows.query_start, rows.seq_lens,
        rows.table, key_heads, heads, key_dim, value_dim, mixed.stride(0), matrices.stride(0),
        rows.table.stride(0), shortest, COUNT=VECTORS, SAVES=copies, DK=width, BV=block_v,
        PRECISION=precision, PDL=pdl, **options(pdl, num_warps=4, num_stages=1),
    )  # fmt: skip


@functools.cache
def _hopper_delta(card: DeviceTraits) -> ModuleType | None:
    """Returns the module `hopper_delta` on Hopper cards, or None on other cards."""
    return (
        importlib.import_module("quire.ops.triton.recurrent.hopper_delta") if card.gluon else None
    )
