"""Masks over the vocabulary, and the wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


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


def wait_for_flag(gate: Tensor, flags: Tensor) -> None:
    """Makes the stream wait until a flag that the host sets has reached a value.

    A CPU runs the program only after the flag is set, so the twin does not wait.

    Args:
        gate: int32 [3] on the device: the flag's index (-1 does not wait), and the low and the high
            word of the value.
        flags: int64 [n], in host memory that the device can read.
    """


# -- a count in host memory of the layers that have finished -----------------------------------


def set_clock(before: Tensor, layers: int, clock: Tensor) -> None:
    """Sets a clock, after all queued work, to its value before the step plus `layers`.

    Args:
        before: int64 [1], on the device.
        clock: int64 [1], in host memory that the device can write.
    """
    torch.add(before, layers, out=clock)
