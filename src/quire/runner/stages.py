"""Workers of a pipeline's stages.

All stages get the same plans. The last stage draws tokens, and sends each step's results to the
other stages. They receive the results before the next step with a row of one of these lanes. That
step comes as many steps later as there are stages, unless the engine has already read the results.
So tokens pass from step to step without the host, as on one device.

The last stage also sends the lanes' claims (see `StepPlan`), which it may draft after the step's
head. So all stages verify the same drafts in the lanes' next rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.executor import OnProgress
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.models.stages import build_stage
from quire.ops.reference.step import (
    BROKEN,
    ENDED,
    FIRST_TOKEN,
    LATE,
    held_position,
    text_position,
)
from quire.parallel import ProcessGroup
from quire.parallel.pipeline import Pipeline
from quire.plan import KVGroup, RowFlag, StepPlan
from quire.runner.graphs import Graphs
from quire.runner.hooks import Hook
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.penalties import Penalties
from quire.runner.loaded_model import LoadedModel
from quire.runner.model_runner import ModelRunner
from quire.runner.program import CapturedPrograms
from quire.runner.readback import PinnedRing, Step, Upload, logit_starts
from quire.runner.sized_model import SizedModel
from quire.runner.state import BatchState, Limits
from quire.runner.step_runner import StepRunner


class StageRunner(ModelRunner):
    """Runs one stage of a model.

    Args:
        group: the ranks that share the stage's layers.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Pipeline,
        group: ProcessGroup,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        super().__init__(config, progress, hooks, group)
        self._pipeline = pipeline

    def _build(self, spec: ModelSpec, **options: Any) -> Decoder:
        pipeline, embeds = self._pipeline, any(hook.embeds for hook in self._features)
        stage, stages = pipeline.stage, pipeline.stages
        return build_stage(spec, stage, stages, pipeline, embeds=embeds, **options)


class LastStage(StageRunner):
    """Runs the last stage, which has the head."""

    def _run(self, sized: SizedModel, graphs: Graphs | None) -> StepRunner:
        return LastStageSteps(sized, graphs, self._pipeline)


class EarlierStage(StageRunner):
    """Runs a stage before the last, without a head.

    Args:
        hooks: hooks that change what comes before the head.
    """

    def __init__(
        self,
        config: EngineConfig,
        pipeline: Pipeline,
        group: ProcessGroup,
        hooks: Sequence[Hook] = (),
    ) -> None:
        super().__init__(config, pipeline, group, hooks=hooks)

    def _size(self, loaded: LoadedModel, num_blocks: tuple[int, ...]) -> SizedModel:
        # Further KV groups are those of draft models, which only the last stage has.
        return EarlierStageMemory(loaded, num_blocks[: len(loaded.groups)], self._features)

    def _run(self, sized: SizedModel, graphs: Graphs | None) -> StepRunner:
        return EarlierStageSteps(sized, graphs, self._pipeline)


def claim_columns(state: BatchState, limits: Limits) -> list[Tensor]:
    """Returns the columns of claims; none if rows have no drafts."""
    return [state.columns[name] for name in ("draft_start", "draft_ids") if limits.drafts]


class LastStageSteps(StepRunner):
    """Sends each step's results to the earlier stages."""

    def __init__(
        self, sized: SizedModel, graphs: CapturedPrograms | None, pipeline: Pipeline
    ) -> None:
        super().__init__(sized, graphs)
        self._pipeline = pipeline

    def _launch_head(self, step: Step, *, wait: bool) -> None:
        super()._launch_head(step, wait=wait)
        if step.logit_start[-1] and not step.waits:
            # Copies, because the next step overwrites the results and the claims.
            rows = step.plan.num_rows
            lanes = self.state.rows.lanes[:rows]
            columns = claim_columns(self.state, self.limits)
            claims = [column[lanes].view(rows, -1) for column in columns]
            self._pipeline.send_results(torch.cat([self.state.results[:rows], *claims], dim=1))


class EarlierStageMemory(SizedModel):
    """The memory of a stage before the last, whose program has no head."""

    def _prepare(self, groups: Sequence[KVGroup]) -> None:
        self.rare = []
        # This stage needs the claims that `Acceptance` keeps, but accepts no tokens.
        acceptance = Acceptance((), Penalties(self.loaded.config.vocab_size))
        self._set_hooks((*self.features, acceptance))
        self._make_state(groups)
        self._make_program(len(groups), acceptance)


@dataclass(frozen=True, slots=True)
class _SampledStep:
    """A step whose results this stage has not received. Arrays are int32 [rows]."""

    step_id: int
    lanes: Int32
    epochs: Int32
    flags: Int32


