"""The interface between the engine's loop and the workers that run its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from quire.input_memory import InputMemory
from quire.plan import KVGroup, StepPlan, StepResult

OnProgress = Callable[[str, int, int], None]
"""Called during a start with ("weights", bytes loaded, bytes in all) or ("graphs", number captured,
number in all)."""


Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


@dataclass(frozen=True, slots=True)
class WorkerCall(Generic[Asked, Answered]):
    """Declares a call that an executor answers: its own, or a hook's of the first rank.

    Attributes:
        name: unique, "owner.noun", for errors.
    """

    name: str


FULL_STEP = 512
"""Least value of `Capacity.full_step`, and its value if nothing was measured."""


StepSeconds = dict[str, dict[int, float]]
"""Measured seconds of a step, by kind and size.

decode: steps of one token a row, with the head; by number of rows.
verify: steps whose rows have drafts, with the head; by number of tokens.
Hooks add further kinds for the passes that they launch.
"""


class Capacity(msgspec.Struct, frozen=True):
    """The limits of a started executor.

    Attributes:
        groups: KV groups.
        num_blocks: number of blocks of each group.
        host_blocks: number of slots of each group in the host's memory. Empty without such memory.
        seconds: duration of each part of the start ("weights", "graphs"), in seconds.
        full_step: prompt tokens that fill a step. Twice as many take about twice as long.
        logit_rows: most logit rows of a step, including logit rows of drafts. None: one per lane.
        drafts: most draft tokens of a generating row.
        step_seconds: measurements for features.
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
    """A worker's memory, after its weights are loaded.

    Attributes:
        groups: KV groups, with the bytes of a block on one rank.
        num_blocks: how many blocks of each group fit.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]


class Worker(Protocol):
    """One rank's device.

    All ranks get the same calls in the same order: `measure`, `allocate`, `capture`, then plans.
    The plan of a step is the same bytes on all ranks.
    """

    def measure(self) -> Measurement:
        """Loads the weights, and measures how much memory is left for the KV cache."""
        ...

    def allocate(self, num_blocks: tuple[int, ...]) -> None:
        """Makes the KV cache and the batch state.

        Args:
            num_blocks: number of blocks of each KV group.
        """
        ...

    def capture(self) -> Capacity:
        """Gets ready to run plans, and returns the limits. On a GPU this captures graphs."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Launches a step."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest step not yet collected, and returns its result."""
        ...

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        """Answers a call of a hook."""
        ...

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        ...


class Executor(Protocol):
    """Runs plans. All calls take effect in the order they are made.

    With tensor or pipeline parallelism, an executor sends each plan to several workers. The
    scheduler's tests run on a fake one.
    """

    def start(self) -> Capacity:
        """Loads the weights, sizes the KV cache, and returns the limits."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Launches a step. On a GPU it returns before the step has run."""
        ...

    def host_inputs(self) -> InputMemory:
        """Returns the memory of the host's inputs, for any thread.

        The heads of GATED rows wait for their inputs there, up to a limit. A row that is late gives
        no token (`StopReason.LATE`). So an input may not depend on a result that comes only after
        `submit` of a later step.
        """
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest step not yet collected, and returns its result."""
        ...

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        """Answers a call, its own or a hook's.

        Raises:
            QuireError: nobody takes the call.
        """
        ...

    def shutdown(self) -> None:
        """Releases the device. Idempotent."""
        ...
