"""All-reduce of whole rows, with the residual stream added and the sum normed.

Every rank writes its term of a row into its peers' memory. It adds the received terms in the order
of ranks, the residual last, rounds once, and norms the row. One kernel does the work of `one_shot`
(in `all_reduce.py`) and `rms_norm`. Words of 32 bits are two elements of 16 bits, or a float32.

Words are sent without flags. A place for a word holds `EMPTY` until the word has arrived, and again
after it was read. Senders replace -0.0 by +0, so they never send `EMPTY`. So ranks send half as
many bytes as with `one_shot`, and in one phase instead of the two of `two_shot`.

Each row has two sets of places, which are used in turn. A row's epoch counts its sums. A rank sends
the words of epoch e + 2 after it has received its peers' words of e + 1. The peers send these after
the kernel that has read and emptied the places of e."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.collectives.all_reduce import (
    KINDS,
    Peers,
    give_up,
    high_value,
    low_value,
    packed,
    words_of,
)
from quire.ops.triton.launch import launch, options, traits

EMPTY = -(1 << 31)
"""The word of a place without a received word: -0.0, or a pair of +0 and -0.0."""
_WARPS, _LANES = 8, 32
_EMPTY = tl.constexpr(EMPTY)


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """The buffers for peers' terms of rows.

    Attributes:
        places: int64 [world], the address of each rank's places. They are int32
            [rows, 2, world (sender), words], all `EMPTY` before the first sum.
        epochs: int32 [rows].
        rows: the most rows of a launch.
        words: number of words of a row, equal for all rows.
    """

    places: Tensor
    epochs: Tensor
    rows: int
    words: int


def place_words(rows: int, words: int, world: int) -> int:
    """Returns the size of a rank's places, in words of 32 bits."""
    return rows * 2 * world * words


@triton.jit
def _take(ptr, inside, control_ptr, report_ptr, peer, site, epoch):
    """Waits for the words that a peer sends to places [BLOCK], returns them, and empties the
    places."""
    got = tl.load(ptr, mask=inside, other=0, volatile=True)
    missing = tl.sum((got == _EMPTY).to(tl.int32), 0)
    polls = 0
    while missing > 0:
        got = tl.load(ptr, mask=inside, other=0, volatile=True)
        missing = tl.sum((got == _EMPTY).to(tl.int32), 0)
        polls += 1
        if missing > 0:
            missing *= 1 - give_up(control_ptr, report_ptr, peer, site, epoch, polls)
    tl.store(ptr, tl.full(got.shape, _EMPTY, tl.int32), mask=inside)
    return got


@triton.jit(do_not_specialize=["site"])
def sum_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, normed_ptr, places_ptr, epochs_ptr, control_ptr,
    report_ptr, words, eps, site,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums and norms a row per program."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < words
    place = row.to(tl.int64) * words + at
    bases = ()
    for rank in tl.static_range(WORLD):
        base = tl.load(places_ptr + rank).to(tl.pointer_type(tl.int32))
        bases = bases + (tl.multiple_of(base, 16),)
    scale = tl.load(weight_ptr + at, mask=inside, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.load(x_ptr + place, mask=inside, other=0)
    epoch = tl.load(epochs_ptr + row) + 1
    slot = (row.to(tl.int64) * 2 + (epoch & 1)) * WORLD * words
    sent = tl.where(own == _EMPTY, 0, own)
    for step in tl.static_range(1, WORLD):
        tl.store(bases[(RANK + step) % WORLD] + slot + RANK * words + at, sent, mask=inside)
    stream = tl.load(residual_ptr + place, mask=inside, other=0)
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        part = own
        if rank != RANK:
            from_rank = bases[RANK] + slot + rank * words + at
            part = _take(from_rank, inside, control_ptr, report_ptr, rank, site, epoch)
        low += low_value(part, KIND)
        high += high_value(part, KIND)
    total = packed(low + low_value(stream, KIND), high + high_value(stream, KIND), KIND)
    tl.store(out_ptr + place, total, mask=inside)
    # With float32, both are the same value.
    low = low_value(total, KIND)
    high = high_value(total, KIND)
    PAIR: tl.constexpr = 32 // KIND.primitive_bitwidth
    squares = low * low
    if PAIR == 2:
        squares += high * high
    inverse = tl.rsqrt(tl.sum(squares, 0) / (words * PAIR) + eps)
    # Rounds to the weight's dtype before the product, see `ops.rms_norm`.
    low = (low * inverse).to(KIND).to(tl.float32) * low_value(scale, KIND)
    high = (high * inverse).to(KIND).to(tl.float32) * high_value(scale, KIND)
    tl.store(normed_ptr + place, packed(low, high, KIND), mask=inside)
    tl.debug_barrier()
    tl.store(epochs_ptr + row, epoch)


def takes(rows: RowPlaces, x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can compute a sum.

    Rows must be contiguous and as long as the places. The residual and the weight must have x's
    dtype."""
    words = words_of(x)
    if not words or x.dim() != 2 or words != len(x) * rows.words:
        return False
    alike = residual.shape == x.shape and residual.dtype == x.dtype == weight.dtype
    fits = words_of(residual) == words and words_of(weight) == rows.words
    return alike and fits


def sum_norm(
    peers: Peers, rows: RowPlaces, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
    site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the sum of all ranks' x and the residual, and the RMSNorm of the sum. See `takes`.

    Args:
        site: the number that a failed wait reports.
    """
    pdl = traits(x.device).pdl
    # Each word is read by one thread only, because the thread that reads it also empties its place.
    block = max(triton.next_power_of_2(rows.words), _LANES)
    warps = min(block // _LANES, _WARPS)
    out, normed = torch.empty_like(x), torch.empty_like(x)
    seen, stream, scale, total, result = (
        each.view(-1).view(torch.int32) for each in (x, residual, weight, out, normed)
    )
    for first in range(0, len(x), rows.rows):
        behind = slice(first * rows.words, None)
        launch(sum_norm_kernel, (min(len(x) - first, rows.rows),))(
            seen[behind], stream[behind], scale, total[behind], result[behind], rows.places,
            rows.epochs, peers.control, peers.report, rows.words, eps, site,
            RANK=peers.rank, WORLD=peers.world, BLOCK=block,
            KIND=KINDS[x.dtype], PDL=pdl, **options(pdl, num_warps=warps),
        )  # fmt: skip
    return out, normed
