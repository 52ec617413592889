"""The runner's side: it makes vectors of hidden states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.features.pooling.feature import COLUMN, Share
from quire.ops import op
from quire.ops.reference.pool import pool_rows
from quire.plan import Pooled, StepPlan, StopReason
from quire.runner.hooks import HostHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState

_pool_rows = op(pool_rows)


class Pooler(HostHook):
    """Adds up states over a prompt's chunks in float32, and ends rows whose vector is complete.

    Every rank has the whole hidden states, so every rank computes the whole vectors.
    """

    entries = frozenset({COLUMN})

    def bind(self, state: BatchState) -> None:
        self._state = state
        self._sums: Tensor | None = None
        self._uploaded: tuple[Upload, int] | None = None

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        self._uploaded = None
        if COLUMN in plan.writes:
            self._uploaded = upload, upload.add(_shares(plan))

    def hidden(self, step: Step, hidden: Tensor) -> None:
        if self._uploaded is None:
            return
        upload, key = self._uploaded
        state, width = self._state, hidden.shape[1]
        if self._sums is None:
            self._sums = torch.zeros(state.limits.lanes, width, device=state.device)
        rows = state.rows.first(step.plan.num_rows)
        lengths = state.position[rows.lanes.long()]
        vectors = torch.zeros(len(rows.lanes), width, device=state.device)
        _pool_rows(hidden, rows, upload[key], self._sums, lengths, vectors)
        step.send(COLUMN, vectors)

    def read(self, step: Step) -> None:
        vectors = step.arrived(COLUMN)
        if vectors is None:
            return
        ends = np.flatnonzero(_shares(step.plan) & Share.ENDS).astype(np.int32)
        step.result.stop_reason[ends] = StopReason.LENGTH
        if len(ends):
            step.result.pooled = Pooled(ends, vectors.numpy()[ends])


def open_pooler(config: EngineConfig) -> Pooler:
    """Returns the hook for a worker."""
    return Pooler()


def _shares(plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Returns each row's `Share`, int32 [R]."""
    lanes, values = plan.writes[COLUMN]
    by_lane = dict(zip(lanes.tolist(), values.tolist(), strict=True))
    return np.asarray([by_lane.get(lane, 0) for lane in plan.lanes.tolist()], dtype=np.int32)
