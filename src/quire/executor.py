"""The brain's only view of the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from quire.arrays import Int32
from quire.plan import HeadInputs, KVGroup, StepPlan, StepResult

OnProgress = Callable[[str, int, int], None]
"""Called as a start goes on: "weights", bytes loaded and in all; "graphs", captured and in all."""


FULL_STEP = 512
"""Tokens, where nothing was measured, and at least."""


StepSeconds = dict[str, dict[int, float]]
"""By what was measured, seconds by its size: `decode` steps by rows, `verify` steps, whose rows
have drafts, by tokens, each with the head; and what hooks launch besides."""


class Capacity(msgspec.Struct, frozen=True):
    """The limits of a started executor.

    groups: KV groups. num_blocks: blocks of each. host_blocks: those that the host's memory holds
        besides, if there is any.
    seconds: how long parts of its start took ("weights", "graphs"), as far as it has them.
    full_step: prompt tokens that fill a step: twice as many take about twice as long.
    logit_rows: most rows that a step can sample from, drafts included; None: one per lane.
    drafts: the most draft tokens of a generating row. step_seconds: what was measured for features.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...] = ()
    seconds: dict[str, float] = {}
    full_step: int = FULL_STEP
    logit_rows: int | None = None
    drafts: int = 0
    step_seconds: StepSeconds = {}


class Measurement(msgspec.Struct, frozen=True):
    """A worker's memory once its weights are loaded. groups: KV groups, with the bytes that a block
    takes on one rank. num_blocks: how many blocks of each group there is room for."""

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]


class Worker(Protocol):
    """One rank's device. All ranks get the same calls in the same order: `measure`, `allocate`,
    `capture`, and then plans, of which those of one step are the same bytes everywhere."""

    def measure(self) -> Measurement:
        """Loads the weights, and finds how much memory is left for the KV cache."""
        ...

    def allocate(self, num_blocks: tuple[int, ...]) -> None:
        """Makes the KV cache, of so many blocks of each group, and the batch state."""
        ...

    def capture(self) -> Capacity:
        """Gets ready to run, which on a GPU captures graphs, and says what there is."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Launches a step."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest step not yet collected, and returns its result."""
        ...

    def control(self, message: dict[str, Any]) -> Any:
        """Answers whatever is not a step."""
        ...

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        ...


class Executor(Protocol):
    """Runs plans. All calls take effect in the order they are made.

    Tensor and pipeline parallelism are executors that fan one plan out; the scheduler's tests run
    on a fake one.
    """

    def start(self) -> Capacity:
        """Load weights, size the KV cache, and say what there is."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Launch a step. Returns before it has run where the device allows that."""
        ...

    def mask_room(self, step_id: int, rows: int) -> Int32:
        """Returns memory for masks of a submitted step, for any thread to fill: int32 [rows,
        ceil(vocab / 32)], uninitialized. Masks from elsewhere cost a copy."""
        ...

    def claimed(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        """Returns the claims (see `StepPlan`) that the body of a step reads whose GATED rows verify
        drafts, from any thread: ids int32 [lanes, W] and start int32 [lanes], which hold until the
        step is collected. None: they are not made yet; with `wait`, which waits for them and for
        the step's submission, only where the executor ends."""
        ...

    def submit_head(self, inputs: HeadInputs) -> None:
        """Bring the masks of a step with GATED rows, from any thread. The step, and all behind it,
        wait for them, so nothing that they depend on may come after `submit` of a later step."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step not yet collected, and return its result."""
        ...

    def control(self, message: dict[str, Any]) -> Any:
        """Everything that is not a step (statistics, adapters, profiling)."""
        ...

    def shutdown(self) -> None:
        """Release the device. Idempotent."""
        ...
