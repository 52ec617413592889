"""Drafts on the device.

They are made before the body of the step that verifies them. In a pipeline they are made after the
head of the same rows' previous step, because steps of other rows come in between.

A first pass makes one draft for each row, and each further pass one more. Drafts are drawn with the
noise that the target will use at the same position, and are written as the lanes' claims. The host
decides the rows and the numbers of drafts. The device knows each row's position.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire import ops
from quire.arrays import Int32
from quire.config import EngineConfig
from quire.features.speculation.settings import SpeculationSettings
from quire.features.speculation.verifier import Verifier
from quire.ops.reference import drafts as reference
from quire.ops.rows import Drafts, LogitRows, StepRows
from quire.plan import StepPlan
from quire.runner.graphs import Buckets
from quire.runner.hooks import HostHook
from quire.runner.hooks.sampling import sampling_columns
from quire.runner.program import BodyShape
from quire.runner.readback import Step, Upload
from quire.runner.state import BatchState, ColumnSpec, Limits

DRAFT_ROWS = "draft_rows"
"""Entry of `StepPlan.writes`. By lane: the tokens of the first pass, and the drafts to make."""

begin_drafts = ops.op(reference.begin_drafts)
_keep_drafts = ops.op(reference.keep_drafts)
_TIMED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TIMED_EAGER = 16
"""Numbers of rows with which passes are measured. `_TIMED_EAGER` is the most without graphs."""


@dataclass(slots=True)
class DraftLaunch:
    """The sizes of a step's passes.

    Attributes:
        rows: number of rows.
        tokens: number of tokens of the first pass or of the chunks.
        longest: tokens of the longest row.
        counts: number of rows of each further pass.
        truncates: whether some rows use top-k, top-p or min-p.
    """

    rows: int
    tokens: int
    longest: int
    counts: list[int]
    truncates: bool = False


class Drafter(Verifier, HostHook):
    """Base of drafters on the device. It keeps each lane's draft position, int32 [lanes], and the
    rows to draft for."""

    entries = frozenset({DRAFT_ROWS})

    def __init__(self, config: EngineConfig, settings: SpeculationSettings) -> None:
        super().__init__(settings)
        self._config = config
        self._settings = settings
        # In a pipeline the first stage needs the drafts before the last stage has run the steps of
        # other rows.
        self._ahead = config.scheduler.pipeline_depth > 1
        self._replay: Mapping[str, Callable[[], None]] = {}
        self._rows: DraftLaunch | None = None
        self._truncates = np.zeros(config.scheduler.max_num_seqs, dtype=bool)

    # -- parts that differ ---------------------------------------------------------------------

    @abstractmethod
    def first_pass(self, shape: BodyShape, truncates: bool) -> None:
        """Draws the rows' first drafts. A program."""

    @abstractmethod
    def next_pass(self, shape: BodyShape, truncates: bool) -> None:
        """Computes each row's last draft, and draws one more. A program."""

    @abstractmethod
    def pass_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, vocab] of a pass's output [N, width]."""

    @abstractmethod
    def first_shapes(self, shapes: Sequence[BodyShape]) -> Sequence[BodyShape]:
        """Returns the shapes of bodies for which first passes are captured."""

    # -- start ---------------------------------------------------------------------------------

    def columns(self, limits: Limits) -> Sequence[ColumnSpec]:
        # The second column is by row, not by lane: lanes, counts or flags, and begins of tokens.
        return ColumnSpec("draft_position"), ColumnSpec("draft_row_words", (4,))

    def bind(self, state: BatchState) -> None:
        super().bind(state)
        lanes, device = state.limits.lanes, state.device

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        columns = state.columns
        self._position = columns["draft_position"]
        self._row_words = columns["draft_row_words"]
        self._row_words.view(-1)[:lanes] = -1
        self._drafting = reference.DraftRows(*row_parts(self._row_words, lanes))
        nothing = ints(lanes + 1)
        self._first_rows = StepRows(
            self._drafting.lanes, self._drafting.query_start, nothing, nothing[:lanes]
        )
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
        self._columns = sampling_columns(state)

    # -- programs ------------------------------------------------------------------------------

    def draw(self, hidden: Tensor, truncates: bool) -> None:
        """Draws a draft for each row of a pass from hidden [R, width], and stores it."""
        passes, count = self._passes, len(hidden)
        drawn = ops.sample(
            self.pass_logits(hidden),
            passes.lanes[:count],
            passes.lengths[:count],
            **self._columns,
            truncate_rows=truncates,
        )
        state = self._state
        _keep_drafts(
            drawn, self._drafting.counts, state.position, self._position, state.tokens,
            self._claims, passes,
        )  # fmt: skip

    def programs(self) -> Mapping[str, Callable[[], None]]:
        self._buckets = Buckets(self._state.limits)
        shapes = self._buckets.bodies()
        passes = [shape for shape in shapes if shape.longest == 1]
        found: dict[str, Callable[[], None]] = {}
        for kind, run, wanted in (
            ("first", self.first_pass, self.first_shapes(shapes)),
            ("next", self.next_pass, passes),
        ):
            for shape in wanted:
                for truncates in (False, True):
                    name = program_name(kind, shape, truncates)
                    found[name] = functools.partial(run, shape, truncates)
        return found

    def capture(self, programs: Mapping[str, Callable[[], None]]) -> None:
        self._replay = programs

    def timed_rows(self) -> list[int]:
        """Returns the numbers of rows with which passes are measured."""
        limits = self._state.limits
        most = min(limits.lanes, limits.tokens, _TIMED[-1] if self._replay else _TIMED_EAGER)
        return sorted({min(size, most) for size in _TIMED})

    def launch_shape(self, tokens: int, rows: int, longest: int) -> BodyShape:
        """Returns the shape for a step: the shape of the smallest graph that fits, or the exact
        one without graphs."""
        if self._replay:
            found = self._buckets.body(tokens, rows, longest)
            if found is not None:
                return found
        return BodyShape(tokens, rows, longest)

    def run(self, name: str, otherwise: Callable[[], None]) -> None:
        """Runs a program. If it has a graph, replays the graph."""
        self._replay.get(name, otherwise)()

    def run_first(self, shape: BodyShape, truncates: bool = False) -> None:
        name = program_name("first", shape, truncates)
        self.run(name, functools.partial(self.first_pass, shape, truncates))

    def run_next(self, shape: BodyShape, truncates: bool = False) -> None:
        name = program_name("next", shape, truncates)
        self.run(name, functools.partial(self.next_pass, shape, truncates))

    # -- a step --------------------------------------------------------------------------------

    def stage(self, plan: StepPlan, upload: Upload) -> None:
        for admit in plan.admits:
            self._truncates[admit.lane] = admit.params.truncates
        self._rows = None
        if DRAFT_ROWS not in plan.writes:
            return
        lanes, values = plan.writes[DRAFT_ROWS]
        order = np.argsort(-values[:, 1], kind="stable")
        lanes, firsts, drafts = lanes[order], values[order, 0], values[order, 1]
        self.put_rows(upload, self._row_words, lanes, drafts, firsts)
        depth = int(drafts.max(initial=0))
        counts = [int((drafts > done).sum()) for done in range(1, depth)]
        total, longest = int(firsts.sum()), int(firsts.max())
        truncates = bool(self._truncates[lanes].any())
        self._rows = DraftLaunch(len(lanes), total, longest, counts, truncates)

    def put_rows(
        self, upload: Upload, words: Tensor, lanes: Int32, counts: Int32, lengths: Int32
    ) -> None:
        """Adds rows to the upload, in the form that `row_parts` reads. lengths: tokens of each
        row."""
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
        if not self._ahead:
            self._draft()

    def end(self, step: Step) -> None:
        if self._ahead:
            self._draft()

    def _draft(self) -> None:
        launch = self._rows
        if launch is None:
            return
        shape = self.launch_shape(launch.tokens, launch.rows, launch.longest)
        self.run_first(shape, launch.truncates)
        for count in launch.counts:
            self.run_next(self.launch_shape(count, count, 1), launch.truncates)


def row_parts(words: Tensor, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of a column of rows, as views: int32 [lanes], [lanes] and [lanes + 1]."""
    flat = words.view(-1)
    return flat[:lanes], flat[lanes : 2 * lanes], flat[2 * lanes : 3 * lanes + 1]


def program_name(kind: str, shape: BodyShape, truncates: bool = False) -> str:
    """Returns the name of a program."""
    return f"{kind}/{shape.tokens}x{shape.rows}x{shape.longest}/{int(truncates)}"
