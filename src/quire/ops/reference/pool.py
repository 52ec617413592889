"""Hidden states of a prompt to one vector."""

from __future__ import annotations

from torch import Tensor

from quire.ops.rows import StepRows


def pool_rows(
    hidden: Tensor, rows: StepRows, shares: Tensor, sums: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """Adds up the hidden states of rows, and writes the vectors that are complete.

    Args:
        hidden: [T, width].
        shares: int32 [R], bits: 1 to add the row's states, 2 to begin the sum anew, 4 if the vector
            is complete; 0 for rows that take no part.
        sums: float32 [M, width].
        lengths: int32 [R], the number of tokens of a mean.
        out: float32 [R, width]: the mean if states are added up, else the row's last state.
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
