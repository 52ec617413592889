"""Penalties, biases and minimum lengths on a batch's logits, for the lanes that use them.

Repetition penalty after Keskar et al., 2019; presence and frequency penalties are OpenAI's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits

_TILE = 2048


@triton.jit
def _adjust(
    logits_ptr, out_ptr, lanes_ptr, length_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    counts_ptr, num_bias_ptr, bias_ids_ptr, bias_values_ptr, stops_ptr, min_total_ptr,
    vocab, logits_stride, floats_stride, bias_stride, stops_stride, num_stops,
    TILE: tl.constexpr, STOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of the vocabulary)."""
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
    repetition = tl.load(repetition_ptr + lane * floats_stride)
    presence = tl.load(presence_ptr + lane * floats_stride)
    frequency = tl.load(frequency_ptr + lane * floats_stride)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts_ptr + lane * vocab + at, mask=inside, other=0)
        x = tl.where(count > 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
        generated = count >> 1
        x -= tl.where(generated > 0, presence, 0.0) + frequency * generated.to(tl.float32)
    out = out_ptr + row * vocab
    tl.store(out + at, x, mask=inside)
    num_bias = tl.load(num_bias_ptr + lane)
    early = tl.load(length_ptr + row) < tl.load(min_total_ptr + lane)
    if (num_bias > 0) | early:
        tl.debug_barrier()  # entries of this tile are changed by other threads than wrote them
        for start in range(0, num_bias, 128):
            entry = start + tl.arange(0, 128)
            ids = tl.load(
                bias_ids_ptr + lane * bias_stride + entry, mask=entry < num_bias, other=-1
            )
            own = (ids >= begin) & (ids < begin + TILE)
            value = tl.load(bias_values_ptr + lane * bias_stride + entry, mask=own, other=0.0)
            value += tl.load(out + ids, mask=own, other=0.0)
            tl.store(out + ids, value, mask=own)
        tl.debug_barrier()
        column = tl.arange(0, STOPS)
        held = column < tl.where(early, num_stops, 0)
        stop = tl.load(stops_ptr + lane * stops_stride + column, mask=held, other=-1)
        own = (stop >= begin) & (stop < begin + TILE)
        tl.store(out + stop, float("-inf"), mask=own)


def adjust(
    logits: Tensor,
    lanes: Tensor,
    length: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    counts: Tensor,
    num_bias: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stops: Tensor,
    min_total: Tensor,
    pdl: bool | None = None,
) -> Tensor:
    """float32 [N, vocab] of logits [N, vocab]; rows of lane -1 are padding and undefined.

    lanes, length: int32 [N], length the tokens a lane has so far. Per lane: repetition, presence,
    frequency, columns of one float32 table; counts int32 [lanes, vocab], see `runner.sampling
    .adjust`; num_bias int32, and that many of bias_ids int32 and bias_values float32 [lanes, B];
    stops int32 [lanes, S], padded with -1; min_total int32, the length before which no stop token
    may come.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    use_pdl = traits(logits.device).pdl if pdl is None else pdl
    if rows:
        launch(_adjust, (rows, triton.cdiv(vocab, _TILE)))(
            logits, out, lanes, length, repetition, presence, frequency, counts, num_bias,
            bias_ids, bias_values, stops, min_total,
            vocab, logits.stride(0), repetition.stride(0), bias_ids.stride(0), stops.stride(0),
            stops.shape[1], TILE=_TILE, STOPS=triton.next_power_of_2(stops.shape[1]),
            PDL=use_pdl, **options(use_pdl, num_warps=4),
        )  # fmt: skip
    return out
