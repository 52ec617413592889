"""Preparing q and k, and writing k and v into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.arguments import Scratch
from quire.ops.kv import KVFormat, KVLayer
from quire.ops.reference import kv8
from quire.ops.reference.dense import rms_norm


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
    scratch: Scratch | None = None,
) -> Tensor:
    """Norms the heads of q and k, rotates them, and stores k and v in the paged cache.

    Returns q [T, Hq, D].

    Args:
        qkv: [T, Hq + 2 * Hkv, D], the fused projection.
        kv: destination of k and v, rounded to 8 bits if the cache has 8 bits.
        positions: int [T].
        slots: int [T], destination of each token (block * BS + offset); -1 stores nothing.
        cos_sin: float32 [positions, rotary], the cosines and then the sines for the first `rotary`
            dimensions of a head, which rotate in pairs (i, i + rotary / 2) (Su et al. 2021). None
            means no rotation.
        q_weight: [D], RMSNorm weights over a head of q, applied before the rotation, or None.
        k_weight: like `q_weight`, for k.
        interleaved: dimensions rotate in pairs (2 i, 2 i + 1) instead.
    """
    scratch = {} if scratch is None else scratch
    kv_heads = kv.k.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]
    if q_weight is not None and k_weight is not None:
        q, k = qk[:, :heads], qk[:, heads:]
        qk = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)
    if cos_sin is not None:
        qk = rotate(qk, *cos_sin_of(cos_sin, positions, qkv.dtype, scratch), interleaved)
    plan = store_plan(slots, kv.k, scratch)
    _put(plan, qk[:, heads:], kv.k, kv.k_scale, kv.format)
    _put(plan, qkv[:, heads + kv_heads :], kv.v, kv.v_scale, kv.format)
    return qk[:, :heads]


def _put(
    plan: StorePlan, values: Tensor, cache: Tensor, scale: Tensor | None, kv_format: KVFormat
) -> None:
    """Stores values [T, Hkv, D], and their scales if each token has its own."""
    if scale is None:
        plan.store(values, cache)
        return
    kv8.store(plan, values, cache, scale, kv_format)


def cos_sin_of(
    table: Tensor, positions: Tensor, dtype: torch.dtype, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Returns the cosines [T, 1, rotary], and the sines with the sign of the half that they
    multiply."""
    key = ("rope", table.data_ptr(), dtype)
    found: tuple[Tensor, Tensor] | None = scratch.get(key)
    if found is None:
        # Padding tokens may have any position, so positions are clamped to the table.
        rows = table.index_select(0, positions.clamp(0, table.shape[0] - 1)).to(dtype)
        cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
        found = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        scratch[key] = found
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary = cos.shape[-1]
    if rotary < x.shape[-1]:
        turned = rotate(x[..., :rotary], cos, sin, interleaved)
        return torch.cat((turned, x[..., rotary:]), dim=-1)
    if interleaved:
        halves = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)
        turned = rotate(halves, cos, sin, False).view(*x.shape[:-1], 2, -1)
        return turned.transpose(-1, -2).reshape(x.shape)
    half = rotary // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return (x * cos).add_(swapped.mul_(sin))


def host_reads(x: Tensor) -> bool:
    """Whether the host can read `x` without waiting for a device."""
    return x.device.type == "cpu"


def token_rows(cache: Tensor) -> tuple[Tensor, int]:
    """Returns a [rows, D] view of the memory of `cache` [NB, Hkv, BS, D], and the number of rows
    from one block to the next, `step`.

    Token `o` of head `h` of block `b` is row b * step + h * BS + o."""
    return _row_view(cache, cache.shape[3])


def head_rows(cache: Tensor) -> tuple[Tensor, int]:
    """Returns the same as `token_rows`, but with rows of BS * D values: one per block and head.

    Head `h` of block `b` is row b * step + h."""
    return _row_view(cache, cache.shape[2] * cache.shape[3])


def _row_view(cache: Tensor, width: int) -> tuple[Tensor, int]:
    blocks, heads, size, head_dim = cache.shape
    step = cache.stride(0) // width
    rows = (blocks - 1) * step + heads * size * head_dim // width
    return cache.as_strided((rows, width), (width, 1)), step


@dataclass(slots=True)
class StorePlan:
    """The cache rows that a store writes, and their tokens.

    Attributes:
        rows: int64 [N * Hkv], rows of `token_rows` to write.
        source: indices of the tokens that are stored; None means all, in order.
        live: whether any token has a slot. It is None if the host can read the slots. If no token
            has a slot, the store writes back the present content.
    """

    rows: Tensor
    source: Tensor | None
    live: Tensor | None

    def store(self, values: Tensor, cache: Tensor) -> None:
        view, _ = token_rows(cache)
        if self.source is not None:
            values = values.index_select(0, self.source)
        values = values.reshape(-1, values.shape[-1])
        if values.dtype is not view.dtype:
            values = values.to(view.dtype)
        if self.live is not None:
            values = torch.where(self.live, values, view.index_select(0, self.rows))
        view.index_copy_(0, self.rows, values)


def store_plan(slots: Tensor, cache: Tensor, scratch: Scratch) -> StorePlan:
    size = cache.shape[2]
    step = cache.stride(0) // cache.shape[3]
    key = ("store", slots.data_ptr(), cache.shape, step)
    plan: StorePlan | None = scratch.get(key)
    if plan is not None:
        return plan
    valid = slots >= 0
    source: Tensor | None = None
    live: Tensor | None = None
    if host_reads(slots):
        kept = valid.nonzero().squeeze(1)
        if len(kept) < len(slots):
            source = kept
    else:
        # The host cannot know here which tokens are padding, so they repeat the first real one.
        own = torch.arange(len(slots), device=slots.device)
        source = torch.where(valid, own, valid.int().argmax())
        live = valid.any()
    slot = slots.long() if source is None else slots.long().index_select(0, source)
    slot = slot.clamp(min=0)
    block, offset = torch.div(slot, size, rounding_mode="floor"), slot % size
    head = torch.arange(cache.shape[1], device=slots.device) * size
    rows = ((block * step + offset).unsqueeze(1) + head).flatten()
    plan = scratch[key] = StorePlan(rows, source, live)
    return plan
