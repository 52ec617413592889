"""One rank's worker. It has three phases: loaded, sized, and running plans on one device."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire import models, ops
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.executor import (
    FULL_STEP,
    Answered,
    Asked,
    Capacity,
    Measurement,
    OnProgress,
    StepSeconds,
    WorkerCall,
)
from quire.input_memory import InputMemory
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import StepPlan, StepResult
from quire.runner.graphs import Buckets, EncoderBuckets, Graphs
from quire.runner.hooks import Hook
from quire.runner.kv_cache import KVCache
from quire.runner.loaded_model import LoadedModel
from quire.runner.sized_model import SizedModel
from quire.runner.state import BatchState, Limits
from quire.runner.step_runner import StepRunner

_LOGIT_ROWS = 64
"""Least `Limits.logit_rows` if rows have drafts, unless all lanes' drafts need fewer. If few steps
have drafts, as many are for drafts alone."""


class ModelRunner:
    """Holds a model, its KV cache and the batch state of one device.

    `measure` begins the first phase (`LoadedModel`), `allocate` the second (`SizedModel`), and
    `capture` the third (`StepRunner`). The class is a `Worker`. In an engine with one rank it is
    also the `Executor`.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
        group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.group = group or SingleGroup()
        self.limits = step_limits(config, hooks)
        self._features = tuple(hooks)
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._loaded: LoadedModel | None = None
        self._sized: SizedModel | None = None
        self._running: StepRunner | None = None

    # -- start ---------------------------------------------------------------------------------

    def start(self) -> Capacity:
        """Runs all parts of a start, as the only rank."""
        self.allocate(self.measure().num_blocks)
        return self.capture()

    def measure(self) -> Measurement:
        """Loads the weights, and measures how much memory is left for the KV cache."""
        self._loaded = LoadedModel(
            self.config, self.limits, self._features, self.group, self._progress, self._build
        )
        measurement = self._loaded.measure()
        self._seconds["weights"] = self._loaded.seconds
        return measurement

    def allocate(self, num_blocks: tuple[int, ...]) -> None:
        """Makes the KV cache and the batch state.

        Args:
            num_blocks: number of blocks of each KV group.
        """
        self._sized = self._size(self.loaded, num_blocks)

    def capture(self) -> Capacity:
        """Captures all graphs, on a GPU, and returns the limits."""
        sized, full, graphs = self.sized, FULL_STEP, None
        if self.device.type == "cuda" and not self.config.eager:
            began = time.perf_counter()
            graphs, full = self._captured(sized)
            self._seconds["graphs"] = time.perf_counter() - began
        self._running = self._run(sized, graphs)
        step_seconds: StepSeconds = {}
        with ops.use_policy(self.loaded.policy):
            for hook in sized.features:
                step_seconds |= hook.seconds(sized.program, graphs)
        return Capacity(
            self.loaded.groups,
            sized.num_blocks,
            host_blocks=() if sized.transfer is None else sized.transfer.slots,
            seconds=self._seconds,
            full_step=full,
            logit_rows=self.limits.logit_rows,
            drafts=self.limits.drafts,
            step_seconds=step_seconds,
        )

    @torch.inference_mode()
    def _captured(self, sized: SizedModel) -> tuple[Graphs, int]:
        """Captures all programs. Returns them, and the tokens of a full step."""
        sized.add_rare(tuple(sized.rare))
        sized.state.inputs.copy_(torch.from_numpy(sized.state.idle_inputs()))
        whole_texts = isinstance(sized.loaded.model, models.Encoder)
        kind = EncoderBuckets if whole_texts else Buckets
        graphs = Graphs(self.device, self.limits, kind(self.limits))
        with ops.use_policy(self.loaded.policy):
            full = graphs.capture_steps(sized.program, self._on_progress("graphs"))
        return graphs, full

    def _on_progress(self, part: str) -> Callable[[int, int], None] | None:
        return None if self._progress is None else functools.partial(self._progress, part)

    # -- the phases, which the stages of a pipeline override -------------------------------------

    def _build(self, spec: models.ModelSpec, **options: Any) -> models.Decoder:
        """Returns the model that this worker runs. options: see `build_model`."""
        return models.build_model(spec, **options)

    def _size(self, loaded: LoadedModel, num_blocks: tuple[int, ...]) -> SizedModel:
        return SizedModel(loaded, num_blocks, self._features)

    def _run(self, sized: SizedModel, graphs: Graphs | None) -> StepRunner:
        return StepRunner(sized, graphs)

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise QuireError("the worker has no model: it has not loaded one yet, or has ended")
        return self._loaded

    @property
    def sized(self) -> SizedModel:
        if self._sized is None:
            raise QuireError("the worker has no KV cache: none is allocated yet, or it has ended")
        return self._sized

    @property
    def running(self) -> StepRunner:
        if self._running is None:
            raise QuireError("the worker runs no plans: it has not started, or has ended")
        return self._running

    @property
    def model(self) -> models.Decoder:
        return self.loaded.model

    @property
    def cache(self) -> KVCache:
        return self.sized.cache

    @property
    def state(self) -> BatchState:
        return self.sized.state

    # -- running -------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Launches a step. If it has GATED rows, its head runs when their inputs come."""
        self.running.submit(plan)

    def collect(self) -> StepResult:
        """Returns the oldest step's result. Waits for the device, and for the step's inputs."""
        return self.running.collect()

    def host_inputs(self) -> InputMemory:
        return self.running.host_inputs()

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        """Lets the hook that takes a call answer it."""
        return self.running.call(call, request)

    def add_hook(self, hook: Hook) -> None:
        """Adds a hook, from the next plan on.

        Raises:
            QuireError: programs are captured already, or the hook keeps columns.
        """
        if self.running.graphs is not None:
            raise QuireError(
                f"programs are captured, so {type(hook).__name__} must be known when the runner "
                "starts"
            )
        self.sized.add_feature(hook)

    def shutdown(self) -> None:
        """Gives the device's memory back. Idempotent."""
        for hook in self._features if self._sized is None else self._sized.features:
            hook.close()
        if self._sized is not None and self._sized.transfer is not None:
            self._sized.transfer.close()
        loaded = self._loaded
        memories = () if loaded is None else (loaded.weight_memory, loaded.kv_memory)
        self._features = ()
        del loaded
        self._loaded = self._sized = self._running = None
        if self.device.type == "cuda":
            # Graphs and the objects that captured them form reference cycles.
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        for memory in memories:
            memory.close()


def step_limits(config: EngineConfig, hooks: Sequence[Hook]) -> Limits:
    """Returns the limits of an engine with these hooks."""
    scheduler = config.scheduler
    lanes, drafts = scheduler.max_num_seqs, max((hook.drafts for hook in hooks), default=0)
    rare = all(hook.rare for hook in hooks if hook.drafts)
    # With many lanes, each gets few drafts, so that heads stay small.
    most = lanes + _LOGIT_ROWS if rare else max(2 * lanes, _LOGIT_ROWS)
    return Limits(
        lanes=lanes,
        tokens=scheduler.max_num_batched_tokens,
        logit_rows=min(lanes * (1 + drafts), most) if drafts else lanes,
        length=scheduler.max_model_len,
        drafts=drafts,
        rare=bool(drafts) and rare,
    )
