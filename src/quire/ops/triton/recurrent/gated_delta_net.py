"""Gated delta nets: the short convolution, the rule in its recurrent form, and the gates.

No sum uses atomics, so the same step gives the same bits every time. If rows have drafts, a kernel
first advances its part of a state over the accepted drafts, from the tensors in `ops/state.py`.
Programs of one launch run in any order. So every program has its own entry of `StateLayer.base`,
which records how many tokens its part of the state includes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.errors import ConfigError
from quire.ops.choose import current_policy
from quire.ops.state import StateLayer, StateRows
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.recurrent.gated_delta_chunks import CHUNK, chunked, find_row

_NEVER = 1 << 30
SHORT = 16
"""Rows of at most this many tokens use the recurrent form."""


@triton.jit(do_not_specialize=["num_rows"])
def _conv(
    x_ptr, weight_ptr, state_ptr, out_ptr, ids_ptr, lanes_ptr, query_start_ptr, seq_lens_ptr,
    table_ptr, flags_ptr, base_ptr, num_rows, channels, x_stride, state_stride, table_stride,
    base_stride, TAPS: tl.constexpr, SAVES: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the short convolution. Grid: (blocks of channels, chunks).

    If BLOCK_T is 1, a chunk is a row. Only the program of a row's first chunk reads and writes the
    row's state."""
    chunk = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = chunk
    index = chunk * 0
    if BLOCK_T > 1:
        row, index = find_row(query_start_ptr, chunk, num_rows, STEPS)
    first = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - first
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if (lane < 0) | (index * BLOCK_T >= length):
        return
    if tl.load(ids_ptr + first) < 0:
        return
    start = tl.load(seq_lens_ptr + row) - length
    table = table_ptr + lane * table_stride
    own = tl.load(table).to(tl.int64)
    state = state_ptr + own * state_stride
    certain = length
    back = tl.zeros_like(channel)
    if DRAFTS > 0:
        certain = tl.where((tl.load(flags_ptr + row) & 1) == 0, 1, length)
        seen = tl.load(base_ptr + own * base_stride + channel, mask=inside, other=0)
        back = tl.where(start > 0, start - seen // 2, 0)
    x = x_ptr + first.to(tl.int64) * x_stride
    block = x + (index * BLOCK_T).to(tl.int64) * x_stride
    place = tl.arange(0, BLOCK_T)
    token = index * BLOCK_T + place
    oldest = tl.where(start > 0, 1 - TAPS, 0)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token + tap - (TAPS - 1)
        here = ((at >= 0) & (token < length))[:, None] & inside[None, :]
        of_tap = (place + tap - (TAPS - 1))[:, None] * x_stride + channel[None, :]
        value = tl.load(block + of_tap, mask=here, other=0.0).to(tl.float32)
        if index == 0:
            before = ((at < 0) & (at >= oldest))[:, None] & inside[None, :]
            old = (at + TAPS - 1)[:, None] + back[None, :]
            old = state + old * channels + channel[None, :]
            value += tl.load(old, mask=before, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0)
        total += value * weight[None, :]
    result = (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty)
    out = out_ptr + (first + index * BLOCK_T).to(tl.int64) * channels
    of_token = place[:, None] * channels + channel[None, :]
    tl.store(out + of_token, result, mask=(token < length)[:, None] & inside[None, :])
    if index == 0:
        for pair in range(SAVES):
            end = tl.load(table + 1 + 2 * pair) - start
            if (end > 0) & (end <= length):
                slot = tl.load(table + 2 + 2 * pair).to(tl.int64)
                _keep_inputs(
                    x, state, state_ptr + slot * state_stride, end, oldest, back, channels,
                    x_stride, channel, inside, TAPS,
                )  # fmt: skip
                if DRAFTS > 0:
                    entry = base_ptr + slot * base_stride + channel
                    tl.store(entry, tl.zeros_like(channel) + 2 * (start + end), mask=inside)
        # All threads must have read their values before any thread overwrites them.
        tl.debug_barrier()
        _keep_inputs(
            x, state, state, certain, oldest, back, channels, x_stride, channel, inside, TAPS
        )  # fmt: skip
        if DRAFTS > 0:
            for draft in tl.static_range(DRAFTS):
                after = tl.zeros_like(channel) + (certain + draft)
                kept = inside & (after < length)
                drafted = tl.load(x + after.to(tl.int64) * x_stride + channel, mask=kept, other=0.0)
                tl.store(state + (TAPS - 1 + draft) * channels + channel, drafted, mask=kept)
            entry = base_ptr + own * base_stride + channel
            tl.store(entry, tl.zeros_like(channel) + 2 * (start + certain), mask=inside)


@triton.jit
def _keep_inputs(
    x, state, to, end, oldest, back, channels, x_stride, channel, inside, TAPS: tl.constexpr
):  # fmt: skip
    """Stores the last inputs before a row's token `end`.

    Each thread has its own channel. It reads places before it overwrites them."""
    for tap in tl.static_range(TAPS - 1):
        at = tl.zeros_like(channel) + (end + 1 - TAPS + tap)
        here = x + at.to(tl.int64) * x_stride + channel
        value = tl.load(here, mask=inside & (at >= 0), other=0.0)
        before = inside & (at < 0) & (at >= oldest)
        old = state + (at + TAPS - 1 + back) * channels + channel
        value += tl.load(old, mask=before, other=0.0)
        tl.store(to + tap * channels + channel, value, mask=inside)


def short_conv(x: Tensor, weight: Tensor, state: StateLayer, rows: StateRows) -> Tensor:
    """See `reference.gated_delta`."""
    tokens, channels = x.shape
    count = len(rows.lanes)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    single = rows.max_q_len == 1
    pdl = traits(x.device).pdl
    block_t, block_c = (1, 256) if single else (CHUNK, 32)
    chunks = count if single else tokens // CHUNK + count
    launch(_conv, (triton.cdiv(channels, block_c), chunks))(
        x, weight, state.conv, out, rows.ids, rows.lanes, rows.query_start, rows.seq_lens,
        rows.table, *_drafts(state, rows), count, channels, x.stride(0), state.conv.stride(0),
        rows.table.stride(0), 0 if state.base is None else state.base.stride(0),
        TAPS=weight.shape[1], SAVES=rows.table.shape[1] // 2, DRAFTS=state.drafts,
        BLOCK_T=block_t, BLOCK_C=block_c, STEPS=count.bit_length() + 1, PDL=pdl,
        **options(pdl, num_warps=2),
    )  # fmt: skip
    return out


def _drafts(state: StateLayer, rows: StateRows) -> tuple[Tensor, Tensor]:
    """Returns the flags of rows and the bases of states. Without drafts it returns other tensors,
    which kernels do not read."""
    if state.base is None:
        return rows.lanes, rows.lanes
    if rows.flags is None:
        raise ConfigError("StateRows.flags is missing, but the states have drafts")
    return rows.flags, state.base


@triton.jit
def _advance(matrix, k, v, a, b, a_factor, dt_bias):
    """Returns the state after a token. k need not have unit length."""
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    x = a + dt_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    matrix = matrix * tl.exp(a_factor * softplus)
    new = (v - tl.sum(matrix * k[:, None], 0)) * tl.sigmoid(b)
    return matrix + k[:, None] * new[None, :]


@triton.jit
def _recurrent(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, ids_ptr, lanes_ptr,
    query_start_ptr, seq_lens_ptr, table_ptr, flags_ptr, base_ptr, draft_mixed_ptr,
    draft_gates_ptr, key_heads, heads, key_dim, value_dim, mixed_stride, gate_stride, state_stride,
    table_stride, base_stride, draft_mixed_stride, draft_gates_stride, scale, shortest_long,
    SAVES: tl.constexpr, DRAFTS: tl.constexpr, DK: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes short rows. Grid: (rows, value heads, blocks of a head's width).

    It reads and writes the state once. For long rows, it only advances the state over accepted
    drafts, up to the row's first token."""
    row, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, DK), tl.program_id(2) * BV + tl.arange(0, BV)
    a_factor = -tl.exp(tl.load(a_log_ptr + head))
    dt_bias = tl.load(dt_bias_ptr + head)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - first
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if (lane < 0) | (length < 1):
        return
    long = length >= shortest_long
    if DRAFTS == 0:
        if long:
            return
    if tl.load(ids_ptr + first) < 0:
        return
    start = tl.load(seq_lens_ptr + row) - length
    table = table_ptr + lane * table_stride
    in_key, in_value = i < key_dim, j < value_dim
    place = head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    slot_of_row = tl.load(table).to(tl.int64)
    own = state_ptr + slot_of_row * state_stride
    pair = tl.arange(0, SAVES)
    saved = tl.load(table + 1 + 2 * pair)
    slots = tl.load(table + 2 + 2 * pair)
    known = (i < tl.where(start > 0, key_dim, 0))[:, None] & in_value[None, :]
    matrix = tl.load(own + place, mask=known, other=0.0)
    key_head = head // (heads // key_heads)
    channels = 2 * key_heads * key_dim + heads * value_dim
    of_key = (key_heads + key_head) * key_dim + i
    of_value = 2 * key_heads * key_dim + head * value_dim + j
    certain = length
    count = length
    entry = head * value_dim + j + channels
    which = 0
    if DRAFTS > 0:
        entries = base_ptr + slot_of_row * base_stride + entry
        seen = tl.max(tl.load(entries, mask=in_value, other=0), 0)
        back = tl.where(start > 0, start - seen // 2, 0)
        drafts = draft_mixed_ptr + slot_of_row * draft_mixed_stride
        gates = draft_gates_ptr + slot_of_row * draft_gates_stride
        for draft in range(back):
            line = (seen % 2) * DRAFTS + draft
            k = tl.load(drafts + line * channels + of_key, mask=in_key, other=0.0)
            v = tl.load(drafts + line * channels + of_value, mask=in_value, other=0.0)
            a = tl.load(gates + line * 2 * heads + head).to(tl.float32)
            b = tl.load(gates + line * 2 * heads + heads + head).to(tl.float32)
            matrix = _advance(
                matrix, k.to(tl.float32), v.to(tl.float32), a, b, a_factor, dt_bias
            )  # fmt: skip
        certain = tl.where((tl.load(flags_ptr + row) & 1) == 0, 1, length)
        certain = tl.where(long, 0, certain)
        count = tl.where(long, 0, length)
        # This launch reads the last step's half of the drafts' tensors, and writes the other half.
        which = 1 - seen % 2
        if long:
            tl.store(own + place, matrix, mask=known)
    for offset in range(count):
        token = (first + offset).to(tl.int64)
        mixed = mixed_ptr + token * mixed_stride
        q = tl.load(mixed + key_head * key_dim + i, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(mixed + of_key, mask=in_key, other=0.0)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
        v = tl.load(mixed + of_value, mask=in_value, other=0.0)
        a = tl.load(a_ptr + token * gate_stride + head)
        b = tl.load(b_ptr + token * gate_stride + head)
        matrix = _advance(
            matrix, k.to(tl.float32), v.to(tl.float32), a.to(tl.float32), b.to(tl.float32),
            a_factor, dt_bias,
        )  # fmt: skip
        out = tl.sum(matrix * q[:, None], 0)
        to = out_ptr + (token * heads + head) * value_dim + j
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=in_value)
        slot = tl.max(tl.where(saved == start + offset + 1, slots, -1), 0)
        if slot >= 0:
            tl.store(state_ptr + slot.to(tl.int64) * state_stride + place, matrix, mask=inside)
            if DRAFTS > 0:
                base = base_ptr + slot.to(tl.int64) * base_stride + entry
                tl.store(base, tl.zeros_like(j) + 2 * (start + offset + 1), mask=in_value)
        if DRAFTS > 0:
            if offset == certain - 1:
                tl.store(own + place, matrix, mask=inside)
            if offset >= certain:
                line = which * DRAFTS + offset - certain
                drafted = draft_mixed_ptr + slot_of_row * draft_mixed_stride + line * channels
                tl.store(drafted + of_key, k, mask=in_key)
                tl.store(drafted + of_value, v, mask=in_value)
                gated = draft_gates_ptr + slot_of_row * draft_gates_stride + line * 2 * heads
                tl.store(gated + head, a)
                tl.store(gated + heads + head, b)
    if DRAFTS > 0:
        entries = base_ptr + slot_of_row * base_stride + entry
        tl.store(entries, tl.zeros_like(j) + 2 * (start + certain) + which, mask=in_value)
    else:
        tl.store(own + place, matrix, mask=inside)


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: StateLayer,
    rows: StateRows,
) -> Tensor:
    """See `reference.gated_delta`."""
    by_token = current_policy().deterministic
    tokens = len(mixed)
    matrices = state.recurrent
    _, heads, key_dim, value_dim = matrices.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    out = torch.empty(tokens, heads, value_dim, dtype=mixed.dtype, device=mixed.device)
    single = rows.max_q_len == 1
    pdl = traits(mixed.device).pdl
    block_v = min(32, triton.next_power_of_2(value_dim))
    # Rows with drafts always count as short rows.
    shortest = _NEVER if by_token else max(SHORT, 1 + state.drafts) + 1
    flags, base = _drafts(state, rows)
    kept = [out if part is None else part for part in (state.mixed, state.gates)]
    launch(_recurrent, (len(rows.lanes), heads, triton.cdiv(value_dim, block_v)))(
        mixed, a, b, a_log, dt_bias, matrices, out, rows.ids, rows.lanes, rows.query_start,
        rows.seq_lens, rows.table, flags, base, *kept, key_heads, heads, key_dim, value_dim,
        mixed.stride(0), a.stride(0), matrices.stride(0), rows.table.stride(0), base.stride(0),
        *(part.stride(0) for part in kept), key_dim**-0.5, shortest,
        SAVES=rows.table.shape[1] // 2, DRAFTS=state.drafts, DK=triton.next_power_of_2(key_dim),
        BV=block_v, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    if not (single or by_token):
        chunked(mixed, a, b, a_log, dt_bias, state, rows, out, shortest)
    return out


@triton.jit
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, heads, width, eps, gate_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes `gated_rms_norm`. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (at < width)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place = head[:, None] * width + at[None, :]
    x = tl.load(x_ptr + token * heads * width + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    out = x * inverse[:, None] * weight[None, :] * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + token * heads * width + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.gated_delta`."""
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads * width, dtype=x.dtype, device=x.device)
    pdl = traits(x.device).pdl
    launch(_gated_norm, (tokens, triton.cdiv(heads, 8)))(
        x, gate, weight, out, heads, width, eps, gate.stride(0), HEADS=8,
        WIDTH=triton.next_power_of_2(width), PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return out


@triton.jit
def _sigmoid_gate(
    x_ptr, gate_ptr, out_ptr, width, x_stride, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Computes `sigmoid_gate`. Grid: (tokens, blocks of the width)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    out = (x * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + at, out, mask=inside)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `reference.gated_delta`."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    pdl = traits(x.device).pdl
    launch(_sigmoid_gate, (tokens, triton.cdiv(width, 1024)))(
        x, gate, out, width, x.stride(0), gate.stride(0), BLOCK=1024, PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip
    return out
