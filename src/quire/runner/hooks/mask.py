"""Masks over the vocabulary, which the host submits while the step runs."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.ops import op
from quire.ops.reference import mask as twins
from quire.plan import DRAFT_IDS, DRAFT_START, HeadInputs, RowFlag, StepPlan
from quire.runner.hooks.hook import (
    GateHook,
    HeadContext,
    HostHook,
    Level,
    ProgramHook,
    SharedMemory,
)
from quire.runner.mask_ring import ClaimRing, MaskRing
from quire.runner.readback import Step
from quire.runner.state import BatchState, Limits

_mask_logits = op(twins.mask_logits)
_wait_for_flag = op(twins.wait_for_flag)


class Mask(ProgramHook, HostHook, GateHook):
    """Bars the tokens that a row's mask does not allow.

    The head waits for masks only after the model's logits, which need none.

    A row has a mask after each of its drafts, which the device may have made. So the host receives
    the claims of a step whose GATED rows verify drafts.

    Attributes:
        ring: holds the masks; made by `bind`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._depth = config.scheduler.steps_in_flight + 1
        self._words = -(-config.vocab_size // 32)
        self._memory: SharedMemory | None = None
        self.ring: MaskRing | None = None
        self._claims: ClaimRing | None = None

    def shared_bytes(self, limits: Limits) -> int:
        return MaskRing.size(self._depth, limits.logit_rows, self._words)

    def share(self, memory: SharedMemory) -> None:
        self._memory = memory

    def bind(self, state: BatchState) -> None:
        self._state = state
        rows = state.limits.logit_rows
        self.ring = MaskRing(state.device, self._depth, rows, self._words, self._memory)
        if state.limits.drafts:
            columns = (state.columns[name] for name in (DRAFT_IDS, DRAFT_START))
            self._claims = ClaimRing(self._depth, *columns)

    def begin(self, step: Step) -> None:
        # The hooks that draft come earlier in the order, so the claims are final.
        if self._claims is not None and _verifies(step.plan):
            self._claims.send(step.plan.step_id)

    def claimed(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        return None if self._claims is None else self._claims.get(step_id, wait=wait)

    def level(self, plan: StepPlan) -> Level:
        return Level.MASKED if plan.gated else Level.PLAIN

    def pack(self, plan: StepPlan, inputs: Int32) -> None:
        if self.ring is None or not plan.gated:
            return
        *_, lines, gate = self._state.split_inputs(inputs)
        numbers = plan.mask_lines[_in_head(plan)]
        first = self.ring.first_line(plan.step_id)
        lines[: len(numbers)] = np.where(numbers >= 0, numbers + first, -1)
        gate[:] = self.ring.gate(plan.step_id)

    def masks_missing(self, plan: StepPlan, *, wait: bool) -> bool:
        if self.ring is None or not plan.gated:
            return False
        return not self.ring.has(plan.step_id, wait=wait)

    def mask_buffer(self, step_id: int, rows: int) -> Int32 | None:
        return None if self.ring is None else self.ring.buffer(step_id, rows)

    def submit_masks(self, inputs: HeadInputs) -> None:
        if self.ring is not None:
            self.ring.put(inputs.step_id, inputs.mask)

    def logits(self, ctx: HeadContext) -> None:
        if ctx.level < Level.MASKED or self.ring is None:
            return
        _wait_for_flag(ctx.state.gate, self.ring.flags)
        lines = ctx.state.lines[: len(ctx.raw)]
        ctx.logits = _mask_logits(ctx.own_logits(), self.ring.masks, lines)

    def close(self) -> None:
        for ring in (self.ring, self._claims):
            if ring is not None:
                ring.close()


def _verifies(plan: StepPlan) -> bool:
    """Whether GATED rows verify drafts."""
    gated = (plan.flags & (RowFlag.GATED | RowFlag.PROMPT)) == RowFlag.GATED
    return bool((gated & (plan.q_len > 1)).any())


def _in_head(plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns whether each of the plan's logit rows is one of the head's, bool [sum n_logits]."""
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    in_head = np.repeat(~prompt, plan.n_logits)
    in_head[np.cumsum(plan.n_logits)[prompt & samples] - 1] = True
    return in_head
