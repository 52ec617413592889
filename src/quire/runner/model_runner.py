"""One rank's worker: runs plans on one device, with one upload, the body, the head, one late read.

Nothing here waits for the device but `collect`. On a CPU the same programs run as they are called.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire import models, ops
from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.executor import FULL_STEP, Capacity, Measurement, OnProgress, StepSeconds
from quire.parallel import ProcessGroup, SingleGroup
from quire.plan import Admit, HeadInputs, KVGroup, RowFlag, StepPlan, StepResult
from quire.runner import memory
from quire.runner.hooks import Hook, Level
from quire.runner.hooks.acceptance import Acceptance
from quire.runner.hooks.penalties import Penalties
from quire.runner.hooks.sampling import Sampling
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, CapturedPrograms, HeadShape, ModelLanes, StepProgram
from quire.runner.readback import PinnedRing, Step, Upload, ragged
from quire.runner.state import BatchState, ColumnSpec, Limits

if TYPE_CHECKING:
    from quire.runner.transfer.places import KVTransfer

logger = logging.getLogger("quire.engine")

_LOGIT_ROWS = 64
"""Logit rows that a step has at least, if rows have drafts and all lanes' drafts need them."""


_CACHED_WEIGHTS = 1 << 24
"""Weights that a CPU's caches may hold."""

_LATE_HOOKS = {"logprobs": "SampledLogprobs", "prompt_logprobs": "PromptLogprobs"}
"""Hooks that few requests need, by the parameter that asks for them, which their module is named
after. Where programs are captured they are there from the start; else the first to ask adds one."""


