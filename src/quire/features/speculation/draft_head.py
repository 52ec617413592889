"""A draft head: layers that draft from the target's hidden states.

A pair is the target's hidden state at a position and the token that follows. Both are known after
each step's head, and the draft head then computes the pairs of the step's rows. So it is as far as
the target, and the next step's first draft can be drawn from its output. Pairs of further drafts
use the draft head's own hidden states. When these drafts are accepted, pairs with the target's
hidden states replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.features.speculation.drafter import DRAFT_ROWS, Drafter, begin_drafts, program_name
from quire.features.speculation.settings import SpeculationSettings
from quire.layers.build import Build
from quire.models import Decoder
from quire.models.draft_heads import DraftHead
from quire.models.draft_heads.eagle3 import load_eagle3
from quire.models.draft_heads.mtp import load_mtp
from quire.models.stages import StageDecoder
from quire.ops.rows import PROMPT, Drafts, StepRows
from quire.plan import StepPlan
from quire.quantization import Quantization
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, BoundModel
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState

DRAFT_PAIRS = "draft_pairs"
"""Entry of `StepPlan.writes`: the step's pairs must be computed. Its contents have no meaning."""


class HeadDrafter(Drafter):
    """Drafts with a draft head. With several ranks its layers are sharded like the target's.

    The last pair of a cached prefix may have been computed with the next token of another request,
    because its block is shared. That lowers acceptance, but changes no token.
    """

    entries = frozenset({DRAFT_ROWS, DRAFT_PAIRS})
    embeds = True

    def __init__(self, config: EngineConfig, settings: SpeculationSettings) -> None:
        super().__init__(config, settings)
        self._pairs = False

    # -- start ---------------------------------------------------------------------------------

    def attach(self, model: Decoder) -> None:
        self._target = model

    def models(self) -> Sequence[DraftHead]:
        target = self._target

        def build(quantization: Quantization) -> Build:
            return Build(
                group=target.group,
                quantization=quantization,
                device=target.device,
                dtype=target.dtype,
                expert_parallel=self._config.args.enable_expert_parallel,
            )

        try:
            self._head = self._load(build).eval()
        except ConfigError as error:
            raise ConfigError(f"speculative: the draft head: {error}", "speculative") from None
        return (self._head,)

    def _load(self, build: Callable[[Quantization], Build]) -> DraftHead:
        args, settings = self._config.args, self._settings
        load_format, seed = args.load_format, args.seed + 1
        if settings.source == "eagle3" and settings.model is not None:
            return load_eagle3(
                settings.model, self._target, build, load_format=load_format, seed=seed
            )
        folder, wanted = Path(self._config.model_path), args.quantization
        return load_mtp(
            folder, self._target, build, wanted=wanted, load_format=load_format, seed=seed
        )

    def bind(self, state: BatchState) -> None:
        super().bind(state)
        head, limits = self._head, state.limits
        options: dict[str, Any] = {"dtype": head.dtype, "device": state.device}
        width = head.spec.hidden_size
        # The target's hidden states in the latest body.
        self._tapped = torch.zeros(limits.tokens, head.tapped, **options)
        # The output from which each lane's next draft is drawn. The last row belongs to no lane.
        self._kept = torch.zeros(limits.lanes + 1, width, **options)
        # The outputs of the rows of the latest pass.
        self._given = torch.zeros(limits.lanes, width, **options)
        # The step's rows without logits.
        self._step_rows = state.rows._replace(logit_start=torch.zeros_like(state.rows.logit_start))
        nobody = self._position.new_zeros(limits.lanes + 1)
        self._pairs_used = Drafts(*self._claims[:2], nobody)
        self._begun = torch.zeros_like(self._position)
        self._pass_position = torch.zeros_like(self._position)
        self._tap()

    def _tap(self) -> None:
        """Makes the target store the hidden states that the head reads."""
        taps, width = self._head.taps, self._target.spec.hidden_size

        def keep(index: int, module: Any, inputs: Any, given: Any) -> None:
            hidden = given if isinstance(given, Tensor) else given.total()
            self._tapped[: len(hidden), index * width : (index + 1) * width] = hidden

        if not taps:
            self._target.register_forward_hook(functools.partial(keep, 0))
        if isinstance(self._target, StageDecoder):

            def keep_stream(layer: int, stream: Tensor) -> None:
                for index in [i for i, count in enumerate(taps) if count == layer]:
                    keep(index, None, (), stream)

            self._target.tap(taps, keep_stream)
            return
        for index, count in enumerate(taps):
            layer = self._target.layers[count - 1]
            layer.register_forward_hook(functools.partial(keep, index))

    def take_cache(self, cache: KVCache) -> None:
        state, head = self._state, self._head
        own = len(head.kv_layouts)
        layers = cache.layers[-len(head.layers) :]
        groups = range(len(state.groups) - own, len(state.groups))
        self._bound = BoundModel(head, state, layers, groups, self._begun, ahead=1)
        self._bound_passes = replace(self._bound, position=self._pass_position)

    # -- programs ------------------------------------------------------------------------------

    def body(self, rows: StepRows, tokens: int, altered: bool) -> None:
        self._begun.copy_(self._state.position)

    def _compute_pairs(self, shape: BodyShape) -> None:
        """Computes the pairs of the latest step's rows."""
        state, used = self._state, self._pairs_used
        rows = self._step_rows.first(shape.rows)
        # Only positions that stay in the text have a next token: rejected drafts make no pair.
        q_len = rows.query_start[1:] - rows.query_start[:-1]
        prompt = (rows.flags & PROMPT) != 0
        behind = torch.where(prompt, q_len, state.results[: shape.rows, 0]).sub_(1).clamp_(min=0)
        lanes = torch.where(rows.lanes < 0, state.limits.lanes, rows.lanes).long()
        used.used.index_copy_(0, lanes, behind)
        hidden = self._head.combine(self._tapped[: shape.tokens])
        given = self._bound.forward(rows, self._no_logits, shape, drafts=used, hidden=hidden)
        places = (rows.query_start[:-1] + behind).clamp_(max=len(given) - 1)
        self._kept.index_copy_(0, lanes, given.index_select(0, places))

    def first_pass(self, shape: BodyShape, truncates: bool) -> None:
        drafting, passes, state = self._drafting, self._passes, self._state
        self._position.copy_(state.position)
        begin_drafts(
            drafting.lanes, drafting.counts, drafting.query_start, state.position, self._position,
            self._own_used.used, self._claims, passes,
        )  # fmt: skip
        lanes = drafting.lanes[: shape.rows]
        kept = self._kept.index_select(0, torch.where(lanes < 0, len(self._kept) - 1, lanes))
        self._given[: shape.rows] = kept
        self.draw(kept, truncates)

    def next_pass(self, shape: BodyShape, truncates: bool) -> None:
        # The last draft is the second part of a pair at the position before it.
        torch.sub(self._position, 1, out=self._pass_position)
        given = self._bound_passes.forward(
            self._pass_rows.first(shape.rows),
            self._no_logits,
            shape,
            hidden=self._given[: shape.tokens],
        )
        self._given[: shape.tokens] = given
        self.draw(given, truncates)

    def pass_logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def first_shapes(self, shapes: Sequence[BodyShape]) -> Sequence[BodyShape]:
        return [shape for shape in shapes if shape.longest == 1]

    def programs(self) -> Mapping[str, Callable[[], None]]:
        found = dict(super().programs())
        for shape in self._buckets.bodies():
            run = functools.partial(self._compute_pairs, shape)
            found[program_name("pairs", shape)] = run
        return found

    def passes(self) -> Mapping[str, Mapping[int, Callable[[], None]]]:
        shapes = {rows: self.launch_shape(rows, rows, 1) for rows in self.timed_rows()}
        return {
            "draft": {n: functools.partial(self.run_next, shape) for n, shape in shapes.items()},
            "first": {n: functools.partial(self.run_first, shape) for n, shape in shapes.items()},
        }

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        super().stage(plan, upload)
        self._pairs = DRAFT_PAIRS in plan.writes

    def end(self, step: Step) -> None:
        plan = step.plan
        if self._pairs and plan.num_rows:
            shape = self.launch_shape(plan.num_tokens, plan.num_rows, int(plan.q_len.max()))
            self.run(program_name("pairs", shape), functools.partial(self._compute_pairs, shape))
        super().end(step)
