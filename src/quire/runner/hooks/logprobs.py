"""Log-probabilities of sampled tokens and of their likeliest alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from quire import ops
from quire.arrays import Int32, int32
from quire.config import EngineArgs
from quire.ops.rows import LOGITS, PROCESSED
from quire.plan import Admit, DrawnTokens, Logprobs, StepPlan
from quire.runner.hooks.hook import HeadContext, HostHook, Level, ProgramHook
from quire.runner.hooks.sampling import sampling_columns
from quire.runner.readback import Array, Step, Upload
from quire.runner.state import BatchState, ColumnSpec
from quire.sampling_params import MAX_LOGPROBS, SamplingParams

WIDTH = 2 + 2 * (1 + MAX_LOGPROBS)
"""Number of words in a line of `ops.token_logprobs`."""

_MODES = {"processed_logprobs": PROCESSED, "raw_logits": LOGITS}
_MODES["processed_logits"] = PROCESSED | LOGITS
"""Modes of `ProcessedLogits`, by `SamplingParams.logprobs_mode`."""


class SampledLogprobs(ProgramHook, HostHook):
    """Computes the log-probabilities of sampled tokens under the model's own logits.

    Columns:
        num_raw_logprobs: int32 [lanes], number of alternatives to return; -1 for no logprobs.

    Attributes:
        name: the property of `SamplingParams` that asks for the hook.
        head_level: the level of heads that compute the values.
    """

    name = "raw_logprobs"
    head_level = Level.FULL

    @classmethod
    def made_for(cls, args: EngineArgs) -> Self:
        """Returns the hook for an engine's settings."""
        return cls()

    @classmethod
    def rare_columns(cls) -> Sequence[ColumnSpec]:
        """Returns columns that the batch state has before the first request needs the hook."""
        return (ColumnSpec(f"num_{cls.name}", fill=-1),)

    def bind(self, state: BatchState) -> None:
        self._column = state.columns[f"num_{self.name}"]
        self._alternatives = np.full(state.limits.lanes, -1, dtype=np.int32)
        self._shown = np.zeros(state.limits.lanes, dtype=np.bool_)
        """Whether the lane's `logprobs` come from this hook."""
        shape = state.limits.logit_rows, WIDTH
        self._lines = torch.empty(shape, dtype=torch.int32, device=state.device)

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        admits = plan.admits
        if not admits:
            return
        lanes = int32([admit.lane for admit in admits])
        counts = [getattr(admit.params, self.name) for admit in admits]
        self._alternatives[lanes] = [-1 if count is None else count for count in counts]
        self._shown[lanes] = [self._shows(admit.params) for admit in admits]
        upload.put_lines(self._column, lanes, self._alternatives[lanes])

    def _shows(self, params: SamplingParams) -> bool:
        return params.logprobs is not None and params.logprobs_mode not in _MODES

    def lane_level(self, admit: Admit) -> Level:
        return Level.PLAIN if getattr(admit.params, self.name) is None else self.head_level

    def tokens(self, ctx: HeadContext) -> None:
        if ctx.level >= Level.FULL and ctx.tokens is not None:
            ops.token_logprobs(ctx.raw, ctx.logit_rows, ctx.tokens, self._column, self._lines)

    def launched(self, step: Step) -> None:
        """Starts the copy of the log-probabilities, if any row asked for them."""
        plan = step.plan
        counts = np.diff(step.logit_start)
        if (self._alternatives[plan.lanes][counts > 0] >= 0).any():
            step.send(self.name, self._lines[: step.logit_start[-1]])
            step.notes[self.name] = self._alternatives[plan.lanes]
            step.notes[f"{self.name}.shown"] = self._shown[plan.lanes]

    def read(self, step: Step) -> None:
        lines = step.arrived(self.name)
        if lines is None:
            return
        row, kept = kept_logit_rows(step)
        kept &= step.notes[f"{self.name}.shown"][row]
        found = unpack(lines.numpy()[kept], row[kept], step.notes[self.name][row[kept]])
        step.result.logprobs = _merged(step.result.logprobs, found)


