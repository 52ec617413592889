"""What a feature may do in the runner. The runner knows features by this interface only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from quire.plan import StepPlan
    from quire.runner.batch_state import ColumnSpec
    from quire.runner.step import Step


class Hook:
    """Does nothing: the base of hooks, and the definition of their interface."""

    def columns(self) -> Sequence[ColumnSpec]:
        """Per-lane columns to keep on the device; plans fill them through `StepPlan.writes`."""
        return ()

    def wants(self, plan: StepPlan) -> bool:
        """Whether it takes part in the head of this step, which then runs op by op rather than as
        a graph. Where it says no, only `before_body` is called, if at all."""
        return True

    def before_body(self, step: Step) -> None:
        """When the step's plan is applied and its batch stands, before the model runs."""

    def after_body(self, step: Step) -> None:
        """When `step.hidden` stands, before any row is sampled. `step.stop_reason` may be set for
        rows that do not sample: they end then."""

    def head(self, step: Step, logits: Tensor, rows: Tensor) -> Tensor:
        """The logits float32 [n, vocab] of rows int64 [n] about to be sampled; gives those to use
        (changed in place or not)."""
        return logits

    def after_head(self, step: Step, rows: Tensor, tokens: Tensor) -> None:
        """The tokens int32 [n] just sampled for rows int64 [n], still on the device."""

    def on_control(self, message: dict[str, Any]) -> Any:
        """A control message no one else knows. None: not mine either."""
        return None
