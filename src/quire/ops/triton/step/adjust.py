"""Penalties, biases and minimum lengths on a batch's logits, for the lanes that use them.

Repetition penalty after Keskar et al., 2019; presence and frequency penalties are OpenAI's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.rows import LogitRows
from quire.ops.triton.launch import launch, options, traits

_TILE = 2048


@triton.jit
def _adjust(
    logits_ptr, out_ptr, lanes_ptr, lengths_ptr, ahead_ptr, tokens_ptr, penalties_ptr, counts_ptr,
    num_bias_ptr, bias_ids_ptr, bias_values_ptr, num_stops_ptr, stops_ptr, min_total_ptr,
    vocab, logits_stride, tokens_stride, bias_stride, stops_stride,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adjusts a tile of a row's logits. Grid: (rows, tiles of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * TILE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    if lane < 0:
        return
    at = begin + tl.arange(0, TILE)
    inside = at < vocab
    x = tl.load(logits_ptr + row * logits_stride + at, mask=inside, other=0.0).to(tl.float32)
    repetition = tl.load(penalties_ptr + lane * 3)
    presence = tl.load(penalties_ptr + lane * 3 + 1)
    frequency = tl.load(penalties_ptr + lane * 3 + 2)
    length = tl.load(lengths_ptr + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts_ptr + lane * vocab + at, mask=inside, other=0)
        for back in range(0, tl.load(ahead_ptr + row)):
            draft = tl.load(tokens_ptr + lane * tokens_stride + length - 1 - back)
            count += tl.where(at == draft, 2, 0)
        x = tl.where(count > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
        generated = count >> 1
        x -= tl.where(generated > 0, presence, 0.0) + frequency * generated.to(tl.float32)
    out = out_ptr + row * vocab
    tl.store(out + at, x, mask=inside)
    num_bias = tl.load(num_bias_ptr + lane)
    early = length < tl.load(min_total_ptr + lane)
    num_stops = tl.where(early, tl.load(num_stops_ptr + lane), 0)
    if (num_bias > 0) | (num_stops > 0):
        tl.debug_barrier()  # From here on, threads change entries that other threads have written.
        end = tl.minimum(begin + TILE, vocab)
        for start in range(0, num_bias, 128):
            entry = start + tl.arange(0, 128)
            ids = tl.load(
                bias_ids_ptr + lane * bias_stride + entry, mask=entry < num_bias, other=-1
            )
            own = (ids >= begin) & (ids < end)
            value = tl.load(bias_values_ptr + lane * bias_stride + entry, mask=own, other=0.0)
            value += tl.load(out + ids, mask=own, other=0.0)
            tl.store(out + ids, value, mask=own)
        tl.debug_barrier()
        for start in range(0, num_stops, 32):
            entry = start + tl.arange(0, 32)
            stop = tl.load(
                stops_ptr + lane * stops_stride + entry, mask=entry < num_stops, other=-1
            )
            own = (stop >= begin) & (stop < end)
            tl.store(out + stop, float("-inf"), mask=own)


def adjust(
    logits: Tensor,
    rows: LogitRows,
    tokens: Tensor,
    *,
    penalties: Tensor,
    counts: Tensor,
    num_bias: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    num_stops: Tensor,
    stops: Tensor,
    min_total: Tensor,
) -> Tensor:
    """See `ops.adjust`."""
    count, vocab = logits.shape
    out = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    pdl = traits(logits.device).pdl
    if count:
        launch(_adjust, (count, triton.cdiv(vocab, _TILE)))(
            logits, out, rows.lanes, rows.lengths, rows.ahead, tokens, penalties, counts, num_bias,
            bias_ids, bias_values, num_stops, stops, min_total, vocab, logits.stride(0),
            tokens.stride(0), bias_ids.stride(0), stops.stride(0), TILE=_TILE, PDL=pdl,
            **options(pdl, num_warps=4),
        )  # fmt: skip
    return out
