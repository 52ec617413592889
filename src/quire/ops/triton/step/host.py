"""Kernels that exchange data with the host: a wait, a count of finished layers, and masks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.launch import launch, options, traits

_TRIES = 20_000_000
"""The most reads of the flag. One takes about a microsecond over PCIe."""


@triton.jit
def _wait(flags_ptr, gate_ptr, tries):
    """Waits for a flag. Grid: (1,). Loads are volatile because the host writes meanwhile."""
    place = tl.load(gate_ptr)
    if place >= 0:
        low = tl.load(gate_ptr + 1).to(tl.int64) & 0xFFFFFFFF
        value = low | (tl.load(gate_ptr + 2).to(tl.int64) << 32)
        seen = tl.load(flags_ptr + place, volatile=True)
        tried = 0
        while (seen < value) & (tried < tries):
            seen = tl.load(flags_ptr + place, volatile=True)
            tried += 1


def wait_for_flag(gate: Tensor, flags: Tensor) -> None:
    """See `reference.mask`.

    It gives up after about twenty seconds, so that a failed host does not leave the device busy for
    ever. Copies and kernels that are queued after it see what the host wrote before the flag."""
    launch(_wait, (1,))(flags, gate, _TRIES, num_warps=1)


# -- a count of finished layers in host memory -------------------------------------------------


@triton.jit(do_not_specialize=["layers"])
def _set(before_ptr, clock_ptr, layers):
    """Writes the clock. Grid: (1,)."""
    tl.store(clock_ptr, tl.load(before_ptr) + layers)


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """See `reference.mask`.

    It starts when all kernels before it have finished (no PDL). So a reader of the count, on any
    device, can read the results of those kernels."""
    launch(_set, (1,))(before, clock, layers, num_warps=1)


# -- packed masks, one bit per token -----------------------------------------------------------

_TILE = 4096


@triton.jit
def _mask(
    logits_ptr, mask_ptr, lines_ptr, vocab, logits_stride, words,
    LINES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Masks a tile of a row's logits in place. Grid: (rows, tiles of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = row
    if LINES:
        line = tl.load(lines_ptr + row).to(tl.int64)
        if line < 0:
            return
    # Each word is read only once, because the mask may be in host memory.
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
