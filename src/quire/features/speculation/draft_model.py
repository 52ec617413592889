"""A second model that drafts.

It runs over the same lanes as the target, with KV groups, layers and a position of its own. Its
first pass computes the missing positions up to the last known token. After the step's head it
computes chunks: of prompts, and of texts where it lags the target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import int32
from quire.config import EngineConfig
from quire.features.speculation.drafter import (
    DRAFT_ROWS,
    Drafter,
    DraftLaunch,
    begin_drafts,
    program_name,
    row_parts,
)
from quire.features.speculation.settings import SpeculationSettings
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.ops.rows import PROMPT, StepRows
from quire.plan import StepPlan
from quire.runner.graphs import SHORT_ROW
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, BoundModel
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits

DRAFT_CHUNKS = "draft_chunks"
"""Entry of `StepPlan.writes`. By lane: the tokens of a chunk."""


class DraftModel(Drafter):
    """Drafts with a second model. With several ranks each rank has the whole model, so all make the
    same drafts."""

    entries = frozenset({DRAFT_ROWS, DRAFT_CHUNKS})

    def __init__(self, config: EngineConfig, settings: SpeculationSettings) -> None:
        super().__init__(config, settings)
        self._chunks: DraftLaunch | None = None

    # -- start ---------------------------------------------------------------------------------

    def models(self) -> Sequence[Decoder]:
        path, args = self._settings.model, self._config.args
        if path is None:
            return ()
        config = load_config(path)
        spec = spec_from_config(config)
        quantization = model_quantization(path, config, spec, self._settings.quantization)
        self._model = build_model(
            spec,
            device=self._config.device,
            dtype=getattr(torch, self._config.dtype),
            quantization=quantization,
        )
        load_weights(self._model, path, args.load_format, args.seed + 1)
        return (self._model,)

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        return *super().columns(limits), ColumnSpec("draft_chunk_words", (4,))

    def bind(self, state: BatchState) -> None:
        super().bind(state)
        lanes = state.limits.lanes
        self._chunk_words = state.columns["draft_chunk_words"]
        self._chunk_words.view(-1)[:lanes] = -1
        chunk_lanes, chunk_flags, chunk_start = row_parts(self._chunk_words, lanes)
        nothing = torch.zeros(lanes + 1, dtype=torch.int32, device=state.device)
        self._chunk_rows = StepRows(chunk_lanes, chunk_start, nothing, chunk_flags)

    def take_cache(self, cache: KVCache) -> None:
        state, own = self._state, len(self._model.kv_layouts)
        self._bound = BoundModel(
            self._model,
            state,
            cache.layers[-len(self._model.layers) :],
            range(len(state.groups) - own, len(state.groups)),
            self._position,
        )
        options = {"dtype": self._model.dtype, "device": state.device}
        width = self._model.spec.hidden_size
        self._last = torch.zeros(1, width, **options)  # type: ignore[call-overload]

    # -- programs ------------------------------------------------------------------------------

    def first_pass(self, shape: BodyShape, truncates: bool) -> None:
        """Computes the missing positions of the rows' texts, and draws their first drafts."""
        drafting, passes = self._drafting, self._passes
        begin_drafts(
            drafting.lanes, drafting.counts, drafting.query_start, self._state.position,
            self._position, self._own_used.used, self._claims, passes,
        )  # fmt: skip
        rows = self._first_rows.first(shape.rows)
        hidden = self._bound.forward(rows, self._no_logits, shape, drafts=self._own_used)
        self.draw(hidden.index_select(0, passes.places[: shape.rows]), truncates)

    def next_pass(self, shape: BodyShape, truncates: bool) -> None:
        rows = self._pass_rows.first(shape.rows)
        self.draw(self._bound.forward(rows, self._no_logits, shape), truncates)

    def pass_logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def first_shapes(self, shapes: Sequence[BodyShape]) -> Sequence[BodyShape]:
        return [shape for shape in shapes if shape.longest == SHORT_ROW]

    def _chunk(self, shape: BodyShape) -> None:
        """Computes chunks, and moves the model past them."""
        rows = self._chunk_rows.first(shape.rows)
        hidden = self._bound.forward(rows, self._no_logits, shape)
        ops.collect_rows(hidden, rows, self._no_logits, self._position, self._last, hidden)

    def programs(self) -> Mapping[str, Callable[[], None]]:
        found = dict(super().programs())
        for shape in self._buckets.bodies():
            if shape.longest not in (1, SHORT_ROW):
                found[program_name("chunk", shape)] = functools.partial(self._chunk, shape)
        return found

    def passes(self) -> Mapping[str, Mapping[int, Callable[[], None]]]:
        found: dict[str, dict[int, Callable[[], None]]] = {"draft": {}, "first": {}}
        limits = self._state.limits
        for rows in self.timed_rows():
            shape = self.launch_shape(rows, rows, 1)
            found["draft"][rows] = functools.partial(self.run_next, shape)
            if 2 * rows <= min(limits.logit_rows, limits.tokens):
                shape = self.launch_shape(2 * rows, rows, 2)
                found["first"][rows] = functools.partial(self.run_first, shape)
        return found

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        super().stage(plan, upload)
        if plan.admits:
            lanes = int32([admit.lane for admit in plan.admits])
            computed = int32([admit.computed for admit in plan.admits])
            upload.put_lines(self._position, lanes, computed)
        self._chunks = None
        if DRAFT_CHUNKS in plan.writes:
            lanes, lengths = plan.writes[DRAFT_CHUNKS]
            self.put_rows(upload, self._chunk_words, lanes, np.full_like(lanes, PROMPT), lengths)
            total, longest = int(lengths.sum()), int(lengths.max())
            self._chunks = DraftLaunch(len(lanes), total, longest, [])

    def end(self, step: Step) -> None:
        launch = self._chunks
        if launch is not None:
            # Chunks use the kernels for long rows.
            longest = max(launch.longest, 1 + self._state.limits.drafts, 9)
            shape = self.launch_shape(launch.tokens, launch.rows, longest)
            self.run(program_name("chunk", shape), functools.partial(self._chunk, shape))
        super().end(step)
