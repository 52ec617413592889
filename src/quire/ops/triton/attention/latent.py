"""Kernels before and after attention over latents.

They norm, rotate and store latents, and multiply each head by the projection from latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.arguments import RmsScale, Scratch
from quire.ops.choose import current_policy
from quire.ops.kv import KVLayer
from quire.ops.triton.attention import kv8
from quire.ops.triton.launch import DeviceTraits, launch, options, traits


@triton.jit
def _turn(
    in_ptr, out_ptr, cos_sin_ptr, positions, inside, in_rows, out_rows, cos_sin_stride,
    WIDTH: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotates vectors of WIDTH numbers for tokens [n] at `positions`.

    Args:
        in_rows: [n, 1], offsets of the vectors from `in_ptr`.
        out_rows: [n, 1], offsets of the results from `out_ptr`.
    """
    half: tl.constexpr = WIDTH // 2
    pair = tl.arange(0, HALF_PAD)
    at_a = pair
    at_b = half + pair
    if INTERLEAVED:
        at_a = 2 * pair
        at_b = 2 * pair + 1
    inside = inside[:, None] & (pair[None, :] < half)
    angles = cos_sin_ptr + positions[:, None] * cos_sin_stride + pair[None, :]
    cos = tl.load(angles, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angles + half, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(in_ptr + in_rows + at_a[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(in_ptr + in_rows + at_b[None, :], mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + out_rows + at_a[None, :], (a * cos - b * sin).to(kind), mask=inside)
    tl.store(out_ptr + out_rows + at_b[None, :], (b * cos + a * sin).to(kind), mask=inside)


@triton.jit
def _store_latent(
    latent_ptr, kv_ptr, key_ptr, scale_ptr, weight_ptr, positions_ptr, slots_ptr, cos_sin_ptr, eps,
    in_stride, stride_b, stride_t, key_stride_b, key_stride_t, scale_stride_b, cos_sin_stride,
    RANK: tl.constexpr, R_PAD: tl.constexpr, KEY: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    OWN_SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms, rotates and stores latents. Grid: (tokens,).

    For KIND and OWN_SCALES see `kv8.constants`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dims = tl.arange(0, R_PAD)
    weight = tl.load(weight_ptr + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if slot < 0:
        return
    from_token = latent_ptr + token * in_stride
    block = slot // BLOCK_TOKENS
    place = kv_ptr + block * stride_b + slot % BLOCK_TOKENS * stride_t
    key_place = key_ptr + block * key_stride_b + slot % BLOCK_TOKENS * key_stride_t
    x = tl.load(from_token + dims, mask=dims < RANK, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
    # Rounds to the weight's dtype before the product, see `ops.rms_norm`.
    normed = (x * inverse).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight
    if KIND:
        normed = normed.to(latent_ptr.dtype.element_ty).to(tl.float32)
        scale_at = scale_ptr
        if OWN_SCALES:
            scale_at += block * scale_stride_b + slot % BLOCK_TOKENS
        inverse_scale = kv8.inverse_scale(
            tl.max(tl.abs(normed), 0), scale_at, slot >= 0, KIND, OWN_SCALES
        )
        tl.store(place + dims, kv8.encode(normed * inverse_scale, KIND), mask=dims < RANK)
    else:
        tl.store(place + dims, normed.to(kv_ptr.dtype.element_ty), mask=dims < RANK)
    one = tl.arange(0, 1)
    _turn(
        from_token + RANK, key_place, cos_sin_ptr, position + one, one == 0, one[:, None] * 0,
        one[:, None] * 0, cos_sin_stride, KEY, HALF_PAD, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _head_products(
    x_ptr, w_ptr, y_ptr, positions_ptr, cos_sin_ptr, tokens, x_stride_t, x_stride_h, w_stride_h,
    w_stride_n, w_stride_k, y_stride_t, y_stride_h, cos_sin_stride,
    N: tl.constexpr, K: tl.constexpr, KEY: tl.constexpr, HALF_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y[t, h, n] = sum of x[t, h, k] w[h, n, k] over k < K.

    Grid: (tiles of tokens, tiles of n, heads). If KEY > 0, x has KEY more numbers after
    x[t, h, K - 1]. One more tile of n rotates them and stores them after y[t, h, N - 1]."""
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(2).to(tl.int64)
    live = token < tokens
    wide = token.to(tl.int64)
    x_rows = wide[:, None] * x_stride_t + head * x_stride_h
    y_rows = wide[:, None] * y_stride_t + head * y_stride_h
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    w_ptr += head * w_stride_h
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if KEY > 0:
        if tl.program_id(1) * BN >= N:
            positions = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64)
            _turn(
                x_ptr + K, y_ptr + N, cos_sin_ptr, positions, live, x_rows, y_rows, cos_sin_stride,
                KEY, HALF_PAD, INTERLEAVED,
            )  # fmt: skip
            return
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        at = start + inner
        x = tl.load(x_ptr + x_rows + at[None, :], mask=live[:, None] & (at[None, :] < K), other=0.0)
        w = tl.load(
            w_ptr + at[:, None] * w_stride_k + out[None, :] * w_stride_n,
            mask=(at[:, None] < K) & (out[None, :] < N),
            other=0.0,
        )
        if UPCAST:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    inside = live[:, None] & (out[None, :] < N)
    tl.store(y_ptr + y_rows + out[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Tile:
    m: int
    n: int
    k: int
    warps: int
    stages: int


_FIXED = 64
"""Tokens of a tile under `--deterministic`, when it must not depend on the number of tokens."""


def _tile(tokens: int, card: DeviceTraits) -> _Tile:
    if card.capability < (8, 0):
        return _Tile(16, 32, 32, 4, 1)
    if current_policy().deterministic:
        tokens = _FIXED
    m = min(128, max(16, triton.next_power_of_2(tokens)))
    # With few tokens the read of the weights takes most of the time, and more programs load more of
    # them at once.
    return _Tile(m, 128 if m > 32 else 64, 64, 8 if m > 64 else 4, 3)


def _products(x: Tensor, weight: Tensor, out: Tensor, turn: dict[str, Any] | None = None) -> None:
    """Writes products of heads to out [T, H, ...], see `_head_products`.

    Args:
        x: [T, H, ...].
        weight: [H, N, K].
        turn: arguments of the rotation of the numbers after K, or None.
    """
    (tokens, heads, _), (_, n, k) = x.shape, weight.shape
    if tokens == 0:
        return
    card = traits(x.device)
    tile = _tile(tokens, card)
    upcast = x.dtype == torch.bfloat16 and not card.bf16
    key, positions, cos_sin, stride = 0, x, x, 0
    if turn is not None:
        positions, cos_sin = turn["positions"], turn["cos_sin"]
        key, stride = cos_sin.shape[-1], cos_sin.stride(0)
    grid = triton.cdiv(tokens, tile.m), triton.cdiv(n, tile.n) + (key > 0), heads
    launch(_head_products, grid)(
        x, weight, out, positions, cos_sin, tokens, *x.stride()[:2], *weight.stride(),
        *out.stride()[:2], stride,
        N=n, K=k, KEY=key, HALF_PAD=triton.next_power_of_2(max(1, key // 2)),
        INTERLEAVED=turn is not None and turn["interleaved"], BM=tile.m, BN=tile.n, BK=tile.k,
        UPCAST=upcast, PRECISION="ieee" if upcast or x.dtype == torch.float32 else "tf32",
        PDL=card.pdl, **options(card.pdl, num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def latent_queries(
    q: Tensor,
    weight: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `ops.latent_queries`. The weight is read along its dense dimension."""
    del scratch
    tokens, heads, _ = q.shape
    width = weight.shape[2] + cos_sin.shape[-1]
    out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    turn = {"positions": positions, "cos_sin": cos_sin, "interleaved": interleaved}
    _products(q, weight.transpose(1, 2), out, turn)
    return out


def latent_values(mean: Tensor, weight: Tensor) -> Tensor:
    """See `ops.latent_values`."""
    heads, size, _ = weight.shape
    out = torch.empty((len(mean), heads, size), dtype=mean.dtype, device=mean.device)
    _products(mean, weight, out)
    return out.flatten(1)


@dataclass(frozen=True)
class StoredLatents:
    """A layer's latents as kernels read and write them.

    Attributes:
        tensors: latents, keys and scales. 8-bit values are viewed as int8.
        strides: block and token strides of latents and of keys, and the block stride of scales.
        constants: KIND and OWN_SCALES, see `kv8.constants`.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    strides: tuple[int, ...]
    constants: dict[str, int]


def stored_latents(kv: KVLayer, rank: int, card: DeviceTraits) -> StoredLatents:
    """Returns the latents of a layer, of `rank` numbers each, stored as by `ops.store_latent`."""
    latents, keys, scales = kv.k, kv.k[..., rank:], kv.k
    if kv.k_scale is not None:
        latents, keys, scales = kv.k.view(torch.int8), kv.v, kv.k_scale
    found = kv8.constants(kv.format, card)
    del found["PACKED"]
    strides = latents.stride(0), latents.stride(2), keys.stride(0), keys.stride(2), scales.stride(0)
    return StoredLatents((latents, keys, scales), strides, found)


def store_latent(
    latent: Tensor,
    kv: KVLayer,
    *,
    norm: RmsScale,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    scratch: Scratch | None = None,
) -> None:
    """See `ops.store_latent`."""
    del scratch
    tokens, rank, key = len(latent), len(norm.weight), cos_sin.shape[-1]
    if tokens == 0:
        return
    card = traits(latent.device)
    stored = stored_latents(kv, rank, card)
    launch(_store_latent, (tokens,))(
        latent, *stored.tensors, norm.weight, positions, slots, cos_sin, norm.eps,
        latent.stride(0), *stored.strides, cos_sin.stride(0),
        RANK=rank, R_PAD=triton.next_power_of_2(rank), KEY=key,
        HALF_PAD=triton.next_power_of_2(key // 2), BLOCK_TOKENS=kv.k.shape[2],
        INTERLEAVED=interleaved, PDL=card.pdl, **stored.constants,
        **options(card.pdl, num_warps=4),
    )  # fmt: skip
