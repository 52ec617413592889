"""The runner's side: hidden states to vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.errors import QuireError
from quire.plan import StepPlan, StopReason
from quire.pooling.feature import COLUMN, Share
from quire.runner import Hook
from quire.runner.batch_state import ColumnSpec
from quire.runner.step import DevicePooled, Step


class Pooler(Hook):
    """Adds up states over a prompt's chunks in float32, and ends rows whose vector is complete.
    Hidden states are whole on every rank, and so is what becomes of them."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def columns(self) -> Sequence[ColumnSpec]:
        return (ColumnSpec(COLUMN),)

    def wants(self, plan: StepPlan) -> bool:
        return COLUMN in plan.writes

    def after_body(self, step: Step) -> None:
        plan, hidden = step.plan, step.hidden
        if COLUMN not in plan.writes:
            return
        if hidden is None:
            raise QuireError("vectors are pooled after the body")
        row_of = {lane: row for row, lane in enumerate(plan.lanes.tolist())}
        ends = np.cumsum(plan.q_len)
        rows, vectors = [], []
        for lane, share in zip(*(x.tolist() for x in plan.writes[COLUMN]), strict=True):
            row = row_of[lane]
            end, count = int(ends[row]), int(plan.q_len[row])
            if share & Share.MEAN:
                self._add(lane, hidden[end - count : end], bool(share & Share.BEGINS))
            if share & Share.ENDS:
                length = int(step.first[row]) + count
                vectors.append(
                    self._sums.pop(lane) / length if share & Share.MEAN else hidden[end - 1].float()
                )
                rows.append(row)
                step.stop_reason[row] = int(StopReason.LENGTH)
        if rows:
            step.pooled = DevicePooled(np.asarray(rows, dtype=np.int32), torch.stack(vectors))

    def _add(self, lane: int, states: Tensor, begins: bool) -> None:
        part = states.float().sum(dim=0)
        self._sums[lane] = part if begins else self._sums[lane] + part
