"""Masks over the vocabulary, which the host brings while the step runs."""

from __future__ import annotations

import numpy as np

from quire.arrays import Int32
from quire.config import EngineConfig
from quire.ops import op
from quire.ops.reference import mask as twins
from quire.plan import DRAFT_IDS, DRAFT_START, HeadInputs, RowFlag, StepPlan
from quire.runner.hooks.hook import HeadContext, Hook, Level, SharedMemory
from quire.runner.mask_ring import ClaimRing, MaskRing
from quire.runner.readback import Step
from quire.runner.state import BatchState, Limits

_mask_logits = op(twins.mask_logits)
_wait_for_flag = op(twins.wait_for_flag)


class Mask(Hook):
    """Bars what a row's line of the mask does not allow. The head waits behind the model's logits,
    which need no mask.

    ring: holds the masks; made by `bind`. A row has a mask behind each of its drafts, whoever made
    them, so the host is told the claims of a step whose GATED rows verify some.
    """

    gates = True

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
        # Behind the hooks that draft.
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
        wanted = plan.mask_lines[_in_head(plan)]
        first = self.ring.first_line(plan.step_id)
        lines[: len(wanted)] = np.where(wanted >= 0, wanted + first, -1)
        gate[:] = self.ring.gate(plan.step_id)

    def lacks(self, plan: StepPlan, *, wait: bool) -> bool:
        if self.ring is None or not plan.gated:
            return False
        return not self.ring.has(plan.step_id, wait=wait)

    def room(self, step_id: int, rows: int) -> Int32 | None:
        return None if self.ring is None else self.ring.room(step_id, rows)

    def bring(self, inputs: HeadInputs) -> None:
        if self.ring is not None:
            self.ring.bring(inputs.step_id, inputs.mask)

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
    """Returns which of the plan's logit rows, `n_logits` of each row, are the head's."""
    prompt = (plan.flags & RowFlag.PROMPT) != 0
    samples = (plan.flags & RowFlag.SAMPLE) != 0
    mine = np.repeat(~prompt, plan.n_logits)
    mine[np.cumsum(plan.n_logits)[prompt & samples] - 1] = True
    return mine
