"""Log-probabilities of sampled tokens and of their likeliest alternatives."""

from __future__ import annotations

import numpy as np
import torch

from quire import ops
from quire.arrays import Int32, int32
from quire.plan import Admit, Logprobs, StepPlan
from quire.runner.hooks.hook import HeadContext, HostHook, Level, ProgramHook
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState
from quire.sampling_params import MAX_LOGPROBS

WIDTH = 2 + 2 * (1 + MAX_LOGPROBS)
"""Number of words in a line of `ops.token_logprobs`."""


class SampledLogprobs(ProgramHook, HostHook):
    """Computes the log-probabilities of sampled tokens.

    Columns:
        num_logprobs: int32 [lanes], number of alternatives to return; -1 for no logprobs.
    """

    def bind(self, state: BatchState) -> None:
        self._column = state.columns["num_logprobs"]
        self._alternatives = np.full(state.limits.lanes, -1, dtype=np.int32)
        shape = state.limits.logit_rows, WIDTH
        self._lines = torch.empty(shape, dtype=torch.int32, device=state.device)

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        alternatives = [a.params.logprobs for a in admits]
        self._alternatives[lanes] = [-1 if count is None else count for count in alternatives]
        upload.put_lines(self._column, lanes, self._alternatives[lanes])

    def lane_level(self, admit: Admit) -> Level:
        return Level.PLAIN if admit.params.logprobs is None else Level.FULL

    def tokens(self, ctx: HeadContext) -> None:
        if ctx.level >= Level.FULL and ctx.tokens is not None:
            ops.token_logprobs(ctx.raw, ctx.logit_rows, ctx.tokens, self._column, self._lines)

    def launched(self, step: Step) -> None:
        """Starts the copy of the log-probabilities, if any row asked for them."""
        plan = step.plan
        counts = np.diff(step.logit_start)
        if (self._alternatives[plan.lanes][counts > 0] >= 0).any():
            step.send("logprobs", self._lines[: step.logit_start[-1]])
            step.notes["logprobs"] = self._alternatives[plan.lanes]

    def read(self, step: Step) -> None:
        lines = step.arrived("logprobs")
        if lines is None:
            return
        counts = np.diff(step.logit_start)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        place = np.arange(len(row)) - step.logit_start[row]
        alternatives = step.notes["logprobs"][row]
        kept = (alternatives >= 0) & (place < step.result.n_tokens[row])
        step.result.logprobs = unpack(lines.numpy()[kept], row[kept], alternatives[kept])


def unpack(lines: Int32, rows: Int32, alternatives: Int32) -> Logprobs | None:
    """Returns lines of `ops.token_logprobs` as `Logprobs`, or None for no lines.

    Args:
        lines: int32 [n, WIDTH].
        rows: int32 [n], each line's row of the plan.
        alternatives: int32 [n], how many alternatives each line's row asked for.
    """
    if not len(lines):
        return None
    width = 1 + int(alternatives.max())
    slots = 1 + MAX_LOGPROBS
    ids = lines[:, 2 : 2 + width].copy()
    ids[np.arange(width) > alternatives[:, None]] = -1
    return Logprobs(
        rows=rows,
        positions=np.ascontiguousarray(lines[:, 0]),
        ids=ids,
        values=np.ascontiguousarray(lines[:, 2 + slots : 2 + slots + width]).view(np.float32),
        ranks=np.ascontiguousarray(lines[:, 1]),
    )
