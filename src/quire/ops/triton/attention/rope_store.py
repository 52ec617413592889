"""One kernel between the QKV projection and attention.

It norms q and k, applies the rotary embedding (Su et al., 2021), and stores K and V in the paged
cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.choose import current_policy
from quire.ops.kv import KVLayer
from quire.ops.triton.attention import kv8
from quire.ops.triton.launch import launch, options, traits


@triton.jit
def _rotate(
    in_ptr, out_ptr, scale_ptr, weight_ptr, cos_sin_ptr, rows, live, in_stride, out_stride,
    scale_stride, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    OWN_SCALES: tl.constexpr,
):  # fmt: skip
    """Norms and rotates the heads `rows` [H] of one token from in_ptr to out_ptr.

    A head is held as two parts that rotate together, and a tail that does not rotate. The parts are
    its halves, or its even and odd dimensions. KIND and OWN_SCALES describe the stored values, see
    `kv8.constants`."""
    half: tl.constexpr = ROTARY // 2
    # Rounds to the weight's dtype before the product, see `ops.rms_norm`.
    kind = weight_ptr.dtype.element_ty
    pair = tl.arange(0, HALF_PAD)
    at_a = pair
    at_b = half + pair
    if INTERLEAVED:
        at_a = 2 * pair
        at_b = 2 * pair + 1
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
        weight_a = tl.load(weight_ptr + at_a, mask=pair < half, other=0.0).to(tl.float32)
        weight_b = tl.load(weight_ptr + at_b, mask=pair < half, other=0.0).to(tl.float32)
        a = (a * inverse).to(kind).to(tl.float32) * weight_a[None, :]
        b = (b * inverse).to(kind).to(tl.float32) * weight_b[None, :]
        if TAIL_PAD > 0:
            weight = tl.load(weight_ptr + at_tail, mask=at_tail < DIM, other=0.0).to(tl.float32)
            tail = (tail * inverse).to(kind).to(tl.float32) * weight[None, :]
    if ROPE:
        angles = cos_sin_ptr + pair
        cos = tl.load(angles, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(angles + half, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        turned = a * cos - b * sin
        b = b * cos + a * sin
        a = turned
    inverse_scale = rows * 0.0
    if KIND:
        top = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        if TAIL_PAD > 0:
            top = tl.maximum(top, tl.max(tl.abs(tail), 1))
        scale_at = scale_ptr + rows * scale_stride
        inverse_scale = kv8.inverse_scale(top, scale_at, live, KIND, OWN_SCALES)
    kv8.store(to_row + at_a[None, :], a, inside, inverse_scale, KIND)
    kv8.store(to_row + at_b[None, :], b, inside, inverse_scale, KIND)
    if TAIL_PAD > 0:
        kv8.store(to_row + at_tail[None, :], tail, in_tail, inverse_scale, KIND)


# The alignment of scales differs between layers. It is ignored, so that the kernel compiles once.
@triton.jit(do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr"])
def _qk_norm_rope_store(
    qkv_ptr, out_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, positions_ptr, slots_ptr,
    cos_sin_ptr, q_weight_ptr, k_weight_ptr, eps, stride_t, stride_h,
    kv_stride_b, kv_stride_h, kv_stride_t, scale_stride_b, scale_stride_h, cos_sin_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr,
    D_PAD: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, OWN_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norms and rotates q and k, and stores k and v.

    Grid: (tokens, groups of H heads). The heads of q come first, then those of k, then of v."""
    Q_GROUPS: tl.constexpr = (HEADS + H - 1) // H
    KV_GROUPS: tl.constexpr = (KV_HEADS + H - 1) // H
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    if PDL:
        gdc_wait()
    if slot < 0:
        return
    cos_sin_ptr += position * cos_sin_stride
    from_token = qkv_ptr + token * stride_t
    place = slot // BLOCK_TOKENS * kv_stride_b + slot % BLOCK_TOKENS * kv_stride_t
    if OWN_SCALES:
        k_scale_ptr += slot // BLOCK_TOKENS * scale_stride_b + slot % BLOCK_TOKENS
        v_scale_ptr += slot // BLOCK_TOKENS * scale_stride_b + slot % BLOCK_TOKENS
    if group < Q_GROUPS:
        rows = group * H + tl.arange(0, H)
        _rotate(
            from_token, out_ptr + token * HEADS * DIM, k_scale_ptr, q_weight_ptr, cos_sin_ptr,
            rows, rows < HEADS, stride_h, DIM, 0, eps,
            DIM, ROTARY, HALF_PAD, TAIL_PAD, Q_NORM, ROPE, INTERLEAVED, 0, False,
        )  # fmt: skip
    elif group < Q_GROUPS + KV_GROUPS:
        rows = (group - Q_GROUPS) * H + tl.arange(0, H)
        _rotate(
            from_token + HEADS * stride_h, k_ptr + place, k_scale_ptr, k_weight_ptr, cos_sin_ptr,
            rows, rows < KV_HEADS, stride_h, kv_stride_h, scale_stride_h, eps,
            DIM, ROTARY, HALF_PAD, TAIL_PAD, K_NORM, ROPE, INTERLEAVED, KIND, OWN_SCALES,
        )  # fmt: skip
    else:
        rows = (group - Q_GROUPS - KV_GROUPS) * H + tl.arange(0, H)
        dims = tl.arange(0, D_PAD)
        live = rows < KV_HEADS
        inside = live[:, None] & (dims[None, :] < DIM)
        from_row = from_token + (HEADS + KV_HEADS + rows[:, None]) * stride_h
        values = tl.load(from_row + dims[None, :], mask=inside, other=0.0)
        inverse_scale = rows * 0.0
        if KIND:
            values = values.to(tl.float32)
            scale_at = v_scale_ptr + rows * scale_stride_h
            top = tl.max(tl.abs(values), 1)
            inverse_scale = kv8.inverse_scale(top, scale_at, live, KIND, OWN_SCALES)
        to_row = v_ptr + place + rows[:, None] * kv_stride_h
        kv8.store(to_row + dims[None, :], values, inside, inverse_scale, KIND)


