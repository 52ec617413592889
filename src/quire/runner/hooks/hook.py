"""The interface of hooks, which take part in a step beside the model.

The runner knows hooks by these classes only. A hook inherits the parts that it has:

=============  ====================================================================================
`Hook`         the base: its start, its settings, its calls
`ProgramHook`  changes logits or uses tokens within the step's programs, which may be captured
`HostHook`     acts on the host in every step, and launches work outside of the programs
`GateHook`     makes a head wait for inputs that the host makes while the step runs
=============  ====================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from quire.arrays import Int32
from quire.executor import StepSeconds, WorkerCall
from quire.input_memory import InputMemory
from quire.layers.batch import ForwardBatch
from quire.models.decoder import Decoder, DecoderLayers
from quire.ops import LogitRows, StepRows
from quire.parallel import ProcessGroup
from quire.plan import Admit, KVGroup, StepPlan
from quire.runner.kv_cache import KVCache
from quire.runner.readback import Step, Upload
from quire.runner.releasable import ReleasableMemory
from quire.runner.state import BatchState, ColumnSpec, Limits
from quire.runner.transfer.place import Place

SharedMemory = np.ndarray[tuple[int], np.dtype[np.int8]]
"""Memory that all ranks map, int8 [bytes]."""


class Level(enum.IntEnum):
    """The abilities of a head. Each level includes those before it.

    A level says what a head can do. What it does is decided per row, on the device.

    PLAIN: greedy choice, or temperature.
    MASKED: also truncation, and masks from the host.
    FULL: everything that graphs are captured with.
    UNCAPTURED: everything; such heads run op by op.
    """

    PLAIN = 0
    MASKED = 1
    FULL = 2
    UNCAPTURED = 3


@dataclass(slots=True)
class HeadContext:
    """The values of a head, which each hook in turn reads and changes.

    Attributes:
        level: the abilities of the head.
        rows: the step's rows.
        logit_rows: the L logit rows.
        last: [L, width], the logit rows' hidden states.
        held: [lanes, width], the hidden states of held lanes.
        raw: [L, vocab], the model's unchanged logits.
        logits: [L, vocab], the logits. Hooks change them before tokens are drawn.
        tokens: int32 [L], the drawn tokens. The token is -1 where a logit was not a number.
        fused: whether tokens are drawn and accepted at once, by the last hook. Then `tokens` is
            None.
    """

    level: Level
    state: BatchState
    rows: StepRows
    logit_rows: LogitRows
    last: Tensor
    held: Tensor
    raw: Tensor
    logits: Tensor
    tokens: Tensor | None = None
    fused: bool = False

    def own_logits(self) -> Tensor:
        """Returns logits that may be changed in place while `raw` is still needed."""
        if self.logits is self.raw and self.level >= Level.FULL:
            self.logits = self.raw.clone()
        return self.logits


class Hook:
    """The base of hooks. Its methods do nothing; they are called once, in this order.

    Attributes:
        drafts: most draft tokens of a row that steps must verify for the hook.
        rare: whether few steps have such drafts, so that programs of few sizes are captured for
            them.
        entries: names in `StepPlan.writes` that the hook reads from the plan; no columns.
        embeds: whether the hook needs the model's embeddings on the stage with the head.
        draws: whether the hook leaves only one possible token in the logits. It then runs after
            the hooks of other features.
    """

    drafts: int = 0
    rare: bool = False
    entries: frozenset[str] = frozenset()
    embeds: bool = False
    draws: bool = False

    def shared_bytes(self, limits: Limits) -> int:
        """Returns the bytes of host memory that all ranks must share for the hook."""
        return 0

    def share(self, memory: SharedMemory) -> None:
        """Receives memory that all ranks map. Not called with one rank."""

    def attach(self, model: Decoder) -> None:
        """Receives the model with its weights, before free memory is measured."""

    def models(self) -> Sequence[DecoderLayers]:
        """Loads further models, whose KV groups follow those of the target model."""
        return ()

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        """Returns the per-lane columns of the hook. Plans fill them through `StepPlan.writes`."""
        return ()

    def bind(self, state: BatchState) -> None:
        """Receives the state that holds the hook's columns."""

    def take_cache(self, cache: KVCache) -> None:
        """Receives the KV cache, in which the layers of `models` follow the target model's."""

    def take_memory(
        self,
        weights: ReleasableMemory,
        kv: ReleasableMemory,
        cache: KVCache,
        models: Sequence[DecoderLayers],
    ) -> None:
        """Receives the memory of the target model's weights and of the KV cache.

        Args:
            models: the target model, then those of hooks.
        """

    def reserved_bytes(self, groups: Sequence[KVGroup], budget: int) -> int:
        """Returns the bytes of the device that the hook needs and has not allocated yet.

        The KV cache gets less by them, unless `kv_cache_gb` sets its size.

        Args:
            groups: KV groups of all models.
            budget: bytes for the KV cache and hooks.
        """
        return 0

    def places(
        self, cache: KVCache, models: Sequence[DecoderLayers], group: ProcessGroup
    ) -> Mapping[str, Place]:
        """Opens places outside the device, by name. Plans move blocks to and from them.

        All ranks call it at the same time.

        Args:
            models: the target model, then those of hooks, in the order of their KV groups.

        Raises:
            ConfigError: there is too little memory, or the model's KV cannot be moved.
        """
        return {}

    def seconds(self, program: Any, graphs: Any) -> StepSeconds:
        """Measures steps, for the scheduler's planning. Called after all programs are captured.

        Args:
            program: the `StepProgram`.
            graphs: its `CapturedPrograms`, or None.
        """
        return {}

    def calls(self) -> Mapping[WorkerCall[Any, Any], Callable[[Any], Any]]:
        """Returns the calls that the hook takes, each with the function that answers a request."""
        return {}

    def close(self) -> None:
        """Ends the hook, and wakes every thread that waits for the host. Idempotent."""


