"""Kernels that exchange data with the host: a wait, a count of finished layers, and masks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from quire.ops.reference.mask import InputFlags
from quire.ops.rows import LogitRows, StepRows
from quire.ops.triton.launch import launch, options, traits

_TRIES = 20_000_000
"""Most checks of the flags. Over PCIe each takes about a microsecond."""
_ALONE, _FIRST, _OTHER = 0, 1, 2
"""Roles of a rank: the only one, the first of several, and one of the others."""


@triton.jit
def _late_rows(seen, value, gated, ROLE: tl.constexpr):
    """Returns which rows have no inputs yet, or wait for a verdict of the first rank."""
    if ROLE == 2:
        late = gated & (seen < 2 * value)
    else:
        late = gated & (seen < value)
    return late


@triton.jit(do_not_specialize=["num_rows", "num_logits", "patience", "tries"])
def _wait_for_inputs(
    lanes_ptr, logit_start_ptr, flags_ptr, logit_lanes_ptr, lengths_ptr, gate_ptr, inputs_ptr,
    verdicts_ptr, position_ptr, last_ptr, held_ptr, num_rows, num_logits, num_lanes, width,
    last_stride, held_stride, patience, tries, ROLE: tl.constexpr, CLOCK: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Waits for the inputs. Grid: (1,). Loads of flags are volatile, because the host writes flags
    while the kernel runs."""
    at = tl.arange(0, BLOCK)
    inside = at < num_rows
    lane = tl.load(lanes_ptr + at, mask=inside, other=-1).to(tl.int64)
    start = tl.load(logit_start_ptr + at, mask=inside, other=0)
    end = tl.load(logit_start_ptr + at + 1, mask=inside, other=0)
    real = inside & (lane >= 0) & (start < tl.minimum(end, num_logits))
    real = real & (tl.load(logit_lanes_ptr + start, mask=real, other=-1) >= 0)
    gated = real & ((tl.load(flags_ptr + at, mask=inside, other=0) & 4) != 0)
    if tl.sum(gated.to(tl.int32), 0) == 0:
        return
    low = tl.load(gate_ptr).to(tl.int64) & 0xFFFFFFFF
    value = low | (tl.load(gate_ptr + 1).to(tl.int64) << 32)
    verdicts = verdicts_ptr + (value & 1) * num_lanes + lane
    if ROLE == 2:
        watched = verdicts
    else:
        watched = inputs_ptr + lane
    rows = tl.sum(real.to(tl.int32), 0)
    plain = rows > tl.sum(gated.to(tl.int32), 0)
    seen = tl.load(watched, mask=gated, other=0, volatile=True)
    late = _late_rows(seen, value, gated, ROLE)
    missing = tl.sum(late.to(tl.int32), 0)
    if CLOCK:
        begun = globaltimer()
    tried = 0
    waited = tl.cast(0, tl.int64)
    # A row that sits out loses two steps or three, and a wait costs all rows. So the deadline is
    # later the more rows are missing. But rows without inputs never wait longer than for one. After
    # the deadline, the wait ends as soon as one row is ready.
    while (
        (missing > 0)
        & (tried < tries)
        & (
            (waited <= tl.where(plain, 1, missing).to(tl.int64) * patience)
            | (missing == rows)
            | (ROLE == 2)
        )
    ):
        seen = tl.load(watched, mask=gated, other=0, volatile=True)
        late = _late_rows(seen, value, gated, ROLE)
        missing = tl.sum(late.to(tl.int32), 0)
        tried += 1
        if CLOCK:
            waited = globaltimer() - begun
        else:
            waited = tl.cast(tried, tl.int64) * 1000
    if ROLE == 1:
        tl.store(verdicts, 2 * value + late.to(tl.int64), mask=gated)
    if ROLE == 2:
        late = late | (gated & ((seen & 1) != 0))
        missing = tl.sum(late.to(tl.int32), 0)
    length = tl.load(lengths_ptr + start, mask=late, other=0)
    tl.store(position_ptr + lane, -1 - length, mask=late)
    row = -1
    for _ in range(0, missing):
        row = tl.min(tl.where(late & (at > row), at, BLOCK), 0)
        first = tl.load(logit_start_ptr + row)
        until = tl.minimum(tl.load(logit_start_ptr + row + 1), num_logits)
        source = last_ptr + first.to(tl.int64) * last_stride
        target = held_ptr + tl.load(lanes_ptr + row).to(tl.int64) * held_stride
        for begin in range(0, width, WIDTH):
            column = begin + tl.arange(0, WIDTH)
            state = tl.load(source + column, mask=column < width)
            tl.store(target + column, state, mask=column < width)
        for place in range(first, until):
            tl.store(logit_lanes_ptr + place, -1)


def wait_for_inputs(
    rows: StepRows,
    logit_rows: LogitRows,
    gate: Tensor,
    inputs: InputFlags,
    *,
    position: Tensor,
    last: Tensor,
    held: Tensor,
    patience_us: float,
) -> None:
    """See `reference.mask`.

    The kernel gives up after about twenty seconds, so that a failed host does not leave the device
    busy for ever. Later copies and kernels see the host's writes that came before the flags. The
    interpreter has no clock, so each check of the flags counts as a microsecond.
    """
    role = _ALONE if inputs.world == 1 else _OTHER if inputs.rank else _FIRST
    count, width = len(rows.lanes), last.shape[1]
    patience_ns = int(1000 * patience_us)
    launch(_wait_for_inputs, (1,))(
        rows.lanes, rows.logit_start, rows.flags, logit_rows.lanes, logit_rows.lengths, gate,
        inputs.flags, inputs.verdicts, position, last, held, count, len(logit_rows.lanes),
        len(inputs.flags), width, last.stride(0), held.stride(0), patience_ns, _TRIES, ROLE=role,
        CLOCK=traits(rows.device).capability > (0, 0), BLOCK=triton.next_power_of_2(count),
        WIDTH=min(1024, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


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
