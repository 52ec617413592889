"""The workers of a pipeline's stages in one process; each stage runs as late as possible."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from quire.config import EngineConfig
from quire.engine.loop.features import earlier_hooks
from quire.executor import Answered, Asked, Capacity, WorkerCall
from quire.input_memory import InputMemory
from quire.parallel import SingleGroup
from quire.plan import StepPlan, StepResult
from quire.runner import Hook, ModelRunner
from quire.runner.stages import EarlierStage, LastStage


class LocalPipeline:
    """A stand-in for `Pipeline`. A stage that lacks an input runs the earlier stage first."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage = stage
        self.stages = stages
        self.hidden: deque[Tensor] = deque()
        self.results: deque[Tensor] = deque()
        self.all: list[LocalPipeline] = []
        self.run_last: Callable[[], None] = lambda: None

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self.hidden.popleft())

    def send(self, hidden: Tensor) -> None:
        self.all[self.stage + 1].hidden.append(hidden.clone())

    def send_results(self, results: Tensor) -> None:
        for other in self.all[:-1]:
            other.results.append(results)

    def receive_results(self, results: Tensor) -> None:
        while not self.results:
            self.run_last()
        results.copy_(self.results.popleft())


class LocalStages:
    """An executor. Stages run a step when it is submitted. Only the last stage, which gives the
    tokens, runs as late as possible: when the step is collected, or when another stage needs it."""

    def __init__(self, config: EngineConfig, hooks: Sequence[Hook]) -> None:
        stages = config.args.pipeline_parallel_size
        self.pipelines = [LocalPipeline(stage, stages) for stage in range(stages)]
        for pipeline in self.pipelines:
            pipeline.all, pipeline.run_last = self.pipelines, self._run_last
        *others, last = self.pipelines
        self.last = LastStage(config, last, SingleGroup(), None, hooks)  # type: ignore[arg-type]
        self.others = [
            EarlierStage(config, each, SingleGroup(), earlier_hooks(config)) for each in others
        ]  # type: ignore[arg-type]
        self._late: deque[StepPlan] = deque()
        self._submitted = 0

    @property
    def runners(self) -> list[ModelRunner]:
        return [*self.others, self.last]

    def start(self) -> Capacity:
        found = [runner.measure().num_blocks for runner in self.runners]
        rooms = itertools.zip_longest(*found)
        blocks = tuple(min(n for n in counts if n is not None) for counts in rooms)
        for runner in self.runners:
            runner.allocate(blocks)
        return [runner.capture() for runner in self.runners][-1]

    def submit(self, plan: StepPlan) -> None:
        self._late.append(plan)
        for runner in self.others:
            runner.submit(plan)

    def _run_last(self) -> None:
        self.last.submit(self._late.popleft())
        self._submitted += 1

    def collect(self) -> StepResult:
        if not self._submitted:
            self._run_last()
        self._submitted -= 1
        for runner in self.others:
            runner.collect()
        return self.last.collect()

    def host_inputs(self) -> InputMemory:
        return self.last.host_inputs()

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        return self.last.call(call, request)

    def shutdown(self) -> None:
        for runner in self.runners:
            runner.shutdown()
