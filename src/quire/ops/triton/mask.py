"""Packed masks on logits, in place: one bit a token, and only what is not allowed is written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits

_TILE = 4096


@triton.jit
def _mask(
    logits_ptr, mask_ptr, lines_ptr, vocab, logits_stride, words,
    LINES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = row
    if LINES:
        line = tl.load(lines_ptr + row).to(tl.int64)
        if line < 0:
            return
    # Each word is read once: the mask may lie in the host's memory, behind a link.
    place = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32)
    word = tl.load(mask_ptr + line * words + place, mask=place < words, other=-1)
    bit = tl.arange(0, 32)
    barred = ((word[:, None] >> bit[None, :]) & 1) == 0
    entry = place[:, None] * 32 + bit[None, :]
    at = logits_ptr + row * logits_stride + entry
    tl.store(at, float("-inf"), mask=barred & (entry < vocab))


def mask_logits(logits: Tensor, mask: Tensor, lines: Tensor | None) -> Tensor:
    rows, vocab = logits.shape
    pdl = traits(logits.device).pdl
    if rows:
        launch(_mask, (rows, triton.cdiv(vocab, _TILE)))(
            logits, mask, mask if lines is None else lines, vocab, logits.stride(0), mask.shape[1],
            LINES=lines is not None, TILE=_TILE, PDL=pdl, **options(pdl, num_warps=4),
        )  # fmt: skip
    return logits
