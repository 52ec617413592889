"""Samples tokens from logits, without a sort of the vocabulary and without the host.

Temperature sampling uses the Gumbel-max trick over counter-based noise. So a token's noise depends
only on its request's seed and position. The noise and the truncations are the same as in
`ops.reference.sample`: min-p, then top-k (ties kept), then top-p of the rest."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.rows import LogitRows, ProcessedLogits
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.step.sampling_kernels import SUB, logprob_rows, logprob_tiles, pick, scan

_TILE = 2048
_CAP = 2048
"""The most entries that a row with truncation sorts. Flatter rows bisect thresholds instead."""
_LIKELY = 512
"""The most entries that a row with log-probabilities sorts. Flatter rows search them one by one."""
_DRAW = 0
"""The draw number for sampling a token. Other uses of the same position have other draw numbers."""


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
    truncate_rows: bool = True,
    cuts: Tensor | None = None,
    cap: int = _CAP,
) -> Tensor:
    """See `ops.sample`. A row with truncation sorts at most `cap` entries, a power of two."""
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
    if truncate_rows:
        peaks, sums = floats(rows, subs), floats(rows, tiles)
        stretch = torch.empty((rows, subs), dtype=torch.int32, device=device)
        found = torch.empty((rows, cap), dtype=torch.int64, device=device)
    pdl = traits(device).pdl
    columns = (lanes, position, temperature, top_k, top_p, min_p, seed, sample_index)
    strides = (logits.stride(0), temperature.stride(0), top_k.stride(0))
    shared = {
        "TILE": _TILE,
        "TRUNCATE": truncate_rows,
        "FAST": device.type == "cuda",
        "PDL": pdl,
    }
    launch(scan, (rows, tiles))(
        logits, *columns, best, entry, peaks, sums, vocab, *strides, _DRAW, **shared,
        **options(pdl, num_warps=4),
    )  # fmt: skip
    launch(pick, (rows,))(
        logits, *columns, best, entry, peaks, sums, stretch, found, tokens, cuts, vocab, *strides,
        _DRAW, tiles, subs, TILES_PAD=triton.next_power_of_2(tiles),
        SUBS_PAD=triton.next_power_of_2(subs), CAP=cap, AT_ONCE=16, **shared,
        **options(pdl, num_warps=8 if truncate_rows else 1),
    )  # fmt: skip
    return tokens


def scan_rows(
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
) -> tuple[Tensor, Tensor]:
    """Returns the score and the entry of the best token of each tile of each row, [L, tiles].

    The arguments are those of `sample`. No row is truncated."""
    rows, vocab = logits.shape
    tiles, device = triton.cdiv(vocab, _TILE), logits.device
    best = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    entry = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    pdl = traits(device).pdl
    launch(scan, (rows, tiles))(
        logits, lanes, position, temperature, top_k, top_p, min_p, seed, sample_index, best, entry,
        best, best, vocab, logits.stride(0), temperature.stride(0), top_k.stride(0), _DRAW,
        TILE=_TILE, TRUNCATE=False, FAST=device.type == "cuda", PDL=pdl,
        **options(pdl, num_warps=4),
    )  # fmt: skip
    return best, entry


def token_logprobs(
    logits: Tensor,
    rows: LogitRows,
    tokens: Tensor,
    wanted: Tensor,
    out: Tensor,
    processed: ProcessedLogits | None = None,
) -> None:
    """See `ops.token_logprobs`."""
    count, vocab = logits.shape
    device = logits.device
    sub = int(SUB.value)
    tiles = triton.cdiv(vocab, _TILE)
    subs = tiles * (_TILE // sub)
    peaks = torch.empty((count, subs), dtype=torch.float32, device=device)
    sums = torch.empty((count, tiles), dtype=torch.float32, device=device)
    above = torch.empty((count, tiles), dtype=torch.int32, device=device)
    stretch = torch.empty((count, subs), dtype=torch.int32, device=device)
    found = torch.empty((count, _LIKELY), dtype=torch.int64, device=device)
    # The kernels of rows without modes do not have these arguments.
    modes: tuple[Tensor | None, ...] = (None,) * 5
    sizes: Tensor | None = None
    strides: tuple[int | None, ...] = (None, None)
    if processed is not None:
        modes = (*processed[:4], torch.empty_like(above))
        sizes = processed.sizes
        strides = processed.logits.stride(0), processed.temperature.stride(0)
    pdl = traits(device).pdl
    launch(logprob_tiles, (count, tiles))(
        logits, rows.lanes, tokens, wanted, peaks, sums, above, *modes, vocab, logits.stride(0),
        *strides, TILE=_TILE, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    launch(logprob_rows, (count,))(
        logits, rows.lanes, rows.lengths, tokens, wanted, peaks, sums, above, stretch, found, out,
        *modes, sizes, vocab, logits.stride(0), *strides, out.stride(0), (out.shape[1] - 2) // 2,
        tiles, subs, TILES_PAD=triton.next_power_of_2(tiles), SUBS_PAD=triton.next_power_of_2(subs),
        TILE=_TILE, CAP=_LIKELY, AT_ONCE=8, PDL=pdl, **options(pdl, num_warps=8),
    )  # fmt: skip
