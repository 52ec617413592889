"""Pools the hidden states of a prompt to one vector."""

from __future__ import annotations

from torch import Tensor

from quire.ops.rows import StepRows


def pool_rows(
    hidden: Tensor, rows: StepRows, shares: Tensor, sums: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """Adds up the hidden states of rows, and writes the vectors that are complete.

    Args:
        hidden: [T, width].
        shares: int32 [R], bits of each row. Bit 1 adds the row's states to the sum, bit 2 clears
            the sum first, and bit 4 writes the complete vector. A row with 0 is skipped.
        sums: float32 [M, width].
        lengths: int32 [R], number of tokens by which the sum is divided.
        out: float32 [R, width], output. It is the mean if states are added up, else the last state.
    """
    starts = rows.query_start.tolist()
    for row, (lane, share) in enumerate(zip(rows.lanes.tolist(), shares.tolist(), strict=True)):
        if lane < 0 or not share:
            continue
        states = hidden[starts[row] : starts[row + 1]].float()
        if share & 1:
            before = 0.0 if share & 2 else sums[lane]
            sums[lane] = before + states.sum(dim=0)
        if share & 4:
            out[row] = sums[lane] / int(lengths[row]) if share & 1 else states[-1]
