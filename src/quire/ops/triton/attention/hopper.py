"""Attention of long rows on Hopper cards: the launch of `hopper_kernel.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.kv import KVLayer
from quire.ops.triton.attention import kv8
from quire.ops.triton.attention.hopper_kernel import attend_pages
from quire.ops.triton.launch import launch, options, traits

_ROWS = 64
"""(token, head) pairs of a warpgroup."""
_COLUMNS = 64
"""Values of a TMA box's row: the 16-bit values of a swizzled row of shared memory."""
_SWIZZLE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_ROUNDS = 2
"""With more tiles per multiprocessor than this, each program takes several tiles."""


@dataclass(frozen=True)
class RingTiles:
    """Tiles of the kernel for Hopper cards.

    Attributes:
        n: KV positions of a tile.
        stages: tiles of K and of V in flight.
        programs: the most programs, which share the tiles of queries; 0 means one for each tile.
        warpgroups: warpgroups of `_ROWS` pairs each that make a tile of queries, 1 or 2.
    """

    n: int
    stages: int
    programs: int
    warpgroups: int = 2


def takes(q: Tensor, kv: KVLayer) -> bool:
    """Whether the kernel supports these shapes and dtypes.

    It needs 16-bit queries, KV of the same dtype or of 8 bits, and heads of 64 or 128 dimensions.
    Pages must have at least 8 tokens, and be whole rows of a head's values in the pool."""
    stored, dim = (kv.k, kv.v), q.shape[2]
    known = kv.k.dtype == q.dtype if kv.k_scale is None else kv.k.dtype.itemsize == 1
    return (
        known
        and q.dtype in (torch.bfloat16, torch.float16)
        and dim in (64, 128)
        and kv.k.shape[2] >= 8
        and all(x.dtype == kv.k.dtype for x in stored)
        and all(x.stride(2) == dim and x.stride(3) == 1 for x in stored)
        and all(x.stride(i) % dim == 0 for x in stored for i in (0, 1))
    )


def few_tiles(kv: KVLayer, num_sms: int) -> RingTiles:
    """Returns the tiles for rows whose queries fit one warpgroup's tile."""
    if kv.k.shape[3] == 64:
        return RingTiles(128, 4, num_sms, 1)
    return RingTiles(128, 3 if kv.k_scale is None else 2, num_sms, 1)


def ring_tiles(items: int, head_dim: int, num_sms: int) -> RingTiles:
    """Returns the tiles for `items` tiles of queries. All KV heads count."""
    programs = num_sms if items > _ROUNDS * num_sms else 0
    return RingTiles(128, 2 if head_dim == 128 else 3, programs)


def attend_long_rows(
    q: Tensor,
    kv: KVLayer,
    sinks: Tensor | None,
    out: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    scales: tuple[float, float],
    *,
    softcap: bool,
    window: int | None,
    shortest: int,
    pdl: bool,
    tiles: RingTiles | None = None,
) -> None:
    """Writes the attention of rows of at least `shortest` tokens to out [T, heads, D].

    Args:
        rows: query_start, seq_lens, block_table.
        scales: the factor of scores, in log2 units, and the softcap; see `attention.py`.
        tiles: by default they follow from the shapes.
    """
    (tokens, heads, dim), (_, kv_heads, block_tokens, _) = q.shape, kv.k.shape
    group, (query_start, seq_lens, table) = heads // kv_heads, rows
    rows_at_once = (2 if tiles is None else tiles.warpgroups) * _ROWS
    most = tokens * group // rows_at_once + len(seq_lens)
    items = kv_heads * most
    tiles = tiles or ring_tiles(items, dim, traits(q.device).num_sms)
    programs = min(items, tiles.programs or items)
    form = kv8.constants(kv.format, traits(q.device))
    k_scale, v_scale = (q, q) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    launch(attend_pages, (programs,))(
        q, _rows(kv.k, tiles), _rows(kv.v, tiles), k_scale, v_scale,
        q if sinks is None else sinks, out, query_start, seq_lens, table, len(seq_lens), kv_heads,
        most, triton.cdiv(items, programs), shortest, *scales, window or 0,
        *q.stride()[:2], *out.stride()[:2],
        *(x.stride(i) // dim for x in (kv.k, kv.v) for i in (0, 1)),
        *(k_scale.stride()[:2] if form["OWN_SCALES"] else (0, 0)), table.stride(0),
        GROUP=group, D=dim, BLOCK_TOKENS=block_tokens, BN=tiles.n, STAGES=tiles.stages,
        SOFTCAP=softcap, WINDOW=window is not None, SINKS=sinks is not None,
        CONSUMERS=tiles.warpgroups, KIND=form["KIND"], OWN_SCALES=form["OWN_SCALES"], PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip


def _rows(x: Tensor, tiles: RingTiles) -> TensorDescriptor:
    """Describes the pool as rows of a head's values, beginning at a layer's first value."""
    blocks, heads, block_tokens, dim = x.shape
    rows = ((blocks - 1) * x.stride(0) + (heads - 1) * x.stride(1)) // dim + block_tokens
    page = min(block_tokens, tiles.n)
    if x.dtype.itemsize == 1:
        swizzle = NVMMASharedLayout(swizzle_byte_width=dim, element_bitwidth=8, rank=2)
        return TensorDescriptor(x.view(torch.uint8), [rows, dim], [dim, 1], [page, dim], swizzle)
    return TensorDescriptor(x, [rows, dim], [dim, 1], [page, _COLUMNS], _SWIZZLE)
