"""The third phase of a worker: it runs plans.

A step is one upload, the body, the head, and a later read of the results. Only `collect` waits for
the device. On a CPU each program runs when it is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire import ops
from quire.arrays import Int32, int32
from quire.errors import QuireError
from quire.executor import Answered, Asked, WorkerCall
from quire.input_memory import InputMemory
from quire.plan import Admit, RowFlag, StepPlan, StepResult
from quire.runner.hooks import Level
from quire.runner.program import BodyShape, CapturedPrograms, HeadShape, StepShape
from quire.runner.readback import PinnedRing, Step, Upload, ragged
from quire.runner.sized_model import SizedModel


class StepRunner:
    """Launches steps in the order of their plans, and reads their results.

    Args:
        graphs: the captured programs, or None if programs run op by op.
    """

    def __init__(self, sized: SizedModel, graphs: CapturedPrograms | None = None) -> None:
        loaded = sized.loaded
        self.sized = sized
        self.state, self.cache, self.program = sized.state, sized.cache, sized.program
        self.limits, self.device = loaded.limits, loaded.device
        self.graphs = graphs
        self._policy = loaded.policy
        self._transfer = sized.transfer
        self._pinned = PinnedRing(self.device, loaded.config.scheduler.steps_in_flight + 1)
        self._steps: deque[Step] = deque()
        """Launched steps. The head of the last one may wait for host inputs."""
        self._later: deque[StepPlan] = deque()
        """Plans after a step whose head waits for host inputs."""
        self._levels = np.zeros(self.limits.lanes, dtype=np.int8)
        """The `Level` that each lane's request needs."""
        self._inputs = np.empty(0, dtype=np.int32)
        """The inputs on the device, without the slot, which the device advances."""
        self._turn = 0
        """The slot of `BatchState.ring` of the last body."""
        self._lines: Int32 = self.state.ring.lines.numpy()
        """The slots of `BatchState.ring`."""

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launches a step. If it has GATED rows, its head runs when their inputs come."""
        self._check(plan)
        needed = [
            name
            for name in self.sized.rare
            if any(getattr(admit.params, name) is not None for admit in plan.admits)
        ]
        self.sized.add_rare(needed)
        self._later.append(plan)
        self._advance()

    def _check(self, plan: StepPlan) -> None:
        """Refuses a plan that this runner cannot run correctly."""
        drafted = (plan.flags & RowFlag.PROMPT) == 0
        most = int(plan.q_len[drafted].max(initial=1))
        if most > 1 + self.limits.drafts:
            raise QuireError(
                f"a row has {most - 1} draft tokens, but this runner verifies {self.limits.drafts}"
            )
        for name in plan.writes.keys() - self.state.columns.keys():
            if not any(name in hook.entries for hook in self.sized.features):
                raise QuireError(f"the plan writes to a column {name!r} that no hook keeps")
        if plan.gated and self.sized.gate is None:
            raise QuireError("the plan has GATED rows, but no hook makes a head wait for inputs")

    def _advance(self, *, wait: bool = False) -> None:
        """Launches bodies and heads, up to a head whose host inputs are missing.

        Args:
            wait: wait for the inputs of the first such head.
        """
        with ops.use_policy(self._policy):
            while True:
                if self._steps and self._steps[-1].waits:
                    self._launch_head(self._steps[-1], wait=wait)
                    if self._steps[-1].waits:
                        return
                    wait = False
                if not self._later:
                    return
                step = self._launch_body(self._later.popleft())
                self._steps.append(step)
                self._launch_head(step, wait=False)

    def _launch_body(self, plan: StepPlan) -> Step:
        """Applies the plan and computes its tokens."""
        step = Step.begin(plan, self.device, self._steps[-1] if self._steps else None)
        self._apply(step)
        for hook in self.sized.host_hooks:
            hook.begin(step)
        tokens, longest = plan.num_tokens, int(plan.q_len.max(initial=1))
        if not tokens:
            return step
        altered = any(hook.altered(plan) for hook in self.sized.program_hooks if hook.alters)
        shape = BodyShape(tokens, plan.num_rows, longest, altered)
        captured = None if self.graphs is None else self.graphs.body(shape, plan.skew)
        if self.graphs is not None and captured is not None:
            whole = self._whole(step, captured)
            step.whole = whole is not None
            self.graphs.replay(whole or captured)
        else:
            self.program.body(shape)
        self._turn = (self._turn + 1) % len(self._lines)
        for hook in self.sized.host_hooks:
            hook.hidden(step, self.program.hidden[:tokens])
        return step

    def _whole(self, step: Step, body: BodyShape) -> StepShape | None:
        """Returns the captured program of a step's body and head, which only decodes have."""
        logit_rows = int(step.logit_start[-1])
        if self.graphs is None or body.longest > 1 or not logit_rows:
            return None
        head = self.graphs.head(logit_rows, self._level(step.plan))
        return None if head is None else self.graphs.step(body, head)

    def _level(self, plan: StepPlan) -> Level:
        """Returns the level of the plan's head."""
        lane_level = Level(int(self._levels[plan.lanes].max()))
        return max(lane_level, *(hook.level(plan) for hook in self.sized.host_hooks))

    def _apply(self, step: Step) -> None:
        """Brings the device's state up to date."""
        plan = step.plan
        upload = Upload(self._pinned, self.state.memory)
        self._stage(plan, upload)
        copies = [
            (group, upload.add(each.src), upload.add(each.dst))
            for group, each in enumerate(plan.copies)
            if len(each.src)
        ]
        inputs = self._packed(step)
        if not np.array_equal(inputs[:-1], self._inputs):
            upload.put(self.state.inputs, [0], [len(inputs)], inputs)
            self._inputs = inputs[:-1]
        upload.send()
        # Blocks that leave the device are read before any block is written. Blocks that arrive on
        # the device are written last.
        if self._transfer is not None:
            self._transfer.start(plan.transfers, "out")
        elif plan.transfers:
            raise QuireError(
                f"the plan moves blocks to or from the place {plan.transfers[0].place!r}, but this "
                "worker has none, because no hook opens it"
            )
        for group, src, dst in copies:
            self.cache.copy_blocks(group, upload[src].long(), upload[dst].long())
        if self._transfer is not None:
            self._transfer.start(plan.transfers, "in")

    def _stage(self, plan: StepPlan, upload: Upload) -> None:
        """Adds the plan's changes of lanes, tables and hooks' columns to the upload."""
        state = self.state
        if plan.admits:
            self._stage_admits(plan.admits, upload)
        for table, appends in zip(state.tables, plan.block_appends, strict=False):
            if len(appends.ids):
                starts = ragged(appends.lanes, appends.starts, table.shape[1])
                upload.put(table, starts, appends.counts, appends.ids)
        for name, (lanes, values) in plan.writes.items():
            if name not in state.columns:
                continue
            column = state.columns[name]
            kind = np.float32 if column.dtype == torch.float32 else np.int32
            upload.put_lines(column, lanes, values.astype(kind))
        for hook in self.sized.host_hooks:
            hook.stage(plan, upload)
        for admit in plan.admits:
            levels = (hook.lane_level(admit) for hook in self.sized.host_hooks)
            self._levels[admit.lane] = max(levels, default=Level.PLAIN)

    def _stage_admits(self, admits: Sequence[Admit], upload: Upload) -> None:
        state = self.state
        lanes = int32([admit.lane for admit in admits])
        lengths = int32([len(admit.tokens) for admit in admits])
        least = int32([min(a.prompt_len + a.params.min_tokens, a.max_total) for a in admits])
        upload.put_lines(state.position, lanes, int32([admit.computed for admit in admits]))
        upload.put_lines(state.min_total, lanes, least)
        upload.put_lines(state.max_total, lanes, int32([admit.max_total for admit in admits]))
        starts = ragged(lanes, np.zeros_like(lanes), state.tokens.shape[1])
        upload.put(state.tokens, starts, lengths, np.concatenate([a.tokens for a in admits]))

    def _packed(self, step: Step) -> Int32:
        """Returns a step's `BatchState.inputs`."""
        state, plan, rows = self.state, step.plan, step.plan.num_rows
        packed = state.idle_inputs()
        lanes, query_start, logit_start, flags, *_, turn = state.split_inputs(packed)
        turn[:] = self._turn
        lanes[:rows] = plan.lanes
        np.cumsum(plan.q_len, out=query_start[1 : rows + 1])
        query_start[rows + 1 :] = query_start[rows]
        logit_start[: rows + 1] = step.logit_start
        logit_start[rows + 1 :] = step.logit_start[-1]
        flags[:rows] = plan.flags
        for hook in self.sized.host_hooks:
            hook.pack(plan, packed)
        return packed

    def _launch_head(self, step: Step, *, wait: bool) -> None:
        """Launches the step's head, unless it runs op by op and host inputs are missing."""
        plan, logit_rows, gate = step.plan, int(step.logit_start[-1]), self.sized.gate
        if logit_rows and not step.whole:
            level = self._level(plan)
            captured = None if self.graphs is None else self.graphs.head(logit_rows, level)
            # Within a captured head the device waits for inputs. Op by op it cannot wait, because
            # the first launch of a kernel waits for the device.
            if captured is None and gate is not None:
                step.waits = gate.inputs_missing(plan, wait=wait)
            else:
                step.waits = False
            if step.waits:
                return
            if self.graphs is not None and captured is not None:
                self.graphs.replay(captured)
            else:
                self.program.head(HeadShape(logit_rows, level))
        if logit_rows:
            step.lines = self._lines[self._turn]
        for hook in self.sized.host_hooks:
            hook.launched(step)
        step.launched()
        for hook in self.sized.host_hooks:
            hook.end(step)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Returns the oldest step's result. Waits for the device, and for the step's inputs."""
        if not self._steps:
            raise QuireError("there is no step to collect")
        if self._steps[0].waits:
            self._advance(wait=True)
        step = self._steps.popleft()
        step.wait()
        for hook in self.sized.host_hooks:
            hook.read(step)
        if self._transfer is not None:
            ended = self._transfer.ended(patient=not step.plan.num_rows)
            step.result.finished_transfers, step.result.failed_transfers = ended
        return step.result

    # -- host inputs and calls ------------------------------------------------------------------

    def host_inputs(self) -> InputMemory:
        inputs = None if self.sized.gate is None else self.sized.gate.host_inputs()
        if inputs is None:
            raise QuireError("no hook of this runner takes host inputs")
        return inputs

    def call(self, call: WorkerCall[Asked, Answered], request: Asked) -> Answered:
        """Lets the hook that takes a call answer it."""
        for hook in self.sized.hooks:
            answer: Callable[[Asked], Answered] | None = hook.calls().get(call)
            if answer is not None:
                return answer(request)
        raise QuireError(f"no hook of this worker takes the call {call.name!r}")
