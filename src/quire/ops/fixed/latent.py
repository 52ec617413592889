"""Latent attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.arguments import Scratch
from quire.ops.fixed.attention import paged_attention
from quire.ops.fixed.products import products, wider
from quire.ops.kv import KVLayer
from quire.ops.reference.cache import cos_sin_of, rotate
from quire.ops.reference.latent import widened_latents


def latent_queries(
    q: Tensor,
    weight: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `reference.latent.latent_queries`."""
    scratch = {} if scratch is None else scratch
    content, turning = torch.split(q, [weight.shape[1], cos_sin.shape[-1]], dim=-1)
    angles = cos_sin_of(cos_sin, positions, q.dtype, scratch)
    absorbed = _of_heads(content, weight.transpose(1, 2))
    return torch.cat((absorbed, rotate(turning, *angles, interleaved)), dim=-1)


def latent_values(mean: Tensor, weight: Tensor) -> Tensor:
    """See `reference.latent.latent_values`."""
    return _of_heads(mean, weight).flatten(1)


def _of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Returns each head's product, [T, H, N], of x [T, H, K] and weight [H, N, K]."""
    wide = wider(x.dtype)
    each = [
        products(own.to(wide), factor.to(wide)).to(x.dtype)
        for own, factor in zip(x.unbind(1), weight, strict=True)
    ]
    return torch.stack(each, 1)


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
    """See `reference.latent.latent_attention`."""
    kv, block_table = widened_latents(kv, block_table, max_seq_len, q.dtype, scratch)
    means = paged_attention(
        q, kv, query_start, seq_lens, block_table, q_lens=q_lens, max_q_len=max_q_len,
        max_seq_len=max_seq_len, scale=scale, scratch=scratch,
    )  # fmt: skip
    return means[..., :rank]
