"""Masks over the vocabulary, which the host brings while the step runs."""

from __future__ import annotations

from quire import ops
from quire.plan import StepPlan
from quire.runner.hooks.hook import HeadContext, Hook, Level
from quire.runner.mask_ring import MaskRing


class Mask(Hook):
    """Bars what a row's line of the mask does not allow. The head waits behind the model's logits,
    which need no mask."""

    def __init__(self, ring: MaskRing) -> None:
        self._ring = ring

    def level(self, plan: StepPlan) -> Level:
        return Level.MASKED if plan.gated else Level.PLAIN

    def logits(self, ctx: HeadContext) -> None:
        if ctx.level < Level.MASKED:
            return
        ops.wait_for_flag(ctx.state.gate, self._ring.flags)
        lines = ctx.state.lines[: len(ctx.raw)]
        ctx.logits = ops.mask_logits(ctx.own_logits(), self._ring.masks, lines)