class ProgramHook(Hook):
    """A hook with a part in the step's programs: a body, then a head.

    Programs may be captured. So `body`, `logits` and `tokens` read nothing of the plan, decide
    nothing on the host, and launch the same kernels for the same shape or level.

    Attributes:
        alters: whether `body` can change what the model computes. If so, bodies are captured with
            and without that change, and `altered` chooses.
        changes_tokens: whether `tokens` changes the drawn tokens of PLAIN heads.
    """

    alters: bool = False
    changes_tokens: bool = False

    def programs(self) -> Mapping[str, Callable[[], None]]:
        """Returns further programs to capture, by name.

        They read and write fixed tensors, and change nothing if all their rows have lane -1.
        """
        return {}

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        """Receives functions that replay the captured programs. Not called without graphs."""

    def altered(self, plan: StepPlan) -> bool:
        """Whether the hook changes what the model computes for this plan. Called on the host."""
        return False

    def body(self, rows: StepRows, tokens: int, altered: bool) -> None:
        """Prepares the model for a body over `tokens` tokens."""

    def batch(self, rows: StepRows, batch: ForwardBatch, altered: bool) -> None:
        """Changes the inputs of the model in a body, such as given embeddings."""

    def logits(self, ctx: HeadContext) -> None:
        """Changes `ctx.logits`; the sampler's own hook draws `ctx.tokens`."""

    def tokens(self, ctx: HeadContext) -> None:
        """Uses the tokens that were drawn and accepted."""


class HostHook(Hook):
    """A hook that acts on the host in every step. The runner calls the methods in this order."""

    # -- the plan is applied -------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        """Adds the plan's changes of the hook's columns to the upload."""

    def lane_level(self, admit: Admit) -> Level:
        """Returns the level that heads need for the rows of a request that takes a lane."""
        return Level.PLAIN

    def pack(self, plan: StepPlan, inputs: Int32) -> None:
        """Fills in the hook's part of `BatchState.inputs`."""

    # -- the body ------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Launches work before the step's body, after the plan was applied."""

    def hidden(self, step: Step, hidden: Tensor) -> None:
        """Launches work on the step's hidden states [T, width], between body and head.

        The runner calls it every time; it is not captured. `step.send` copies results to the host.
        """

    # -- the head ------------------------------------------------------------------------------

    def level(self, plan: StepPlan) -> Level:
        """Returns the least level of the plan's head. Its lanes may need a higher one."""
        return Level.PLAIN

    def launched(self, step: Step) -> None:
        """Starts copies to the host with `step.send`, after the step's head is launched."""

    def end(self, step: Step) -> None:
        """Launches work after the step's head. The step's results do not wait for it."""

    def read(self, step: Step) -> None:
        """Adds to `step.result`, after the step is done on the device."""


class GateHook(Hook):
    """A hook that makes the heads of GATED rows wait for inputs of the host.

    A runner has at most one.
    """

    def inputs_missing(self, plan: StepPlan, *, wait: bool) -> bool:
        """Whether the plan's head needs inputs that the host has yet to submit.

        Args:
            wait: wait for them first.
        """
        return False

    def host_inputs(self) -> InputMemory | None:
        """Answers `Executor.host_inputs`."""
        return None
