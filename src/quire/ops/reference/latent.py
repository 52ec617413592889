"""Multi-head latent attention (DeepSeek-V2, 2024).

Keys and values of a token are projected together into one latent. Heads attend over the latents,
and over one rotated key that all heads share. Both projections from latents are absorbed: a query
is projected into the space of latents, and attention's mean of latents to a head's values. So no
keys or values of single heads exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.ops.arguments import RmsScale, Scratch
from quire.ops.kv import KVLayer
from quire.ops.reference import kv8
from quire.ops.reference.attention import paged_attention
from quire.ops.reference.cache import cos_sin_of, rotate, store_plan
from quire.ops.reference.dense import rms_norm


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
    """Norms tokens' latents, rotates their shared keys, and stores both in the paged cache.

    In 8 bits the cache's k holds latents and its v holds keys. Keys keep the dtype of `latent`,
    because all heads use the same key. Rounding it would cause more error than all other rounding.

    Args:
        latent: [T, R + P], latents and keys as projected, any stride between tokens.
        kv: destination. Its k is [NB, 1, BS, R + P]. In 8 bits k is [NB, 1, BS, R], the latents
            with `k_scale`, and v is [NB, 1, BS, P], the keys.
        norm: norm of the latents, weight [R].
        positions: see `ops.qk_norm_rope_store`.
        slots: see `ops.qk_norm_rope_store`.
        cos_sin: float32 [positions, P].
        interleaved: see `ops.qk_norm_rope_store`.
    """
    scratch = {} if scratch is None else scratch
    content, key = torch.split(latent, [len(norm.weight), cos_sin.shape[-1]], dim=1)
    angles = cos_sin_of(cos_sin, positions, latent.dtype, scratch)
    turned = rotate(key.unsqueeze(1), *angles, interleaved)
    normed, plan = rms_norm(content, *norm).unsqueeze(1), store_plan(slots, kv.k, scratch)
    if kv.k_scale is None:
        plan.store(torch.cat((normed, turned), dim=-1), kv.k)
    else:
        kv8.store(plan, normed, kv.k, kv.k_scale, kv.format)
        plan.store(turned, kv.v)


def latent_queries(
    q: Tensor,
    weight: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    scratch: Scratch | None = None,
) -> Tensor:
    """Returns queries for latents and shared keys, [T, Hq, R + P].

    Args:
        q: [T, Hq, N + P]; the last P dimensions are rotated.
        weight: [Hq, N, R], the keys' part of the projection from latents; strided.
        cos_sin: float32 [positions, P].
    """
    scratch = {} if scratch is None else scratch
    content, turning = torch.split(q, [weight.shape[1], cos_sin.shape[-1]], dim=-1)
    angles = cos_sin_of(cos_sin, positions, q.dtype, scratch)
    absorbed = torch.bmm(content.transpose(0, 1), weight).transpose(0, 1)
    return torch.cat((absorbed, rotate(turning, *angles, interleaved)), dim=-1)


def latent_values(mean: Tensor, weight: Tensor) -> Tensor:
    """Returns the heads' values side by side, [T, Hq * V].

    Args:
        mean: [T, Hq, R], means of latents.
        weight: [Hq, V, R], the values' part of the projection; strided.
    """
    values = torch.bmm(mean.transpose(0, 1), weight.transpose(1, 2))
    return values.transpose(0, 1).flatten(1)


def latent_schedule(
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    heads: int,
    rank: int,
    width: int,
    dtype: torch.dtype,
    tokens: int,
    max_q_len: int,
    even: bool | None = None,
) -> Any:
    """Returns a schedule of `latent_attention` for a step's rows. The twin returns None.

    See `ops.attention_schedule`.

    Args:
        rank: R.
        width: R + P.
    """
    return None


def latent_most_skew(seq_lens: Tensor, heads: int) -> float | None:
    """See `ops.most_skew`."""
    return None


def latent_attention(
    q: Tensor,
    kv: KVLayer,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rank: int,
    q_lens: Sequence[int],
    max_q_len: int,
    max_seq_len: int,
    scale: float,
    scratch: Scratch | None = None,
) -> Tensor:
    """Computes causal attention of each row's last tokens over the row's latents.

    Returns the means of latents, [T, Hq, R], which are undefined for padding tokens. For the other
    arguments see `ops.paged_attention`.

    Args:
        q: [T, Hq, R + P], see `latent_queries`.
        kv: stored latents, see `store_latent`.
        rank: R.
    """
    kv, block_table = widened_latents(kv, block_table, max_seq_len, q.dtype, scratch)
    means = paged_attention(
        q, kv, query_start, seq_lens, block_table, q_lens=q_lens, max_q_len=max_q_len,
        max_seq_len=max_seq_len, scale=scale, scratch=scratch,
    )  # fmt: skip
    return means[..., :rank]


def widened_latents(
    kv: KVLayer, block_table: Tensor, longest: int, dtype: torch.dtype, scratch: Scratch | None
) -> tuple[KVLayer, Tensor]:
    """Returns a table's blocks with latents and keys side by side in `dtype`, and a block table for
    them.

    All layers of a step share the new table. A cache that is not in 8 bits is returned unchanged.

    Args:
        longest: the most tokens of a row.
    """
    if kv.k_scale is None:
        return kv, block_table
    scratch = {} if scratch is None else scratch
    found = scratch.get(("latent blocks", block_table.data_ptr()))
    if found is None:
        ids = block_table[:, : -(-longest // kv.k.shape[2])].clamp(min=0)
        table = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view_as(ids)
        found = scratch["latent blocks", block_table.data_ptr()] = ids.flatten().long(), table
    ids, table = found
    stored = kv.k.view(torch.int8)[ids]
    own = kv.k_scale.expand(stored.shape[:-1]) if kv.k_scale.dim() == 1 else kv.k_scale[ids]
    latents = kv8.dequantize(stored, own, kv.format, dtype)
    both = torch.cat((latents, kv.v[ids].to(dtype)), dim=-1)
    return KVLayer(both, both), table
