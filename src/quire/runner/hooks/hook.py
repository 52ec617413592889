"""The interface of hooks, which take part in a step beside the model. The runner knows hooks by it
only."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quire.arrays import Int32
from quire.executor import StepSeconds
from quire.models.decoder import Decoder, DecoderLayers
from quire.ops import LogitRows, StepRows
from quire.plan import Admit, HeadInputs, StepPlan
from quire.runner.kv_cache import KVCache
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits

SharedMemory = np.ndarray[tuple[int], np.dtype[np.int8]]
"""Memory that all ranks map, int8 [bytes]."""


class Level(enum.IntEnum):
    """The abilities of a head. Each level includes those before it; within one, every choice is
    made per row, on the device.

    PLAIN: greedy choice, or temperature. MASKED: truncation, and masks that the host brings.
    FULL: everything that graphs hold. UNCAPTURED: everything; such heads run op by op.
    """

    PLAIN = 0
    MASKED = 1
    FULL = 2
    UNCAPTURED = 3


@dataclass(slots=True)
class HeadContext:
    """A head on its way through the hooks.

    rows: the step's rows. logit_rows: where the logits are, L of them.
    logits: [L, vocab], changed by hooks before tokens are drawn. raw: as the model gave them.
    tokens: int32 [L], once drawn; -1 where logits were not numbers.
    """

    level: Level
    state: BatchState
    rows: StepRows
    logit_rows: LogitRows
    raw: Tensor
    logits: Tensor
    tokens: Tensor | None = None

    def own_logits(self) -> Tensor:
        """Returns logits that may be changed in place while `raw` is still needed."""
        if self.logits is self.raw and self.level >= Level.FULL:
            self.logits = self.raw.clone()
        return self.logits


class Hook:
    """Does nothing: the base of hooks, and the definition of their interface. Methods stand in the
    order in which the runner calls them.

    `body`, `logits` and `tokens` are parts of the step's programs: they may be captured, so they
    read nothing of the plan, make no decision on the host, and do the same for the same shape or
    level. All other methods run on the host, for each step or once at the start.

    drafts: the most draft tokens of a row that steps must verify for it.
    entries: names in `StepPlan.writes` that it reads there, and that are no columns.
    gates: whether it can make a head wait for the host, with the methods `lacks`, `room`, `claimed`
        and `bring`.
    alters: whether it can change what the model computes, with the methods `altered` and `body`.
    draws: whether it leaves one token only, so that others must have changed the logits before.
    embeds: whether it needs the model's embeddings where the head is.
    """

    alters: bool = False
    draws: bool = False
    embeds: bool = False
    drafts: int = 0
    entries: frozenset[str] = frozenset()
    gates: bool = False

    # -- at the start, once --------------------------------------------------------------------

    def shared_bytes(self, limits: Limits) -> int:
        """Returns the bytes of host memory that all ranks must share for it."""
        return 0

    def share(self, memory: SharedMemory) -> None:
        """Takes memory that all ranks map. Not called where there is one rank."""

    def attach(self, model: Decoder) -> None:
        """Takes the model, whose weights are loaded, before memory is measured."""

    def models(self) -> Sequence[DecoderLayers]:
        """Loads further models, whose KV groups stand behind the target's."""
        return ()

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        """Returns the per-lane columns it keeps; plans fill them through `StepPlan.writes`."""
        return ()

    def bind(self, state: BatchState) -> None:
        """Takes the state that holds its columns."""

    def take_cache(self, cache: KVCache) -> None:
        """Takes the KV cache, which holds its models' layers behind the target's."""

    def programs(self) -> Mapping[str, Callable[[], None]]:
        """Returns further programs to capture, by name. They read and write fixed tensors, and
        change nothing if the lanes of their rows are all -1."""
        return {}

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        """Takes what replays its programs, where graphs are."""

    def seconds(self, program: Any, graphs: Any) -> StepSeconds:
        """Measures what steps take that are planned by it, when all is captured.

        program: the `StepProgram`. graphs: its `CapturedPrograms`, or None.
        """
        return {}

    # -- a step: the plan is applied -----------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        """Adds to the upload what the plan, and requests that take a lane, change for it."""

    def lane_level(self, admit: Admit) -> Level:
        """Returns what heads must be able to do for the rows of a request that takes a lane."""
        return Level.PLAIN

    def pack(self, plan: StepPlan, inputs: Int32) -> None:
        """Fills in its part of a step's `BatchState.inputs`."""

    # -- a step: the body ----------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Launches what comes before the step's body, once the plan is applied."""

    def altered(self, plan: StepPlan) -> bool:
        """Whether the plan's body is one that it changes."""
        return False

    def body(self, rows: StepRows, tokens: int, altered: bool) -> None:
        """Prepares the model for a body over so many tokens. A part of the body's program."""

    def hidden(self, step: Step, hidden: Tensor) -> None:
        """Uses a step's hidden states [T, width], between body and head; launched op by op, but
        for its own programs. What it makes goes to the host with `step.send`."""

    # -- a step: the head ----------------------------------------------------------------------

    def level(self, plan: StepPlan) -> Level:
        """Returns what the plan's head must be able to do, whatever its lanes ask for."""
        return Level.PLAIN

    def lacks(self, plan: StepPlan, *, wait: bool) -> bool:
        """Tells whether the plan's head needs what the host has yet to bring; with `wait`, waits
        for it."""
        return False

    def logits(self, ctx: HeadContext) -> None:
        """Changes `ctx.logits` before tokens are drawn. A part of the head's program."""

    def tokens(self, ctx: HeadContext) -> None:
        """Uses what was drawn and accepted. A part of the head's program."""

    def launched(self, step: Step) -> None:
        """Starts copies to the host, with `step.send`, once the step's head is launched."""

    def end(self, step: Step) -> None:
        """Launches what comes behind the step's head, which the step's results do not wait for."""

    def read(self, step: Step) -> None:
        """Adds to `step.result`, on the host, once the step is done."""

    # -- what the host brings, on any thread ---------------------------------------------------

    def room(self, step_id: int, rows: int) -> Int32 | None:
        """Answers `Executor.mask_room`. None: not this one."""
        return None

    def claimed(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        """Answers `Executor.claimed`."""
        return None

    def bring(self, inputs: HeadInputs) -> None:
        """Takes what the host brings for the head of a step."""

    # -- everything else -----------------------------------------------------------------------

    def on_control(self, message: dict[str, Any]) -> Any:
        """Answers a control message that no one else knows. None: not this one either."""
        return None

    def close(self) -> None:
        """Ends, and lets go of whatever waits for the host. Idempotent."""
