"""The runner's side: rows verify drafts, and a second model makes some.

The draft model runs over the same lanes, with KV groups, layers and a position of its own. Before a
step's body it drafts for the step's rows: a first pass computes what the model lacks up to the last
known token, each further pass one draft more. What it draws it writes as the lanes' claims, with
the noise that the target will draw with at the same place. Behind the step's head it computes
chunks: prompts, and texts that it has fallen behind of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.executor import StepSeconds
from quire.models import (
    Decoder,
    build_model,
    load_config,
    load_weights,
    model_quantization,
    spec_from_config,
)
from quire.ops.reference import drafts as reference
from quire.ops.rows import PROMPT, Drafts, LogitRows, StepRows
from quire.plan import StepPlan
from quire.runner import Hook
from quire.runner.hooks.hook import HeadContext
from quire.runner.kv_cache import KVCache
from quire.runner.program import BodyShape, CapturedPrograms, ModelLanes, StepProgram
from quire.runner.readback import Step
from quire.runner.state import BatchState, ColumnSpec, Limits
from quire.runner.upload import Upload
from quire.speculation.settings import SpeculationSettings, read_settings
from quire.speculation.step_times import measure_steps

DRAFT_ROWS, DRAFT_CHUNKS = "draft_rows", "draft_chunks"
"""Entries of `StepPlan.writes`. By lane: the tokens of the model's first pass, and the drafts that
it makes; the tokens of a chunk."""

_begin_drafts = ops.op(reference.begin_drafts)
_keep_drafts = ops.op(reference.keep_drafts)
_SHARES = 1 << 16
_TIMED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TIMED_EAGER = 16
"""Rows of passes that are measured, and the most where there are no graphs."""


def open_hook(config: EngineConfig) -> Hook:
    """Returns the hook of a worker."""
    settings = read_settings(config.args)
    return DraftModel(config, settings) if settings.has_model else Verifier(settings)


class Verifier(Hook):
    """Lets rows verify drafts, which the host or another hook brings."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.drafts = settings.most
        self._simulated = settings.simulated

    def bind(self, state: BatchState) -> None:
        self._state = state

    def passes(self) -> Mapping[str, Mapping[int, Callable[[], None]]]:
        """Returns what makes drafts on the device, by name and size, to be measured."""
        return {}

    def seconds(self, program: StepProgram, graphs: CapturedPrograms | None) -> StepSeconds:
        return measure_steps(program, graphs, self.passes()) if self.drafts else {}

    def tokens(self, ctx: HeadContext) -> None:
        """Replaces what was drawn by the row's draft as often as `simulated` says, and never gives
        it otherwise. For benchmarks only: such tokens are not the model's."""
        drawn = ctx.tokens
        if self._simulated is None or drawn is None or not self._state.limits.drafts:
            return
        rows, state = ctx.logit_rows, self._state
        lanes = rows.lanes.clamp(min=0).long()
        draft = state.tokens[lanes, rows.lengths.clamp(0, state.tokens.shape[1] - 1).long()]
        drafted = rows.ahead < state.columns["drafts_used"][lanes]
        mixed = (rows.lengths.long() * 2654435761 + lanes * 40503) & 0xFFFFFFFF
        share = ((mixed ^ (mixed >> 15)) * 2246822519 >> 13) % _SHARES
        other = torch.where(drawn == draft, (draft + 1) % ctx.logits.shape[-1], drawn)
        chosen = torch.where(share < int(self._simulated * _SHARES), draft, other)
        ctx.tokens = torch.where(drafted & (drawn >= 0), chosen, drawn).int()


@dataclass(slots=True)
class _DraftLaunch:
    """Counts of a step's launches of the model. tokens: of the first pass or the chunks. counts:
    rows that take part in each further pass. longest: tokens of a row."""

    rows: int
    tokens: int
    longest: int
    counts: list[int]
    truncates: bool = False


