"""Masks over the vocabulary, and the wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits: Tensor, mask: Tensor, lines: Tensor | None = None) -> Tensor:
    """Sets logits [n, vocab], dense rows, to -inf in place where a bit of the mask is clear.

    mask: int32 [m, at least vocab / 32]; bit i of word w is token 32 w + i. lines: int32 [n], the
    line of the mask that each row is under, or -1 for none; left out, each row is under its own.
    Returns `logits`.
    """
    if lines is not None:
        mask = mask[lines.clamp(min=0).long()].masked_fill_((lines < 0).unsqueeze(1), -1)
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    bits = (mask.unsqueeze(-1) >> shifts) & 1
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def wait_for_flag(gate: Tensor, flags: Tensor) -> None:
    """Holds what is queued behind until a flag that the host sets has reached a value.

    flags: int64 [n], in memory of the host that the device can read. gate: int32 [3] on the device:
    the flag's place, -1 for none, and the low and high word of the value. On a CPU the program is
    run when the flag stands, so there is nothing to wait for.
    """


# A count in the host's memory of how far a model's layers have come.


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """Sets a clock behind all that is queued: to what it was before the step, and `layers` more.

    before: int64 [1], on the device. clock: int64 [1], in memory of the host that the device can
    write.
    """
    torch.add(before, layers, out=clock)
