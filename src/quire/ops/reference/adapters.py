"""Low-rank adapters on linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.adapters import HEAD, WORDS, AdapterRows, SlotWeights, padded_rank
from quire.ops.arguments import Activation, RmsScale
from quire.ops.reference.dense import activate, linear, rms_norm
from quire.ops.rows import StepRows
from quire.ops.weight import Weight


def adapter_rows(rows: StepRows, column: Tensor, *, num_tokens: int, num_slots: int) -> AdapterRows:
    """Returns the tokens of a step that use adapters, by slot.

    Args:
        column: int32 [lanes], each lane's slot, -1 for none.
    """
    q_lens = (rows.query_start[1:] - rows.query_start[:-1]).long()
    own = torch.where(rows.lanes >= 0, column[rows.lanes.long().clamp(min=0)], -1)
    slots = torch.full((num_tokens,), -1, dtype=torch.int32, device=column.device)
    taken = torch.repeat_interleave(own, q_lens)
    slots[: len(taken)] = taken
    none = slots[:0]
    return AdapterRows(slots, none, none.view(0, 4), none)


def add_adapters(
    out: Tensor, x: Tensor, weights: SlotWeights, rows: AdapterRows, norm: RmsScale | None = None
) -> Tensor:
    """Adds scale * B (A norm(x)) to the rows of `out` whose tokens use an adapter, and returns
    `out`.

    Rows of other tokens keep their bits.

    Args:
        out: [T, outputs].
        x: [T, inputs].
    """
    for slot in sorted(set(rows.slots.tolist())):
        if slot < 0:
            continue
        which = torch.nonzero(rows.slots == slot).flatten()
        line, memory = weights.table[slot].tolist(), weights.memory[slot]
        total = line[1]
        if not total:
            continue
        own = x[which] if norm is None else rms_norm(x[which], *norm)
        a = memory[line[0] : line[0] + total * weights.inputs].view(total, weights.inputs)
        inner = own.float() @ a.float().t()
        start = 0
        for place, size in enumerate(weights.sizes):
            begin, rank, first, bits = line[HEAD + WORDS * place :][:WORDS]
            if rank:
                width = padded_rank(rank)
                b = memory[begin : begin + size * width].view(size, width)[:, :rank]
                scale = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(x.device)
                added = scale * (inner[:, first : first + rank] @ b.float().t())
                columns = out[:, start : start + size]
                columns[which] = (columns[which].float() + added).to(out.dtype)
            start += size
    return out


def adapted_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: RmsScale | None,
    act: Activation | None,
    weights: SlotWeights,
    rows: AdapterRows,
) -> Tensor:
    """Returns `ops.linear` of the same arguments, with the adapters of the rows' tokens.

    Adapters are added before the bias and the activation. Rows without an adapter have the same
    bits as from `ops.linear`."""
    out = linear(x, weight, bias, None if act is not None else residual, norm)
    out = add_adapters(out, x, weights, rows, norm)
    if act is not None:
        out = activate(out, act)
    return out if act is None or residual is None else out.add_(residual)