class DraftModel(Verifier):
    """Keeps draft_position, int32 [lanes], and the rows that the model computes next to a step.

    With several ranks each has the whole model, so that all draft the same.
    """

    entries = frozenset({DRAFT_ROWS, DRAFT_CHUNKS})

    def __init__(self, config: EngineConfig, settings: SpeculationSettings) -> None:
        super().__init__(settings)
        self._config = config
        self._settings = settings
        self._replay: Mapping[str, Callable[[], None]] = {}
        self._rows: _DraftLaunch | None = None
        self._chunks: _DraftLaunch | None = None
        self._truncates = np.zeros(config.scheduler.max_num_seqs, dtype=bool)

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
        # Words of rows, not of lanes: lanes, counts or flags, and where the tokens begin.
        return (
            ColumnSpec("draft_position"),
            ColumnSpec("draft_row_words", (4,)),
            ColumnSpec("draft_chunk_words", (4,)),
        )

    def bind(self, state: BatchState) -> None:
        super().bind(state)
        lanes, device = state.limits.lanes, state.device

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        columns = state.columns
        self._position = columns["draft_position"]
        self._row_words = columns["draft_row_words"]
        self._chunk_words = columns["draft_chunk_words"]
        for words in (self._row_words, self._chunk_words):
            words.view(-1)[:lanes] = -1
        self._drafting = reference.DraftRows(*_parts(self._row_words, lanes))
        chunk_lanes, chunk_flags, chunk_start = _parts(self._chunk_words, lanes)
        nothing = ints(lanes + 1)
        self._first_rows = StepRows(
            self._drafting.lanes, self._drafting.query_start, nothing, nothing[:lanes]
        )
        self._chunk_rows = StepRows(chunk_lanes, chunk_start, nothing, chunk_flags)
        self._passes = reference.PassRows(
            ints(lanes, fill=-1), ints(lanes + 1), ints(lanes), ints(lanes), ints(1)
        )
        self._pass_rows = StepRows(
            self._passes.lanes, self._passes.query_start, nothing, nothing[:lanes]
        )
        self._no_logits = LogitRows(*ints(4, 1, fill=-1))
        names = "draft_ids", "draft_start", "drafts_used"
        self._claims = Drafts(*(columns[name] for name in names))
        self._own_used = Drafts(*self._claims[:2], ints(lanes))
        self._floats, self._ints = columns["sampling_floats"], columns["sampling_ints"]

    def take_cache(self, cache: KVCache) -> None:
        state, own = self._state, len(self._model.kv_layouts)
        self._lanes = ModelLanes(
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

    def _first_pass(self, shape: BodyShape, truncates: bool) -> None:
        """Computes what the model lacks of the rows' texts, and draws their first drafts."""
        drafting, passes = self._drafting, self._passes
        _begin_drafts(
            drafting.lanes, drafting.counts, drafting.query_start, self._state.position,
            self._position, self._own_used.used, self._claims, passes,
        )  # fmt: skip
        rows = self._first_rows.first(shape.rows)
        hidden = self._lanes.forward(rows, self._no_logits, shape, drafts=self._own_used)
        self._draw(hidden.index_select(0, passes.places[: shape.rows]), truncates)

    def _pass(self, shape: BodyShape, truncates: bool) -> None:
        """Computes each row's last draft, and draws one more."""
        rows = self._pass_rows.first(shape.rows)
        self._draw(self._lanes.forward(rows, self._no_logits, shape), truncates)

    def _draw(self, hidden: Tensor, truncates: bool) -> None:
        passes, count = self._passes, len(hidden)
        drawn = ops.sample(
            self._model.logits(hidden),
            passes.lanes[:count],
            passes.lengths[:count],
            temperature=self._floats[:, 0],
            top_p=self._floats[:, 1],
            min_p=self._floats[:, 2],
            top_k=self._ints[:, 0],
            seed=self._ints[:, 1:3],
            sample_index=self._ints[:, 3],
            truncate_rows=truncates,
        )
        state = self._state
        _keep_drafts(
            drawn, self._drafting.counts, state.position, self._position, state.tokens,
            self._claims, passes,
        )  # fmt: skip

    def _chunk(self, shape: BodyShape) -> None:
        """Computes chunks, and moves the model past them."""
        rows = self._chunk_rows.first(shape.rows)
        hidden = self._lanes.forward(rows, self._no_logits, shape)
        ops.collect_rows(hidden, rows, self._no_logits, self._position, self._last, hidden)

    def programs(self) -> Mapping[str, Callable[[], None]]:
        # There are graphs only where there is a GPU.
        from quire.runner.graphs import SHORT_ROW, Buckets

        self._buckets = Buckets(self._state.limits)
        found: dict[str, Callable[[], None]] = {}
        for shape in self._buckets.bodies():
            if shape.longest not in (1, SHORT_ROW):
                found[_name("chunk", shape)] = functools.partial(self._chunk, shape)
                continue
            kind = "draft" if shape.longest == 1 else "catch_up"
            run = self._pass if shape.longest == 1 else self._first_pass
            for truncates in (False, True):
                found[_name(kind, shape, truncates)] = functools.partial(run, shape, truncates)
        return found

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        self._replay = programs

    def passes(self) -> Mapping[str, Mapping[int, Callable[[], None]]]:
        found: dict[str, dict[int, Callable[[], None]]] = {"draft": {}, "catch_up": {}}
        limits = self._state.limits
        most = min(limits.lanes, limits.tokens, _TIMED[-1] if self._replay else _TIMED_EAGER)
        for size in sorted({min(size, most) for size in _TIMED}):
            decode, first = self._launch_of(size, size, 1), self._launch_of(2 * size, size, 2)
            found["draft"][size] = functools.partial(self._run, "draft", decode)
            if 2 * size <= min(limits.logit_rows, limits.tokens):
                found["catch_up"][2 * size] = functools.partial(self._run, "catch_up", first)
        return found

    def _launch_of(self, tokens: int, rows: int, longest: int) -> BodyShape:
        """Returns the shape for a step: exact, or that of the graph which holds it."""
        if self._replay:
            found = self._buckets.body(tokens, rows, longest)
            if found is not None:
                return found
        return BodyShape(tokens, rows, longest)

    def _run(self, kind: str, shape: BodyShape, truncates: bool = False) -> None:
        replay = self._replay.get(_name(kind, shape, truncates))
        if replay is not None:
            replay()
        elif kind == "draft":
            self._pass(shape, truncates)
        elif kind == "catch_up":
            self._first_pass(shape, truncates)
        else:
            self._chunk(shape)

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        for admit in plan.admits:
            p = admit.params
            self._truncates[admit.lane] = not p.greedy and (
                p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0
            )
        if plan.admits:
            lanes = int32([admit.lane for admit in plan.admits])
            computed = int32([admit.computed for admit in plan.admits])
            upload.put_lines(self._position, lanes, computed)
        self._rows = self._chunks = None
        if DRAFT_ROWS in plan.writes:
            lanes, values = plan.writes[DRAFT_ROWS]
            order = np.argsort(-values[:, 1], kind="stable")
            lanes, firsts, drafts = lanes[order], values[order, 0], values[order, 1]
            self._put(upload, self._row_words, lanes, drafts, firsts)
            depth = int(drafts.max(initial=0))
            counts = [int((drafts > done).sum()) for done in range(1, depth)]
            total, longest = int(firsts.sum()), max(2, int(firsts.max()))
            truncates = bool(self._truncates[lanes].any())
            self._rows = _DraftLaunch(len(lanes), total, longest, counts, truncates)
        if DRAFT_CHUNKS in plan.writes:
            lanes, lengths = plan.writes[DRAFT_CHUNKS]
            self._put(upload, self._chunk_words, lanes, np.full_like(lanes, PROMPT), lengths)
            total, longest = int(lengths.sum()), int(lengths.max())
            self._chunks = _DraftLaunch(len(lanes), total, longest, [])

    def _put(
        self, upload: Upload, words: Tensor, lanes: Int32, counts: Int32, lengths: Int32
    ) -> None:
        size, rows = self._state.limits.lanes, len(lanes)
        packed = np.zeros(4 * size, dtype=np.int32)
        packed[rows:size] = -1
        packed[:rows] = lanes
        packed[size : size + rows] = counts
        starts = packed[2 * size : 3 * size + 1]
        np.cumsum(lengths, out=starts[1 : rows + 1])
        starts[rows + 1 :] = starts[rows]
        upload.put(words, [0], [len(packed)], packed)

    def begin(self, step: Step) -> None:
        launch = self._rows
        if launch is None:
            return
        shape = self._launch_of(launch.tokens, launch.rows, launch.longest)
        self._run("catch_up", shape, launch.truncates)
        for count in launch.counts:
            self._run("draft", self._launch_of(count, count, 1), launch.truncates)

    def end(self, step: Step) -> None:
        launch = self._chunks
        if launch is not None:
            # Chunks have the kernels of long rows.
            longest = max(launch.longest, 1 + self._state.limits.drafts, 9)
            self._run("chunk", self._launch_of(launch.tokens, launch.rows, longest))


def _parts(words: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a column of rows, as views: int32 [lanes], [lanes] and [lanes + 1]."""
    flat = words.view(-1)
    return flat[:lanes], flat[lanes : 2 * lanes], flat[2 * lanes : 3 * lanes + 1]


def _name(kind: str, shape: BodyShape, truncates: bool = False) -> str:
    return f"{kind}/{shape.tokens}x{shape.rows}x{shape.longest}/{int(truncates)}"
