"""From logits to tokens without a sort of the vocabulary and without the host.

Temperature sampling by the Gumbel-max trick over counter-based noise, so that a token depends on
its request's seed and position alone. Order and meaning of the truncations, and the noise, are
those of `runner.sampling`: min-p, then top-k (ties kept), then top-p of what is left.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.sampling_kernels import SUB, logprob_rows, logprob_tiles, pick, scan

_TILE = 2048
_CAP = 2048
"""Entries that a truncating row sorts at most; flatter rows are bisected instead."""


def sample(
    logits: Tensor,
    lanes: Tensor,
    position: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    truncate: bool = True,
    draw: int = 0,
    cap: int = _CAP,
    pdl: bool | None = None,
) -> Tensor:
    """A token for each row, int32 [N]; rows of lane -1 are padding and undefined.

    logits: [N, vocab] fp32, bf16 or fp16, after penalties and masks, dense rows. lanes: int [N].
    position: int32 [N], the new token's. Per lane, columns of one float32 and one int32 table (any
    stride): temperature (0: greedy), top_p (1: all), min_p (0: all); top_k (0: all), seed
    ([lanes, 2], low and high word), sample_index. truncate: False promises that no row uses top-k,
    top-p or min-p. cap: a power of two, entries a truncating row sorts at most.
    """
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return tokens
    sub = int(SUB.value)
    tiles = triton.cdiv(vocab, _TILE)
    subs = tiles * (_TILE // sub)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    best = floats(rows, tiles)
    entry = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    peaks = sums = stretch = found = best
    if truncate:
        peaks, sums = floats(rows, subs), floats(rows, tiles)
        stretch = torch.empty((rows, subs), dtype=torch.int32, device=device)
        found = torch.empty((rows, cap), dtype=torch.int64, device=device)
    use_pdl = traits(device).pdl if pdl is None else pdl
    columns = (lanes, position, temperature, top_k, top_p, min_p, seed, sample_index)
    strides = (logits.stride(0), temperature.stride(0), top_k.stride(0))
    shared = {"TILE": _TILE, "TRUNCATE": truncate, "FAST": device.type == "cuda", "PDL": use_pdl}
    launch(scan, (rows, tiles))(
        logits, *columns, best, entry, peaks, sums, vocab, *strides, draw, **shared,
        **options(use_pdl, num_warps=4),
    )  # fmt: skip
    launch(pick, (rows,))(
        logits, *columns, best, entry, peaks, sums, stretch, found, tokens, vocab, *strides, draw,
        tiles, subs, TILES_PAD=triton.next_power_of_2(tiles),
        SUBS_PAD=triton.next_power_of_2(subs), CAP=cap, AT_ONCE=16, **shared,
        **options(use_pdl, num_warps=8 if truncate else 1),
    )  # fmt: skip
    return tokens


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 [N] and ranks int32 [N] (1: the likeliest) of tokens int32 [N] (-1:
    padding, undefined) under logits [N, vocab]."""
    rows, vocab = logits.shape
    device = logits.device
    value = torch.empty(rows, dtype=torch.float32, device=device)
    own_rank = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return value, own_rank
    tiles = triton.cdiv(vocab, _TILE)
    peak, total = torch.empty((2, rows, tiles), dtype=torch.float32, device=device)
    rank = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    use_pdl = traits(device).pdl if pdl is None else pdl
    launch(logprob_tiles, (rows, tiles))(
        logits, tokens, peak, total, rank, vocab, logits.stride(0), TILE=_TILE, PDL=use_pdl,
        **options(use_pdl, num_warps=4),
    )  # fmt: skip
    launch(logprob_rows, (rows,))(
        logits, tokens, peak, total, rank, value, own_rank, logits.stride(0), tiles,
        TILES_PAD=triton.next_power_of_2(tiles), PDL=use_pdl, **options(use_pdl, num_warps=1),
    )  # fmt: skip
    return value, own_rank
