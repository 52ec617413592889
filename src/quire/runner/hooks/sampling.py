"""Drawing tokens: temperature, seeds, and truncation to the likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire import ops
from quire.arrays import int32
from quire.plan import Admit, StepPlan
from quire.runner.hooks.hook import HeadContext, HostHook, Level, ProgramHook
from quire.runner.readback import Upload
from quire.runner.state import BatchState, ColumnSpec, Limits


def sampling_columns(state: BatchState) -> dict[str, Any]:
    """Returns the arguments of `ops.sample` that are columns of the batch state, by name."""
    floats, ints = state.columns["sampling_floats"], state.columns["sampling_ints"]
    return {
        "temperature": floats[:, 0],
        "top_p": floats[:, 1],
        "min_p": floats[:, 2],
        "top_k": ints[:, 0],
        "seed": ints[:, 1:3],
        "sample_index": ints[:, 3],
    }


class Sampling(ProgramHook, HostHook):
    """Draws tokens.

    Columns:
        sampling_floats: float32 [lanes, 3]: temperature, top_p, min_p.
        sampling_ints: int32 [lanes, 4]: top_k, low and high word of the seed, sample index.
    """

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return (
            ColumnSpec("sampling_floats", (3,), torch.float32),
            ColumnSpec("sampling_ints", (4,)),
        )

    def bind(self, state: BatchState) -> None:
        self._floats = state.columns["sampling_floats"]
        self._ints = state.columns["sampling_ints"]
        self._columns = sampling_columns(state)

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        params = [admit.params for admit in admits]
        floats = np.asarray([(p.temperature, p.top_p, p.min_p) for p in params], dtype=np.float32)
        upload.put_lines(self._floats, lanes, floats)
        upload.put_lines(self._ints, lanes, int32([_ints(admit) for admit in admits]))

    def lane_level(self, admit: Admit) -> Level:
        return Level.MASKED if admit.params.truncates else Level.PLAIN

    def logits(self, ctx: HeadContext) -> None:
        if ctx.fused:
            return
        ctx.tokens = ops.sample(
            ctx.logits,
            ctx.logit_rows.lanes,
            ctx.logit_rows.lengths,
            **self._columns,
            truncate_rows=ctx.level >= Level.MASKED,
            cuts=ctx.state.cuts if ctx.level >= ctx.state.cuts_level else None,
        )


def _ints(admit: Admit) -> tuple[int, ...]:
    seed = admit.seed & 0xFFFFFFFFFFFFFFFF
    low, high = _signed(seed & 0xFFFFFFFF), _signed(seed >> 32)
    return max(0, admit.params.top_k), low, high, admit.sample_index


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
