"""What lies between the QKV projection and attention, in one kernel: q/k norm, rotary embedding
(Su et al., 2021) and the store of K and V into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import options, traits


@triton.jit
def _rotate(
    in_ptr, out_ptr, weight_ptr, cos_sin_ptr, rows, live, in_stride, out_stride, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads `rows` [H] of one token from in_ptr to out_ptr. A head is held as
    the two halves that rotate into each other, and a tail that does not rotate."""
    half: tl.constexpr = ROTARY // 2
    pair = tl.arange(0, HALF_PAD)
    if INTERLEAVED:
        at_a = 2 * pair
        at_b = 2 * pair + 1
    else:
        at_a = pair
        at_b = pair + half
    inside = live[:, None] & (pair[None, :] < half)
    from_row = in_ptr + rows[:, None] * in_stride
    to_row = out_ptr + rows[:, None] * out_stride
    a = tl.load(from_row + at_a[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_row + at_b[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(a * a + b * b, 1)
    if TAIL_PAD > 0:
        at_tail = ROTARY + tl.arange(0, TAIL_PAD)
        in_tail = live[:, None] & (at_tail[None, :] < DIM)
        tail = tl.load(from_row + at_tail[None, :], mask=in_tail, other=0.0).to(tl.float32)
        squares += tl.sum(tail * tail, 1)
    if NORM:
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        weight_a = tl.load(weight_ptr + at_a, mask=pair < half, other=0.0).to(tl.float32) + OFFSET
        weight_b = tl.load(weight_ptr + at_b, mask=pair < half, other=0.0).to(tl.float32) + OFFSET
        a = a * inverse * weight_a[None, :]
        b = b * inverse * weight_b[None, :]
        if TAIL_PAD > 0:
            weight = tl.load(weight_ptr + at_tail, mask=at_tail < DIM, other=0.0).to(tl.float32)
            tail = tail * inverse * (weight + OFFSET)[None, :]
    if ROPE:
        cos = tl.load(cos_sin_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(cos_sin_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)[
            None, :
        ]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    kind = out_ptr.dtype.element_ty
    tl.store(to_row + at_a[None, :], a.to(kind), mask=inside)
    tl.store(to_row + at_b[None, :], b.to(kind), mask=inside)
    if TAIL_PAD > 0:
        tl.store(to_row + at_tail[None, :], tail.to(kind), mask=in_tail)


@triton.jit
def _qk_norm_rope_store(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, slots_ptr, cos_sin_ptr,
    q_weight_ptr, k_weight_ptr, eps,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    kc_stride_b, kc_stride_h, kc_stride_t, vc_stride_b, vc_stride_h, vc_stride_t, cos_sin_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,
    D_PAD: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr,
    PAGE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, OFFSET: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, groups of H heads: first those of q, then of k, then of v)."""
    Q_GROUPS: tl.constexpr = (HEADS + H - 1) // H
    KV_GROUPS: tl.constexpr = (KV_HEADS + H - 1) // H
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        return
    cos_sin_ptr += position * cos_sin_stride
    if group < Q_GROUPS:
        rows = group * H + tl.arange(0, H)
        _rotate(
            q_ptr + token * q_stride_t, out_ptr + token * HEADS * DIM, q_weight_ptr, cos_sin_ptr,
            rows, rows < HEADS, q_stride_h, DIM, eps,
            DIM, ROTARY, HALF_PAD, TAIL_PAD, Q_NORM, OFFSET, ROPE, INTERLEAVED,
        )  # fmt: skip
    elif group < Q_GROUPS + KV_GROUPS:
        rows = (group - Q_GROUPS) * H + tl.arange(0, H)
        to = k_cache_ptr + slot // PAGE * kc_stride_b + slot % PAGE * kc_stride_t
        _rotate(
            k_ptr + token * k_stride_t, to, k_weight_ptr, cos_sin_ptr,
            rows, rows < KV_HEADS, k_stride_h, kc_stride_h, eps,
            DIM, ROTARY, HALF_PAD, TAIL_PAD, K_NORM, OFFSET, ROPE, INTERLEAVED,
        )  # fmt: skip
    else:
        rows = (group - Q_GROUPS - KV_GROUPS) * H + tl.arange(0, H)
        dims = tl.arange(0, D_PAD)
        inside = (rows[:, None] < KV_HEADS) & (dims[None, :] < DIM)
        from_row = v_ptr + token * v_stride_t + rows[:, None] * v_stride_h
        values = tl.load(from_row + dims[None, :], mask=inside, other=0.0)
        to = v_cache_ptr + slot // PAGE * vc_stride_b + slot % PAGE * vc_stride_t
        to_row = to + rows[:, None] * vc_stride_h
        values = values.to(v_cache_ptr.dtype.element_ty)
        tl.store(to_row + dims[None, :], values, mask=inside)


def qk_norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    heads_per_program: int | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Store K and V of T tokens, and return the rotated queries, [T, heads, D], dense.

    q: [T, heads, D]; k, v: [T, kv_heads, D]; views into one projection's output are read in place.
    positions: int [T]. cos_sin: [positions, rotary dims], cosines then sines of each pair's angle;
    None rotates nothing. q_weight, k_weight: [D], per-head RMS norms (None: no norm).
    k_cache, v_cache: [blocks, kv_heads, block_size, D]. slots: int [T], -1 is padding: nothing is
    stored and that query is undefined. interleaved: pairs are neighbours instead of halves.
    """
    card = traits(q.device)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    rotary = dim - dim % 2 if cos_sin is None else cos_sin.shape[-1]
    width = heads_per_program or (1 if tokens * heads <= 4096 else 8)
    groups = triton.cdiv(heads, width) + 2 * triton.cdiv(kv_heads, width)
    use_pdl = card.pdl if pdl is None else pdl
    angles = positions if cos_sin is None else cos_sin
    _qk_norm_rope_store[(tokens, groups)](
        q, k, v, out, k_cache, v_cache, positions, slots, angles,
        q if q_weight is None else q_weight, k if k_weight is None else k_weight, eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], 0 if cos_sin is None else cos_sin.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, H=width, DIM=dim, D_PAD=triton.next_power_of_2(dim),
        ROTARY=rotary, HALF_PAD=triton.next_power_of_2(rotary // 2),
        TAIL_PAD=triton.next_power_of_2(dim - rotary) if dim > rotary else 0,
        PAGE=k_cache.shape[2], Q_NORM=q_weight is not None, K_NORM=k_weight is not None,
        OFFSET=weight_offset, ROPE=cos_sin is not None, INTERLEAVED=interleaved, PDL=use_pdl,
        **options(use_pdl, num_warps=1 if width == 1 else 4),
    )  # fmt: skip
    return out