class ProcessedLogprobs(SampledLogprobs):
    """Computes values of other modes, and how tokens were drawn.

    Columns:
        num_processed_logprobs: int32 [lanes], number of alternatives to return; -1 for no values.
        logprobs_mode: int32 [lanes], see `ProcessedLogits`.
    """

    name = "processed_logprobs"

    @classmethod
    def made_for(cls, args: EngineArgs) -> Self:
        """Returns the hook for an engine's settings. Only an engine whose own mode is another than
        raw_logprobs captures the values' kernels. In others the heads that need them run op by
        op, so that heads of other requests have no further launches."""
        hook = cls()
        if args.logprobs_mode == "raw_logprobs":
            hook.head_level = Level.UNCAPTURED
        return hook

    @classmethod
    def rare_columns(cls) -> Sequence[ColumnSpec]:
        return (*super().rare_columns(), ColumnSpec("logprobs_mode"))

    def bind(self, state: BatchState) -> None:
        super().bind(state)
        rows, device = state.limits.logit_rows, state.device
        self._modes = state.columns["logprobs_mode"]
        self._temperature = sampling_columns(state)["temperature"]
        self._sizes = torch.zeros(rows, dtype=torch.int32, device=device)
        self._described = np.zeros(state.limits.lanes, dtype=np.bool_)
        """Whether the lane's request asks how its tokens are drawn."""
        state.cuts = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        state.cuts_level = self.head_level

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        super().stage(plan, upload)
        if plan.admits:
            lanes = int32([admit.lane for admit in plan.admits])
            params = [admit.params for admit in plan.admits]
            self._described[lanes] = [each.return_sampling_info for each in params]
            modes = [_MODES.get(each.logprobs_mode, PROCESSED) for each in params]
            upload.put_lines(self._modes, lanes, int32(modes))

    def _shows(self, params: SamplingParams) -> bool:
        return params.logprobs is not None and params.logprobs_mode in _MODES

    def tokens(self, ctx: HeadContext) -> None:
        cuts = ctx.state.cuts
        if ctx.level < self.head_level or ctx.tokens is None or cuts is None:
            return
        ops.token_logprobs(
            # Samplers outside of graphs may have widened the logits.
            ctx.raw.to(ctx.logits.dtype),
            ctx.logit_rows,
            ctx.tokens,
            self._column,
            self._lines,
            ops.ProcessedLogits(ctx.logits, self._modes, self._temperature, cuts, self._sizes),
        )

    def launched(self, step: Step) -> None:
        super().launched(step)
        described = self._described[step.plan.lanes]
        if described[np.diff(step.logit_start) > 0].any():
            step.send("mask_sizes", self._sizes[: step.logit_start[-1]])
            step.notes["described"] = described

    def read(self, step: Step) -> None:
        super().read(step)
        sizes = step.arrived("mask_sizes")
        if sizes is None:
            return
        row, kept = kept_logit_rows(step)
        kept &= step.notes["described"][row]
        first = 3 + MAX_LOGPROBS
        raw, processed = (
            _as_floats(_arrived(step, hook.name)[kept, first])
            for hook in (SampledLogprobs, ProcessedLogprobs)
        )
        step.result.drawn = DrawnTokens(row[kept], raw, processed, sizes.numpy()[kept])


def _arrived(step: Step, name: str) -> Int32:
    lines = step.arrived(name)
    assert lines is not None
    return lines.numpy()


def _as_floats(words: Int32) -> Any:
    return np.ascontiguousarray(words).view(np.float32)


def kept_logit_rows(step: Step) -> tuple[Int32, Array]:
    """Returns the plan's row of each logit row, int32 [L], and whether the logit row gave a token
    of the result, bool [L]."""
    counts = np.diff(step.logit_start)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    place = np.arange(len(row)) - step.logit_start[row]
    return row, place < step.result.n_tokens[row]


def _merged(some: Logprobs | None, others: Logprobs | None) -> Logprobs | None:
    """Returns the entries of both, in row order. No row has entries in both."""
    if some is None or others is None:
        return others if some is None else some
    width = max(some.ids.shape[1], others.ids.shape[1])
    order = np.argsort(np.concatenate([some.rows, others.rows]), kind="stable")
    columns = {}
    for name in Logprobs.__struct_fields__:
        parts = [getattr(each, name) for each in (some, others)]
        if name in ("ids", "values"):
            parts = [_widened(part, width) for part in parts]
        columns[name] = np.concatenate(parts)[order]
    return Logprobs(**columns)


def _widened(values: Array, width: int) -> Array:
    """Returns lines of `width` entries. Further ones are -1, which stands for no token."""
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=-1)


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
        values=_as_floats(lines[:, 2 + slots : 2 + slots + width]),
        ranks=np.ascontiguousarray(lines[:, 1]),
    )