class ModelRunner:
    """Holds a model, its KV cache and the batch state of one device.

    It is a `Worker`, and by itself the `Executor` of an engine with one rank.
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
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.group = group or SingleGroup()
        self.limits = limits_of(config, hooks)
        self._features = tuple(hooks)
        self._progress = progress
        # Launched, and those behind one that waits for the host.
        self._steps: deque[Step] = deque()
        self._later: deque[StepPlan] = deque()
        self._graphs: CapturedPrograms | None = None
        # What the head must do for each lane's request, a `Level`.
        self._levels = np.zeros(self.limits.lanes, dtype=np.int8)
        self._transfer: KVTransfer | None = None
        self._pinned = PinnedRing(self.device, config.scheduler.steps_in_flight + 1)
        self._seconds: dict[str, float] = {}
        self._policy = ops.Policy(
            deterministic=config.args.deterministic, disabled=frozenset(config.args.disable)
        )

    # -- start ---------------------------------------------------------------------------------

    def start(self) -> Capacity:
        """Takes all steps of a start, as the only rank."""
        self.allocate(self.measure().num_blocks)
        return self.capture()

    def measure(self) -> Measurement:
        """Loads the weights, and finds how much memory is left for the KV cache."""
        began = time.perf_counter()
        self._log_missing_kernels()
        try:
            self._load()
        except RuntimeError as error:
            from quire.models.memory_errors import too_large

            raise too_large(error) from error
        self._models = self.model, *(model for hook in self._features for model in hook.models())
        prepacks = self.device.type == "cpu" and not self._policy.deterministic
        for model in self._models if prepacks else ():
            if sum(parameter.numel() for parameter in model.parameters()) >= _CACHED_WEIGHTS:
                # Smaller models stay in a CPU's caches, where nothing is gained.
                from quire.models.prepack import prepack_weights

                prepack_weights(model)
        head_dims = [size for model in self._models for size in model.spec.head_dims]
        self._kv_format = ops.kv_format(self.config.kv_cache_dtype, self.dtype, *head_dims)
        groups, first = list[KVGroup](), 0
        for model in self._models:
            groups += model.kv_groups(self.config.block_size, self._kv_format, first)
            first += len(model.layers)
        self._groups = tuple(groups)
        budget, drafts = self._cache_budget(groups), self.limits.drafts
        blocks = memory.blocks_per_group(self.config, groups, budget, drafts)
        self._seconds["weights"] = time.perf_counter() - began
        return Measurement(self._groups, blocks)

    def allocate(self, num_blocks: tuple[int, ...]) -> None:
        """Makes the KV cache, of so many blocks of each group, and the batch state."""
        self.cache = KVCache(
            self._groups,
            num_blocks,
            layouts=[layout for model in self._models for layout in model.kv_layouts],
            kv_format=self._kv_format,
            device=self.device,
            head_scales=self._head_scales(self._kv_format),
        )
        self._num_blocks = num_blocks
        if self.config.args.host_cache_gb or self.config.args.kv_peers is not None:
            # Few engines have other places for blocks.
            from quire.runner.transfer.places import open_places

            self._transfer = open_places(self.config, self.cache, self._models, self.group)
        self._prepare(self._groups)

    def capture(self) -> Capacity:
        """Captures all graphs where there are any, and says what there is."""
        full = FULL_STEP
        if self.device.type == "cuda" and not self.config.eager:
            began = time.perf_counter()
            full = self._capture()
            self._seconds["graphs"] = time.perf_counter() - began
        step_seconds: StepSeconds = {}
        with ops.use_policy(self._policy):
            for hook in self._features:
                step_seconds |= hook.seconds(self.program, self._graphs)
        return Capacity(
            self._groups,
            self._num_blocks,
            host_blocks=() if self._transfer is None else self._transfer.slots,
            seconds=self._seconds,
            full_step=full,
            logit_rows=self.limits.logit_rows,
            drafts=self.limits.drafts,
            step_seconds=step_seconds,
        )

    def _log_missing_kernels(self) -> None:
        """Says at the start which kernels of this card the installed Triton does not run."""
        if self.device.type != "cuda" or self.group.rank != 0:
            return
        from quire.ops.triton.launch import gluon_missing, traits

        missing = gluon_missing()
        if traits(self.device).capability == (9, 0) and missing is not None:
            logger.warning("%s", missing)

    def _load(self) -> None:
        path = Path(self.config.model_path)
        config = models.load_config(path)
        spec = models.spec_from_config(config)
        quantization = models.model_quantization(path, config, spec, self.config.args.quantization)
        self.model = self._build(
            spec, device=self.device, dtype=self.dtype, group=self.group,
            quantization=quantization, expert_parallel=self.config.args.enable_expert_parallel,
            drafts=self.limits.drafts,
        )  # fmt: skip
        args, progress = self.config.args, self._told("weights")
        models.load_weights(self.model, path, args.load_format, args.seed, progress)
        for hook in self._features:
            hook.attach(self.model)

    def _build(self, spec: models.ModelSpec, **how: Any) -> models.Decoder:
        """Returns the model that this worker runs. how: see `build_model`."""
        return models.build_model(spec, **how)

    def _prepare(self, groups: Sequence[KVGroup]) -> None:
        """Makes the batch state, and the program over it."""
        config = self.config
        penalties = Penalties(config.vocab_size)
        acceptance = Acceptance(config.eos_token_ids, penalties)
        self.hooks: tuple[Hook, ...] = penalties, *self._features, Sampling(), acceptance
        columns = [column for hook in self.hooks for column in hook.columns(self.limits)]
        columns += [ColumnSpec(f"num_{name}", fill=-1) for name in _LATE_HOOKS]
        self.state = BatchState(self.limits, groups, self.device, columns)
        for hook in self.hooks:
            hook.bind(self.state)
        for hook in self._features:
            hook.take_cache(self.cache)
        own = range(len(self.model.kv_layouts))
        lanes = ModelLanes(self.model, self.state, self.cache.layers, own, self.state.position)
        self.program = StepProgram(lanes, self.hooks, acceptance.claims)
        self._late = list(_LATE_HOOKS)

    def _add_late(self, names: Sequence[str]) -> None:
        for name in names:
            module = importlib.import_module(f"quire.runner.hooks.{name}")
            hook: Hook = getattr(module, _LATE_HOOKS[name])()
            hook.attach(self.model)
            hook.bind(self.state)
            self._late.remove(name)
            self.hooks = self.program.hooks = (*self.hooks, hook)

    @torch.inference_mode()
    def _capture(self) -> int:
        """Captures all programs. Returns the tokens of a full step."""
        # There are graphs only where there is a GPU.
        from quire.runner.graphs import Graphs

        self._add_late(tuple(self._late))
        self.state.inputs.copy_(torch.from_numpy(self.state.idle_inputs()))
        self._graphs = graphs = Graphs(self.device, self.limits)
        with ops.use_policy(self._policy):
            return graphs.capture_steps(self.program, self.hooks, self._told("graphs"))

    def add_hook(self, hook: Hook) -> None:
        """Takes in one more hook, from the next plan on.

        Raises:
            QuireError: programs are captured already, or it keeps columns.
        """
        if self._graphs is not None or tuple(hook.columns(self.limits)):
            raise QuireError(f"{type(hook).__name__} must be known when the runner starts")
        hook.bind(self.state)
        behind = self.hooks[1 + len(self._features) :]
        self._features = tuple(sorted((*self._features, hook), key=lambda each: each.draws))
        self.hooks = (self.hooks[0], *self._features, *behind)
        self.program.hooks = self.hooks

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        return None if self._progress is None else functools.partial(self._progress, what)

    def _head_scales(self, kv_format: ops.KVFormat) -> Sequence[torch.Tensor] | None:
        if kv_format.scales != "head":
            return None
        # Only one format has scales that come with the checkpoint.
        from quire.models.kv_scales import all_head_scales

        path, load_format = Path(self.config.model_path), self.config.args.load_format
        return all_head_scales(self._models, path, load_format)

    def _cache_budget(self, groups: Sequence[KVGroup]) -> int | None:
        if self.device.type != "cuda":
            return memory.cpu_budget(self.config)
        # A CPU needs none of it.
        from quire.runner.memory import cache_budget

        return cache_budget(self.config, self.model, groups, self.device)

    # -- a step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launches a step. The head of one with GATED rows runs when its masks come."""
        self._check(plan)
        asked = [
            n for n in self._late if any(getattr(a.params, n) is not None for a in plan.admits)
        ]
        self._add_late(asked)
        self._later.append(plan)
        self._advance()

    def _check(self, plan: StepPlan) -> None:
        """Refuses what this runner would get wrong."""
        drafted = (plan.flags & RowFlag.PROMPT) == 0
        most = int(plan.q_len[drafted].max(initial=1))
        if most > 1 + self.limits.drafts:
            raise QuireError(
                f"a row has {most - 1} draft tokens, but this runner verifies {self.limits.drafts}"
            )
        for name in plan.writes.keys() - self.state.columns.keys():
            if not any(name in hook.entries for hook in self._features):
                raise QuireError(f"the plan writes to a column {name!r} that no hook keeps")
        if plan.gated and not self._gate.gates:
            raise QuireError("the plan has GATED rows, but no hook lets a head wait")

    def _advance(self, *, wait: bool = False) -> None:
        """Launches what can be. A head that the host must bring masks for holds up all behind it;
        with `wait`, the first such head is waited for."""
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
        step = Step.of(plan, self.device)
        self._apply(step)
        for hook in self._features:
            hook.begin(step)
        tokens, longest = plan.num_tokens, int(plan.q_len.max(initial=1))
        if not tokens:
            return step
        altered = any(hook.altered(plan) for hook in self._features)
        shape = BodyShape(tokens, plan.num_rows, longest, altered)
        captured = None if self._graphs is None else self._graphs.body(shape)
        if self._graphs is not None and captured is not None:
            self._graphs.replay(captured)
        else:
            self.program.body(shape)
        for hook in self.hooks:
            hook.hidden(step, self.program.hidden[:tokens])
        return step

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
        upload.put(self.state.inputs, [0], [len(inputs)], inputs)
        upload.send()
        # What goes out goes before anything is written, what comes in after everything.
        if self._transfer is not None:
            self._transfer.start(plan.transfers, "out")
        elif plan.transfers:
            raise QuireError("this runner has no other place to move blocks to")
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
        for hook in self.hooks:
            hook.stage(plan, upload)
        for admit in plan.admits:
            self._levels[admit.lane] = max(hook.lane_level(admit) for hook in self.hooks)

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
        lanes, query_start, logit_start, flags, *_ = state.split_inputs(packed)
        lanes[:rows] = plan.lanes
        np.cumsum(plan.q_len, out=query_start[1 : rows + 1])
        query_start[rows + 1 :] = query_start[rows]
        logit_start[: rows + 1] = step.logit_start
        logit_start[rows + 1 :] = step.logit_start[-1]
        flags[:rows] = plan.flags
        for hook in self._features:
            hook.pack(plan, packed)
        return packed

    def _launch_head(self, step: Step, *, wait: bool) -> None:
        """Launches the step's head, unless masks are missing that the device cannot wait for."""
        plan, logit_rows = step.plan, int(step.logit_start[-1])
        if logit_rows:
            asked = Level(int(self._levels[plan.lanes].max()))
            level = max(asked, *(hook.level(plan) for hook in self.hooks))
            captured = None if self._graphs is None else self._graphs.head(logit_rows, level)
            # A kernel's first launch waits for the device, which would wait for the masks.
            step.waits = captured is None and self._gate.lacks(plan, wait=wait)
            if step.waits:
                return
            if self._graphs is not None and captured is not None:
                self._graphs.replay(captured)
            else:
                self.program.head(HeadShape(logit_rows, level))
            step.send("results", self.state.results[: plan.num_rows])
        for hook in self.hooks:
            hook.launched(step)
        step.launched()
        for hook in self._features:
            hook.end(step)

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Returns the oldest step's result; waits for the device, and for the step's masks."""
        if not self._steps:
            raise QuireError("there is no step to collect")
        if self._steps[0].waits:
            self._advance(wait=True)
        step = self._steps.popleft()
        step.wait()
        for hook in self.hooks:
            hook.read(step)
        if self._transfer is not None:
            ended = self._transfer.ended(patient=not step.plan.num_rows)
            step.result.finished_transfers, step.result.failed_transfers = ended
        return step.result

    # -- everything else -----------------------------------------------------------------------

    @property
    def _gate(self) -> Hook:
        """The hook that can make heads wait for the host, or one that does nothing."""
        return next((hook for hook in self._features if hook.gates), Hook())

    def mask_room(self, step_id: int, rows: int) -> Int32:
        room = self._gate.room(step_id, rows)
        if room is None:
            raise QuireError("no hook of this runner takes masks")
        return room

    def claimed(self, step_id: int, *, wait: bool) -> tuple[Int32, Int32] | None:
        return self._gate.claimed(step_id, wait=wait)

    def submit_head(self, inputs: HeadInputs) -> None:
        self._gate.bring(inputs)

    def control(self, message: dict[str, Any]) -> Any:
        """Asks the places of blocks, then the hooks; the first answer that is not None counts."""
        for part in (self._transfer, *self.hooks):
            answer = None if part is None else part.on_control(message)
            if answer is not None:
                return answer
        raise QuireError(f"unknown control message {message.get('op')!r}")

    def shutdown(self) -> None:
        """Gives the device's memory back. Idempotent."""
        for hook in self._features:
            hook.close()
        self._features = self._models = ()
        self._steps.clear()
        self._later.clear()
        self._graphs = None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        for name in ("model", "cache", "state", "program", "hooks"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            # Graphs and what they were captured from refer to each other.
            gc.collect()
            torch.cuda.empty_cache()


def limits_of(config: EngineConfig, hooks: Sequence[Hook]) -> Limits:
    """Returns the most that steps of an engine with these hooks may hold."""
    scheduler = config.scheduler
    lanes, drafts = scheduler.max_num_seqs, max((hook.drafts for hook in hooks), default=0)
    return Limits(
        lanes=lanes,
        tokens=scheduler.max_num_batched_tokens,
        # With many lanes there are few drafts for each, so that heads stay small.
        logit_rows=min(lanes * (1 + drafts), max(2 * lanes, _LOGIT_ROWS)) if drafts else lanes,
        length=scheduler.max_model_len,
        drafts=drafts,
    )
