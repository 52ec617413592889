"""A step's rows and admissions, assembled for its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.arrays import Int32, int32
from quire.plan import Admit
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.lanes import Chunk, Rows


def admit_of(request: Request, tokens: Int32, computed: int, params: SamplingParams) -> Admit:
    """Returns the `Admit` of a request that has just got its lane. tokens: int32 [known], of which
    `computed` are computed. params: as the device applies them."""
    return Admit(
        lane=request.lane,
        lane_epoch=request.lane_epoch,
        request_id=request.request_id,
        tokens=tokens,
        prompt_len=request.prompt_len,
        computed=computed,
        max_total=request.max_total,
        params=params,
        seed=request.seed,
        sample_index=request.sample_index,
    )


@dataclass(slots=True)
class Columns:
    """A step's rows: generating ones, then prompts. All arrays are int32 [R]."""

    requests: list[Request]
    lanes: Int32
    lane_epoch: Int32
    q_len: Int32
    n_logits: Int32
    flags: Int32

    @classmethod
    def of(cls, rows: Rows, chunks: list[Chunk]) -> Columns:
        """Joins rows and chunks; without chunks the arrays are those of `rows`."""
        columns = cls(
            rows.requests, rows.lanes, rows.lane_epoch, rows.q_len, rows.q_len, rows.flags
        )
        if chunks:
            prompts = [c.request for c in chunks]
            columns.requests = rows.requests + prompts
            columns.lanes = _joined(rows.lanes, [r.lane for r in prompts])
            columns.lane_epoch = _joined(rows.lane_epoch, [r.lane_epoch for r in prompts])
            columns.q_len = _joined(rows.q_len, [c.length for c in chunks])
            columns.n_logits = _joined(rows.q_len, [c.num_logits for c in chunks])
            columns.flags = _joined(rows.flags, [c.flags for c in chunks])
        return columns


def _joined(array: Int32, more: list[int]) -> Int32:
    return np.concatenate([array, int32(more)])
