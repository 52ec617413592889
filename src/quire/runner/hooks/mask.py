"""Masks over the vocabulary, which the host submits while the step runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.executor import StepSeconds
from quire.input_memory import InputMemory, InputShape
from quire.models import Decoder
from quire.ops import op
from quire.ops.reference import mask as twins
from quire.plan import DRAFT_IDS, DRAFT_START, RowFlag, StepPlan, claim_width
from quire.runner.hooks.hook import (
    GateHook,
    HeadContext,
    HostHook,
    Level,
    ProgramHook,
    SharedMemory,
)
from quire.runner.host_inputs import HostInputs
from quire.runner.program import BodyShape, StepProgram
from quire.runner.readback import Step, logit_starts
from quire.runner.state import BatchState, Limits

if TYPE_CHECKING:
    from quire.runner.graphs import Graphs

_mask_logits = op(twins.mask_logits)
_wait_for_inputs = op(twins.wait_for_inputs)


class Mask(ProgramHook, HostHook, GateHook):
    """Bars the tokens that a row's mask does not allow.

    The head computes the model's logits first, because they need no mask, and then waits for masks.
    Rows with late masks leave the step (`wait_for_inputs`).

    A row has a mask after each of its drafts, which the device may have made. So the host receives
    the claims of a step whose GATED rows verify drafts.

    Args:
        drafts: most draft tokens of a row that the host knows for certain.
        patience_us: microseconds that a head waits for masks.
        remote: whether other processes build masks.

    Attributes:
        inputs: holds the masks; made by `bind`.
    """

    rare = True

    def __init__(
        self,
        config: EngineConfig,
        *,
        drafts: int = 0,
        patience_us: float = 0.0,
        remote: bool = False,
    ) -> None:
        self.drafts = drafts
        self._remote = remote
        self._words = -(-config.vocab_size // 32)
        self._patience = patience_us
        self._steps_in_flight = config.scheduler.steps_in_flight
        self._memory: SharedMemory | None = None
        self._rank, self._world = 0, 1
        self.inputs: HostInputs | None = None

    def shared_bytes(self, limits: Limits) -> int:
        return self._shape(limits, shared=True).size

    def _shape(self, limits: Limits, *, shared: bool) -> InputShape:
        return InputShape(
            limits.lanes,
            1 + limits.drafts,
            self._words,
            3 + limits.drafts,
            claim_width(limits.drafts),
            self._steps_in_flight + 1 if shared else 1,
        )

    def share(self, memory: SharedMemory) -> None:
        self._memory = memory

    def attach(self, model: Decoder) -> None:
        self._rank, self._world = model.group.rank, model.group.world

    def seconds(self, program: StepProgram, graphs: Graphs | None) -> StepSeconds:
        """Measures steps with and without drafts, if no other hook brings drafts."""
        limits = self._state.limits
        if graphs is None or not limits.rare:
            return {}
        decode = [min(rows, limits.lanes) for rows in (1, 4, 16, 32, 64, 128, 256)]
        verify = [min(tokens, limits.logit_rows) for tokens in (8, 16, 32, 64, 128, 192, 256, 512)]
        return {
            "decode": _measure(graphs, {n: BodyShape(n, n, 1) for n in decode}),
            "verify": _measure(graphs, {n: BodyShape(n, 1, 2) for n in verify if n > 1}),
        }

    def bind(self, state: BatchState) -> None:
        self._state = state
        self.inputs = HostInputs(
            state.device,
            self._shape(state.limits, shared=self._memory is not None),
            self._memory,
            self._rank,
            self._world,
            remote=self._remote,
        )

    def begin(self, step: Step) -> None:
        # The hooks that draft come earlier in the order, so the claims are final.
        if self.inputs is not None and self._state.limits.drafts and _verifies(step.plan):
            columns, gate = self._state.columns, self._state.gate
            ids, start = columns[DRAFT_IDS], columns[DRAFT_START]
            self.inputs.send_claims(step.plan.step_id, ids, start, gate)

    def launched(self, step: Step) -> None:
        if self.inputs is not None and step.plan.gated:
            results = self._state.results[: step.plan.num_rows]
            self.inputs.send_results(step.plan.step_id, results, self._state.gate)

    def level(self, plan: StepPlan) -> Level:
        return Level.MASKED if plan.gated else Level.PLAIN

    def pack(self, plan: StepPlan, inputs: Int32) -> None:
        if self.inputs is None or not plan.gated:
            return
        *_, lines, gate, _ = self._state.split_inputs(inputs)
        counts = np.diff(logit_starts(plan))
        starts = np.cumsum(counts) - counts
        masked = (plan.flags & (RowFlag.GATED | RowFlag.HELD)) != 0
        first = np.where(masked, self.inputs.first_lines(plan.step_id, plan.lanes), -1)
        number = np.arange(counts.sum()) - np.repeat(starts, counts)
        first = np.repeat(first, counts)
        lines[: len(first)] = np.where(first >= 0, first + number, -1)
        gate[:] = self.inputs.gate(plan.step_id)

    def inputs_missing(self, plan: StepPlan, *, wait: bool) -> bool:
        if self.inputs is None or not plan.gated:
            return False
        return not self.inputs.has(plan.step_id, plan.lanes[_gated(plan)], wait=wait)

    def host_inputs(self) -> InputMemory | None:
        return self.inputs

    def logits(self, ctx: HeadContext) -> None:
        if ctx.level < Level.MASKED or self.inputs is None:
            return
        state = ctx.state
        _wait_for_inputs(
            ctx.rows,
            ctx.logit_rows,
            state.gate,
            self.inputs.input_flags,
            position=state.position,
            last=ctx.last,
            held=ctx.held,
            patience_us=self._patience,
        )
        ctx.logits = _mask_logits(ctx.own_logits(), self.inputs.lines, state.lines[: len(ctx.raw)])

    def close(self) -> None:
        if self.inputs is not None:
            self.inputs.close()


def _measure(graphs: Graphs, shapes: Mapping[int, BodyShape]) -> dict[int, float]:
    """Returns the seconds of bodies with their heads, by size."""
    found: dict[int, float] = {}
    for size, wanted in shapes.items():
        body, head = graphs.body(wanted), graphs.head(size, Level.MASKED)
        if body is not None and head is not None:
            found[size] = graphs.seconds(body) + graphs.seconds(head)
    return found


def _gated(plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns which rows need inputs of the host, bool [R]."""
    gated: np.ndarray[tuple[int], np.dtype[np.bool_]] = (plan.flags & RowFlag.GATED) != 0
    return gated


def _verifies(plan: StepPlan) -> bool:
    """Whether GATED rows verify drafts."""
    gated = (plan.flags & (RowFlag.GATED | RowFlag.PROMPT)) == RowFlag.GATED
    return bool((gated & (plan.q_len > 1)).any())
