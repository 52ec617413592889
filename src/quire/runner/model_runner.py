"""Runs plans: one upload, the body, the head, one late read.

Nothing here waits for the device but `collect`. On a CPU the same code runs as it is called.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32
from quire.config import EngineConfig
from quire.errors import QuireError
from quire.executor import FULL_STEP, Capacity, OnProgress
from quire.models import (
    Decoder,
    build_model,
    head_scales,
    load_config,
    load_weights,
    spec_from_config,
)
from quire.plan import HeadInputs, KVGroup, RowFlag, StepPlan, StepResult
from quire.runner import memory
from quire.runner.batch_state import BatchState
from quire.runner.eager_head import HEAD_ELEMENTS, EagerHead, index_on, sampled_logprobs
from quire.runner.gate import DeviceGate, HostGate
from quire.runner.hook import Hook
from quire.runner.kv_cache import KVCache
from quire.runner.kv_transfer import KVTransfer, open_transfer
from quire.runner.results import mark, read_back, result
from quire.runner.sampling import Sampler
from quire.runner.staging import Staging, Upload
from quire.runner.step import Step

if TYPE_CHECKING:  # Triton is needed only where graphs are
    from quire.runner.cuda_graphs import StepGraphs


class ModelRunner:
    """Holds a model, its KV cache and the batch state of one device."""

    def __init__(
        self,
        config: EngineConfig,
        progress: OnProgress | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.hooks = tuple(hooks)
        self._progress = progress
        # Launched, and those behind one that waits for the host.
        self._steps: deque[Step] = deque()
        self._later: deque[StepPlan] = deque()
        self._graphs: StepGraphs | None = None
        self._transfer: KVTransfer | None = None
        depth = config.scheduler.steps_in_flight + 1
        self._staging = Staging(self.device, depth)
        words = -(-config.vocab_size // 32)
        self._gate: HostGate | DeviceGate = HostGate(words)
        if self.device.type == "cuda":
            self._gate = DeviceGate(self.device, depth, config.scheduler.max_num_seqs, words)
        self._policy = ops.Policy(
            deterministic=config.args.deterministic, disabled=frozenset(config.args.disable)
        )

    # -- start ---------------------------------------------------------------------------------

    def start(self) -> Capacity:
        """Loads the weights and takes the memory that is left for the KV cache."""
        spec = spec_from_config(load_config(Path(self.config.model_path)))
        began = time.perf_counter()
        self.model = build_model(spec, device=self.device, dtype=self.dtype)
        load_weights(
            self.model,
            Path(self.config.model_path),
            load_format=self.config.args.load_format,
            seed=self.config.args.seed,
            progress=self._told("weights"),
        )
        head_dim = spec.attention.head_dim
        form = ops.kv_format(self.config.kv_cache_dtype, self.dtype, head_dim)
        groups = self.model.kv_groups(self.config.block_size, form)
        limits = self.config.scheduler
        blocks = memory.blocks_per_group(self.config, groups, self._cache_budget(groups))
        seconds = {"weights": time.perf_counter() - began}
        self.cache = KVCache(
            groups,
            blocks,
            kv_heads=self.model.local_kv_heads,
            head_dim=head_dim,
            form=form,
            device=self.device,
            head_scales=self._head_scales(form),
        )
        self._transfer = open_transfer(self.config, self.cache, blocks)
        self.state = BatchState(limits.max_num_seqs, limits.max_model_len, groups, self.device)
        for hook in self.hooks:
            for column in hook.columns():
                self.state.add(column)
        self.sampler = Sampler(self.state, self.config.vocab_size, self.config.eos_token_ids)
        self._eager = EagerHead(self.model, self.state, self.sampler, self.hooks)
        full = FULL_STEP
        if self.device.type == "cuda" and not self.config.eager:
            began = time.perf_counter()
            with ops.use_policy(self._policy):
                full = self._capture()
            seconds["graphs"] = time.perf_counter() - began
        slots = 0 if self._transfer is None else self._transfer.pool.slots
        return Capacity(groups, blocks, host_blocks=slots, seconds=seconds, full_step=full)

    def _capture(self) -> int:
        """Returns the tokens of a full step."""
        from quire.runner.cuda_graphs import StepGraphs, full_step

        most = self.config.scheduler.max_num_batched_tokens
        self._graphs = StepGraphs(self.model, self.cache, self.state, self.sampler, most)
        self._graphs.capture(self._told("graphs"))
        return full_step(self._graphs.seconds, most)

    def _told(self, what: str) -> Callable[[int, int], None] | None:
        return None if self._progress is None else functools.partial(self._progress, what)

    def _head_scales(self, form: ops.KVFormat) -> Tensor | None:
        if form.scales != "head":
            return None
        path, load_format = Path(self.config.model_path), self.config.args.load_format
        return head_scales(self.model, path, load_format)

    def _cache_budget(self, groups: Sequence[KVGroup]) -> int | None:
        if self.device.type != "cuda":
            return memory.cpu_budget(self.config)
        reserve = self._activation_bytes(self.model)
        budget = memory.cuda_budget(self.config, self.device, reserve)
        return budget - memory.staging_bytes(self.config, groups, budget)

    def _activation_bytes(self, model: Decoder) -> int:
        """An upper bound of what a step needs beside weights and cache: the widest layer's
        intermediates for the token budget, and logits with their copies while sampling."""
        limits, spec = self.config.scheduler, model.spec
        attention = spec.attention
        heads = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        widest = 2 * (heads + attention.heads * attention.head_dim) + 3 * spec.mlp.width
        body = limits.max_num_batched_tokens * (4 * spec.hidden_size + widest) * 4
        # Logits with their copies, and the sampler's token counts.
        head = 8 * max(limits.max_num_seqs * spec.vocab_size, HEAD_ELEMENTS) * 4
        return body + head + (1 << 30)

    # -- a step --------------------------------------------------------------------------------

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Launches a step. The head of one with GATED rows runs when its masks come."""
        _check(plan)
        self._later.append(plan)
        self._go_on()

    def mask_room(self, step_id: int, rows: int) -> Int32:
        return self._gate.room(step_id, rows)

    def submit_head(self, inputs: HeadInputs) -> None:
        """The masks of a step that was, or is about to be, submitted. From any thread."""
        self._gate.give(inputs.step_id, inputs.mask)

    def _go_on(self, *, wait: bool = False) -> None:
        """Launches what can be. A head that the host must bring masks for holds up all behind it;
        with `wait`, the first such head is waited for."""
        with ops.use_policy(self._policy):
            while True:
                if self._steps and self._steps[-1].waits:
                    self._finish(self._steps[-1], wait=wait)
                    if self._steps[-1].waits:
                        return
                    wait = False
                if not self._later:
                    return
                step = self._launch(self._later.popleft())
                self._steps.append(step)
                self._finish(step, wait=False)

    def _launch(self, plan: StepPlan) -> Step:
        """The step up to its head."""
        started = mark(self.device)
        if self._graphs is not None and self._graphs.fits(plan):
            step = self._replay_body(self._graphs, plan)
        else:
            step = self._apply(plan)
            self._body(step)
        step.started = started
        return step

    def _finish(self, step: Step, *, wait: bool) -> None:
        """The step's head, unless masks are missing that the device cannot wait for by itself."""
        masks = None
        if step.plan.gated:
            masks = self._masks(step, wait)
            step.waits = masks is None
            if masks is None:
                return
        if self._graphs is not None and step.replayed:
            self._replay_head(self._graphs, step, masks)
        else:
            self._eager.run(step, masks)
        read_back(step, self.device)

    def _masks(self, step: Step, wait: bool) -> Tensor | None:
        plan = step.plan
        count = int(((plan.flags & RowFlag.GATED) != 0).sum())
        if step.replayed and not (self.sampler.logprobs[plan.lanes] >= 0).any():
            masks = self._gate.queue(plan.step_id, count)
            if masks is not None:
                return masks
        return self._gate.take(plan.step_id, count, wait=wait)

    def _replay_body(self, graphs: StepGraphs, plan: StepPlan) -> Step:
        """The body as a graph, and the head too, unless a row wants more of it than graphs give."""
        upload = self._staging.begin()
        inputs = upload.add(graphs.pack(plan))
        copies = self._stage(plan, upload)
        upload.send()
        self._place_blocks(plan, copies, upload)
        graphs.inputs.copy_(upload[inputs])
        first = self.state.grow(plan)
        body = graphs.body(plan)
        step = Step(plan, body.batch, first)
        scores = (self.sampler.prompt_logprobs[plan.lanes] >= 0).any()
        step.replayed = not scores and not any(hook.wants(plan) for hook in self.hooks)
        if not step.replayed:
            step.hidden = body.hidden
            self.state.locate(step, graphs.inputs[: plan.num_rows])
        elif plan.gated:
            graphs.scores(plan.num_rows)
        return step

    def _replay_head(self, graphs: StepGraphs, step: Step, masks: Tensor | None) -> None:
        plan = step.plan
        if masks is not None:
            graphs.mask[: len(masks)].copy_(masks)
        kind = self.sampler.head_kind(plan.lanes)
        head = graphs.head(plan.num_rows, kind, masked=masks is not None)
        step.results = head.results
        rows = step.sampled_rows
        wanted = self.sampler.logprobs[plan.lanes[rows]]
        asked = np.flatnonzero(wanted >= 0)
        if head.logits is None or not len(asked):
            return
        where = index_on(self.device, rows[asked])
        # The head has moved the lanes on: they stand where their new token is.
        length = self.state.position[graphs.inputs[where].long()]
        raw, tokens = head.logits[where].float(), head.results[0][where]
        sampled_logprobs(step, rows[asked], raw, tokens, length, wanted[asked])

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """The oldest step's result; waits for the device, and for the step's masks."""
        if not self._steps:
            raise QuireError("there is no step to collect")
        if self._steps[0].waits:
            self._go_on(wait=True)
        step = self._steps.popleft()
        found = result(step, self.device)
        if self._transfer is not None:
            ended = self._transfer.ended(patient=not step.plan.num_rows)
            found.finished_transfers, found.failed_transfers = ended
        return found

    def _apply(self, plan: StepPlan) -> Step:
        upload = self._staging.begin()
        copies = self._stage(plan, upload)
        build = self.state.expand(plan, upload)
        upload.send()
        self._place_blocks(plan, copies, upload)
        step = build()
        if plan.num_rows:
            for hook in self.hooks:
                hook.before_body(step)
        return step

    def _stage(self, plan: StepPlan, upload: Upload) -> list[tuple[int, int, int]]:
        """Adds the plan's changes to the upload. Returns its block copies: group, and where the
        upload holds sources and destinations."""
        self.state.stage(plan, upload)
        self.sampler.stage(plan, upload)
        return [
            (group, upload.add(copies.src), upload.add(copies.dst))
            for group, copies in enumerate(plan.copies)
            if len(copies.src)
        ]

    def _place_blocks(
        self, plan: StepPlan, copies: list[tuple[int, int, int]], upload: Upload
    ) -> None:
        """What goes out goes before anything is written, what comes in after everything."""
        if plan.transfers and self._transfer is None:
            raise QuireError("this runner has no other place to move blocks to")
        if self._transfer is not None:
            self._transfer.start(plan.transfers, "out")
        for group, src, dst in copies:
            self.cache.copy_blocks(group, upload[src].long(), upload[dst].long())
        if self._transfer is not None:
            self._transfer.start(plan.transfers, "in")

    def _body(self, step: Step) -> None:
        if step.plan.num_rows:
            step.hidden = self.model(step.batch, self.cache.layers)

    # -- everything else -----------------------------------------------------------------------

    def control(self, message: dict[str, Any]) -> Any:
        """Asks the hooks, in order; the first answer that is not None counts."""
        if self._transfer is not None and message.get("op") == "disk_keys":
            return self._transfer.disk_keys()
        for hook in self.hooks:
            answer = hook.on_control(message)
            if answer is not None:
                return answer
        raise QuireError(f"unknown control message {message.get('op')!r}")

    def shutdown(self) -> None:
        """Gives the device's memory back. Idempotent."""
        self._gate.open()
        self._steps.clear()
        self._later.clear()
        self._graphs = None
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        for name in ("model", "cache", "state", "sampler", "_eager"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _check(plan: StepPlan) -> None:
    if ((plan.q_len > 1) & ((plan.flags & RowFlag.PROMPT) == 0)).any():
        raise QuireError("this runner verifies no draft tokens")
