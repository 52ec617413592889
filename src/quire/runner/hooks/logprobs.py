"""Log-probabilities of sampled tokens and of their likeliest alternatives."""

from __future__ import annotations

import numpy as np
import torch

from quire import ops
from quire.arrays import Int32, int32
from quire.plan import Admit, Logprobs, StepPlan
from quire.runner.hooks.hook import HeadContext, Hook, Level
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState
from quire.sampling_params import MAX_LOGPROBS

WIDTH = 2 + 2 * (1 + MAX_LOGPROBS)
"""Words of a line of `ops.token_logprobs`."""


class SampledLogprobs(Hook):
    """Fills in num_logprobs, int32 [lanes]: how many alternatives a lane asks for, -1: nothing."""

    def bind(self, state: BatchState) -> None:
        self._column = state.columns["num_logprobs"]
        self._wanted = np.full(state.limits.lanes, -1, dtype=np.int32)
        shape = state.limits.logit_rows, WIDTH
        self._lines = torch.empty(shape, dtype=torch.int32, device=state.device)

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        wanted = [a.params.logprobs for a in admits]
        self._wanted[lanes] = [-1 if count is None else count for count in wanted]
        upload.put_lines(self._column, lanes, self._wanted[lanes])

    def lane_level(self, admit: Admit) -> Level:
        return Level.PLAIN if admit.params.logprobs is None else Level.FULL

    def tokens(self, ctx: HeadContext) -> None:
        if ctx.level >= Level.FULL and ctx.tokens is not None:
            ops.token_logprobs(ctx.raw, ctx.logit_rows, ctx.tokens, self._column, self._lines)

    def launched(self, step: Step) -> None:
        """Starts the copy of what the step's rows asked for."""
        plan = step.plan
        counts = np.diff(step.logit_start)
        if (self._wanted[plan.lanes][counts > 0] >= 0).any():
            step.send("logprobs", self._lines[: step.logit_start[-1]])
            step.notes["logprobs"] = self._wanted[plan.lanes]

    def read(self, step: Step) -> None:
        lines = step.arrived("logprobs")
        if lines is None:
            return
        counts = np.diff(step.logit_start)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        place = np.arange(len(row)) - step.logit_start[row]
        wanted = step.notes["logprobs"][row]
        kept = (wanted >= 0) & (place < step.result.n_tokens[row])
        step.result.logprobs = unpack(lines.numpy()[kept], row[kept], wanted[kept])


def unpack(lines: Int32, rows: Int32, wanted: Int32) -> Logprobs | None:
    """Returns lines of `ops.token_logprobs` as `Logprobs`, None if there are none.

    lines: int32 [n, WIDTH]. rows: int32 [n], their rows of the plan. wanted: int32 [n], how many
    alternatives each asked for.
    """
    if not len(lines):
        return None
    width = 1 + int(wanted.max())
    slots = 1 + MAX_LOGPROBS
    ids = lines[:, 2 : 2 + width].copy()
    ids[np.arange(width) > wanted[:, None]] = -1
    return Logprobs(
        rows=rows,
        positions=np.ascontiguousarray(lines[:, 0]),
        ids=ids,
        values=np.ascontiguousarray(lines[:, 2 + slots : 2 + slots + width]).view(np.float32),
        ranks=np.ascontiguousarray(lines[:, 1]),
    )