class EarlierStageSteps(StepRunner):
    """Runs bodies only, and receives the results of the last stage."""

    def __init__(
        self, sized: SizedModel, graphs: CapturedPrograms | None, pipeline: Pipeline
    ) -> None:
        super().__init__(sized, graphs)
        self._pipeline = pipeline
        scheduler = sized.loaded.config.scheduler
        self._depth = scheduler.steps_in_flight
        self._groups = len(sized.loaded.groups)
        self._sampled: deque[_SampledStep] = deque()
        self._epochs = np.zeros(scheduler.max_num_seqs, dtype=np.int32)
        # The last step in which each lane's request got a token.
        self._last_step = np.full(scheduler.max_num_seqs, -1, dtype=np.int64)
        self._uploads = PinnedRing(self.device, self._depth + 1)

    def submit(self, plan: StepPlan) -> None:
        super().submit(msgspec.structs.replace(plan, copies=plan.copies[: self._groups]))

    def _check(self, plan: StepPlan) -> None:
        """Accepts every plan, because the last stage checks plans."""

    def _launch_body(self, plan: StepPlan) -> Step:
        self._receive_results(plan)
        for admit in plan.admits:
            self._epochs[admit.lane] = admit.lane_epoch
            self._last_step[admit.lane] = -1
        if logit_starts(plan)[-1]:
            epochs = self._epochs[plan.lanes]
            self._sampled.append(_SampledStep(plan.step_id, plan.lanes, epochs, plan.flags))
            self._last_step[plan.lanes] = plan.step_id
        return super()._launch_body(plan)

    def _launch_head(self, step: Step, *, wait: bool) -> None:
        step.launched()

    def _receive_results(self, plan: StepPlan) -> None:
        """Receives the results that the plan's rows need, and those of older steps.

        Results that are `steps_in_flight` steps old have already been sent, so receiving them never
        waits.
        """
        generating = (plan.flags & RowFlag.PROMPT) == 0
        needed = int(self._last_step[plan.lanes[generating]].max(initial=-1))
        needed = max(needed, plan.step_id - self._depth)
        while self._sampled and self._sampled[0].step_id <= needed:
            self._receive(self._sampled.popleft())

    def _receive(self, step: _SampledStep) -> None:
        width = self.state.results.shape[1]
        each = [column[:1].numel() for column in claim_columns(self.state, self.limits)]
        shape = len(step.lanes), width + sum(each)
        received = torch.empty(shape, dtype=torch.int32, device=self.device)
        self._pipeline.receive_results(received)
        # Lanes may have got new requests in the meantime.
        rows = np.flatnonzero(step.epochs == self._epochs[step.lanes])
        if not len(rows):
            return
        upload = Upload(self._uploads, self.state.memory)
        prompt = (step.flags[rows] & RowFlag.PROMPT) != 0
        which = upload.add(int32(np.stack([rows, step.lanes[rows], prompt])))
        upload.send()
        row, lane, known = upload[which].view(3, -1).long()
        results, *claims = torch.split(received[row], [width, *each], dim=1)
        accept_results(results, lane, known, self.state.position, self.state.tokens)
        for column, values in zip(claim_columns(self.state, self.limits), claims, strict=True):
            column[lane] = values.view(-1, *column.shape[1:])


def accept_results(
    results: Tensor, lanes: Tensor, known: Tensor, position: Tensor, tokens: Tensor
) -> None:
    """Advances lanes by the results of another stage, like `finish_rows` there.

    Args:
        results: int32 [N, 2 + K], results of rows whose requests still have their lanes.
        lanes: int64 [N], distinct.
        known: int64 [N], 1 for a row of a prompt, whose lane is already past the row.
        position: int32 [M].
        tokens: int32 [M, max_len].
    """
    count, reason, drawn = results[:, 0], results[:, 1], results[:, FIRST_TOKEN:]
    before = position[lanes]
    first = text_position(before) + 1 - known.int()
    number = torch.arange(drawn.shape[1], device=drawn.device)
    kept = number < count.unsqueeze(1)
    # For dropped columns the first token is written again, so that no place gets two values.
    at = torch.where(kept, first.unsqueeze(1) + number, first.unsqueeze(1))
    at = at.long().clamp(0, tokens.shape[1] - 1)
    owner = lanes.unsqueeze(1).expand_as(at)
    again = torch.where(kept[:, :1], drawn[:, :1], tokens[owner[:, :1], at[:, :1]])
    tokens[owner, at] = torch.where(kept, drawn, again)
    ends = (reason > 0) & (reason != BROKEN)
    moved = torch.where(ends, ENDED, first - 1 + count)
    late = (reason == LATE) & (before >= 0)
    stays = torch.where(late, held_position(first - 1), before)
    position[lanes] = torch.where(count > 0, moved, stays)