def qk_norm_rope_store(
    qkv: Tensor,
    kv: KVLayer,
    *,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    scratch: object = None,
    heads_per_program: int | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Norms and rotates the heads of q and k, stores k and v, and returns q [T, heads, D], dense.

    Args:
        qkv: [T, heads + 2 * kv_heads, D], the fused projection, read in place.
        kv: any block, head and token stride.
        positions: int [T].
        slots: int [T]. Slot -1 is padding. Its k and v are not stored, and its q is undefined.
        cos_sin: [positions, rotary], cosines, then sines, of pairs (i, i + rotary / 2). None means
            no rotation.
        q_weight: [D], weights of an RMSNorm over a head of q, or None.
        k_weight: [D], weights of an RMSNorm over a head of k, or None.
        eps: epsilon of the norms.
        interleaved: the pairs are (2 i, 2 i + 1).
        scratch: not used.
        heads_per_program: H; by default it follows from the shapes.
        pdl: programmatic dependent launch; by default it is used on cards that have it.
    """
    del scratch
    tokens, all_heads, dim = qkv.shape
    kv_heads = kv.k.shape[1]
    heads = all_heads - 2 * kv_heads
    out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return out
    rotary = dim - dim % 2 if cos_sin is None else cos_sin.shape[-1]
    # The number of heads of a program decides how the sum over a head is spread over threads.
    few = tokens < 128 and not current_policy().deterministic
    width = heads_per_program or (4 if few else 8)
    groups = triton.cdiv(heads, width) + 2 * triton.cdiv(kv_heads, width)
    card = traits(qkv.device)
    use_pdl = card.pdl if pdl is None else pdl
    k, v, k_scale, v_scale = _bytes(kv)
    kinds = kv8.constants(kv.format, card)
    angles = positions if cos_sin is None else cos_sin
    launch(_qk_norm_rope_store, (tokens, groups))(
        qkv, out, k, v, k_scale, v_scale, positions, slots, angles,
        qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, eps,
        *qkv.stride()[:2], *k.stride()[:3],
        *(k_scale.stride()[:2] if kinds["OWN_SCALES"] else (0, 1)),
        0 if cos_sin is None else cos_sin.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, H=width, DIM=dim, D_PAD=triton.next_power_of_2(dim),
        ROTARY=rotary, HALF_PAD=triton.next_power_of_2(rotary // 2),
        TAIL_PAD=triton.next_power_of_2(dim - rotary) if dim > rotary else 0,
        BLOCK_TOKENS=kv.k.shape[2], Q_NORM=q_weight is not None, K_NORM=k_weight is not None,
        ROPE=cos_sin is not None, INTERLEAVED=interleaved, KIND=kinds["KIND"],
        OWN_SCALES=kinds["OWN_SCALES"], PDL=use_pdl,
        **options(use_pdl, num_warps=1 if width == 1 else 4),
    )  # fmt: skip
    return out


def _bytes(kv: KVLayer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns k, v, k_scale and v_scale as the kernel writes them. If there are no scales, another
    tensor takes their place, and the kernel does not write it."""
    if kv.k_scale is None or kv.v_scale is None:
        return kv.k, kv.v, kv.k, kv.v
    return kv.k.view(torch.int8), kv.v.view(torch.int8), kv.k_scale, kv.v_scale
