"""Masks over the vocabulary, and the wait for inputs of the host."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.reference.step import held_position
from quire.ops.rows import GATED, LogitRows, StepRows

_GLANCE = 5e-5
"""Seconds between checks of flags that another process writes."""


class InputFlags(NamedTuple):
    """Flags of the host's inputs, in memory that all ranks map.

    Attributes:
        flags: int64 [M], one per lane: 1 + the last step with complete inputs.
        verdicts: int64 [2, M], one per parity of the flag and lane: twice the flag, plus 1 if the
            row is late. The first rank writes the verdicts, and the others follow them.
        rank: number of this rank.
        world: number of ranks.
    """

    flags: Tensor
    verdicts: Tensor
    rank: int = 0
    world: int = 1


def mask_logits(logits: Tensor, mask: Tensor, lines: Tensor | None = None) -> Tensor:
    """Sets logits to -inf in place where a bit of the mask is clear, and returns them.

    Args:
        logits: [n, vocab], dense rows.
        mask: int32 [m, at least vocab / 32]; bit i of word w is token 32 w + i.
        lines: int32 [n], index of each row's line of the mask, -1 for no mask. By default row i has
            line i.
    """
    if lines is not None:
        mask = mask[lines.clamp(min=0).long()].masked_fill_((lines < 0).unsqueeze(1), -1)
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts) & 1
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


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
    """Makes the stream wait for the host's inputs of GATED rows, for a limited time.

    After `patience_us` the stream continues without the missing inputs, as soon as one row is
    ready. If all rows are GATED, it waits as often as many rows are missing. Late rows give no
    token in this step. Their logit rows become unused, the hidden state of their first logit row is
    copied to `held`, and their lanes' positions become held ones (`reference.step.held_position`).

    On a CPU, heads run only after their inputs are complete, so the twin does not wait. It uses the
    current flags.

    Args:
        gate: int32 [2] on the device, the low and the high word of the value that a ready lane's
            flag has.
        inputs: the flags, in host memory that the device can read.
        position: int32 [M].
        last: [at least L, width], hidden states of the logit rows.
        held: [M, width]; receives the hidden states of late rows.
        patience_us: microseconds to wait for the last row.
    """
    gated = torch.nonzero(_gated(rows, logit_rows)).flatten()
    if not len(gated):
        return
    low, high = (int(word) & 0xFFFFFFFF for word in gate.tolist())
    value = low | high << 32
    lanes = rows.lanes[gated].long()
    verdicts = inputs.verdicts[value & 1]
    if inputs.rank:
        while bool((verdicts[lanes] < 2 * value).any()):
            time.sleep(_GLANCE)
        late = (verdicts[lanes] & 1) != 0
    else:
        late = inputs.flags[lanes] < value
        verdicts[lanes] = 2 * value + late.long()
    for row, lane in zip(gated[late].tolist(), lanes[late].tolist(), strict=True):
        start, end = rows.logit_start[row : row + 2].tolist()
        held[lane] = last[start]
        position[lane] = held_position(logit_rows.lengths[start] - 1)
        logit_rows.lanes[start:end] = -1


def _gated(rows: StepRows, logit_rows: LogitRows) -> Tensor:
    """Returns whether each row has a logit row that needs inputs from the host, bool [R]."""
    start, end = rows.logit_start[:-1].long(), rows.logit_start[1:]
    some = (rows.lanes >= 0) & (end > start) & ((rows.flags & GATED) != 0)
    places = start.clamp(max=len(logit_rows.lanes) - 1)
    return some & (logit_rows.lanes[places] >= 0)


# -- a count of finished layers, in host memory ------------------------------------------------


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """Sets a clock, after all queued work, to its value before the step plus `layers`.

    Args:
        before: int64 [1], on the device.
        clock: int64 [1], in host memory that the device can write.
    """
    torch.add(before, layers, out=clock)
