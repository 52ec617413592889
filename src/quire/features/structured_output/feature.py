"""The drafts that a claim gives to a row, as the device finds them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import GrammarError, QuireError, RequestError
from quire.executor import Capacity, Executor
from quire.features.loop_feature import Failure, LoopFeature
from quire.features.structured_output.args import StructuredOutputArgs
from quire.features.structured_output.compiler import Compiler, build_compiler
from quire.features.structured_output.forced_text import (
    DraftCosts,
    ForcedText,
    ForcedTextFinder,
)
from quire.features.structured_output.mask_thread import MaskThread
from quire.features.structured_output.masks import (
    GrammarState,
    MaskBuilder,
    MaskRow,
    mask_threads,
)
from quire.features.structured_output.stats import GrammarStats
from quire.plan import DRAFT_IDS, DRAFT_START, RowFlag, claim_width
from quire.request import Request
from quire.sampling_params import SamplingParams, StructuredOutputsParams, TokenRules
from quire.scheduler import Feature, PlanBuilder
from quire.scheduler.lanes import Flags


def claimed_drafts(ids: Int32, start: int, tokens: Int32, most: int) -> Int32:
    """Returns the draft tokens that a claim gives to a row, int32 [at most `most`].

    ids: int32 [W], the claimed tokens from position `start` on, padded with -1. tokens: int32
    [known], the tokens that the row knows.
    """
    covered = len(tokens) - start
    if start < 0 or not 0 <= covered <= len(ids) or (ids[:covered] != tokens[start:]).any():
        return int32([])
    drafts = ids[covered:][: max(most, 0)]
    ends = np.flatnonzero(drafts < 0)
    return drafts[: ends[0]] if len(ends) else drafts


# Requests with a grammar: the scheduler's part and the engine loop's.

_FOREVER = 2**31 - 1
_HANDOVER = 0.002
"""Seconds at most that the engine's thread lets the one that builds masks go first."""


_NO_MASKS = MaskRow(None)


@dataclass(slots=True)
class _GatedRow:
    """A row that waits for masks.

    Attributes:
        known: Tokens that must be known, of a PROMPT row.
        q_len: Positions of a generating row, else 0.
        masks: What is built for it, once its tokens are known.
        built: Whether its masks are written.
    """

    request: Request
    lane: int
    lane_epoch: int
    known: int
    q_len: int
    masks: MaskRow = _NO_MASKS
    built: bool = False

    @property
    def alive(self) -> bool:
        """Whether the row may still give a token: its request runs, and no row before is late."""
        return self.request.lane == self.lane and self.request.lane_epoch == self.lane_epoch

    @property
    def ready(self) -> bool:
        """Whether all tokens before the row are known."""
        if not self.alive:
            return True
        if self.q_len:
            # No earlier row of it is in flight.
            return self.request.planned - self.request.computed <= self.q_len
        return self.request.known >= self.known

    @property
    def lines(self) -> int:
        return max(self.q_len, 1)


@dataclass(slots=True)
class _GatedStep:
    """A step whose gated rows wait for masks."""

    step_id: int
    rows: list[_GatedRow]


class NoGrammars(Feature, LoopFeature):
    """Refuses requests with a grammar or rules of tokens, for an engine that was started without
    grammars."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        return self

    def admit(self, request: Request) -> RequestError | None:
        params = request.params
        if not params.masked:
            return None
        if params.structured_outputs is not None:
            return RequestError("this engine has no grammars", "structured_outputs")
        name = "allowed_token_ids" if params.allowed_token_ids else "bad_token_ids"
        return RequestError(f"{name} needs a tokenizer, which was not loaded", name)


def open_grammars(config: EngineConfig) -> LoopFeature:
    """Returns the feature for an engine, which without a tokenizer has no grammars."""
    if config.tokenizer_path is None:
        return NoGrammars()
    compiler = build_compiler(config, copies=mask_threads(), walks=True)
    # Op by op, a step's head cannot run before all its masks are there.
    late = config.device != "cpu" and not config.eager
    forced = bool(StructuredOutputArgs.of(config.args).structured_outputs_drafts)
    return GrammarFeature(
        compiler, config.scheduler.max_num_seqs, late_grammars=late, forced_drafts=forced
    )


class GrammarFeature(Feature, LoopFeature):
    """Belongs to the engine's thread, like the scheduler that calls it.

    Args:
        late_grammars: Whether a request runs its prompt while its grammar is compiled. Else it
            waits for the grammar.
        forced_drafts: Whether rows verify tokens that their grammars force.
    """

    waits_for = "grammar"

    def __init__(
        self,
        compiler: Compiler,
        num_lanes: int,
        *,
        late_grammars: bool = False,
        forced_drafts: bool = False,
    ) -> None:
        self._compiler = compiler
        self._masks = MaskBuilder(compiler.vocab_size)
        self._thread = MaskThread()
        self._states: dict[str, GrammarState] = {}
        """By request id."""
        self._gated = np.zeros(num_lanes, dtype=bool)
        self._waiting: deque[_GatedStep] = deque()
        self._current: list[_GatedRow | None] = [None] * num_lanes
        """By lane, the last row whose masks were begun."""
        self._drafts = 0
        self._forced_drafts = forced_drafts
        self._claims: dict[int, ForcedText] = {}
        """By lane, what the rows of the next step are to verify."""
        self._held: set[int] = set()
        """Lanes whose last rows were late, and that have not gone on."""
        self._compiling: dict[str, tuple[Request, float]] = {}
        """Requests whose grammars are not compiled, and moments at which that takes too long."""
        self._late_grammars = late_grammars
        self._copies: dict[str, tuple[Future[LLMatcher], int]] = {}
        """By request id, the copy of its grammar."""
        self._unbuilt: dict[str, _GatedStep] = {}
        """By request id, a row whose masks are built once its grammar is compiled."""
        self._unbuilt_lock = threading.Lock()
        self._checked: list[Future[LLMatcher]] = []
        self._compile_late_rows = 0
        self._done: deque[tuple[str, GrammarState, GrammarError | None]] = deque()
        self._news = threading.Event()
        self._broken: deque[tuple[_GatedRow, GrammarError]] = deque()
        self._closed = False
        self._executor: Executor

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._executor = executor
        self._drafts = capacity.drafts
        self._costs = DraftCosts(capacity.step_seconds)
        return self

    def check(self, params: Sequence[SamplingParams]) -> None:
        """Waits until the grammars are compiled, beside each other."""
        asked = [p.structured_outputs for p in params if p.structured_outputs is not None]
        self._checked = []
        for one in asked:
            with contextlib.suppress(RequestError):
                # Held until the requests are admitted, however many there are.
                self._checked.append(self._compiler.compile(one))
        for one in asked:
            self._compiler.check(one)

    # -- the scheduler's part ------------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        asked, params = request.params.structured_outputs, request.params
        if not params.masked:
            return None
        forced = self.proposes_drafts and params.speculative != "off"
        finder = ForcedTextFinder() if forced else None
        state = GrammarState(position=request.prompt_len, forced=finder)
        try:
            if params.allowed_token_ids or params.bad_token_ids:
                state.rules = TokenRules(
                    params.allowed_token_ids, params.bad_token_ids, self._compiler.vocab_size
                )
            copy = None if asked is None else self._compiler.acquire(asked)
        except RequestError as error:
            return error
        eos = self._compiler.eos_token_ids
        if params.ignore_eos and copy is not None:
            state.forbidden.append((eos, _FOREVER))
        if params.min_tokens:
            ends = () if params.ignore_eos else eos
            until = request.prompt_len + params.min_tokens
            state.forbidden.append(((*ends, *params.stop_token_ids), until))
        name = request.request_id
        self._states[name] = state
        if copy is None:
            return None
        self._copies[name] = copy
        self._compiling[name] = request, time.monotonic() + self._compiler.config.timeout
        copy[0].add_done_callback(partial(self._on_compiled, request, state))
        return None

    def _on_compiled(self, request: Request, state: GrammarState, done: Future[LLMatcher]) -> None:
        """Receives a compiled grammar, on any thread."""
        name, reason = request.request_id, None
        try:
            matcher, strings = done.result(), self._compiler.walk(_grammar_of(request))
        except GrammarError as error:
            reason = error
        except BaseException as error:
            reason = GrammarError(f"The grammar could not be compiled ({type(error).__name__}).")
        with self._unbuilt_lock:
            if reason is None:
                state.begin(matcher, strings)
            else:
                state.error = reason
            step = self._unbuilt.pop(name, None)
            if step is not None:
                for row in step.rows:
                    row.masks = self._mask_row(row, state)
                # Not from the engine's thread, which may wait for these masks.
                self._thread.put(partial(self._build, step, threading.Event()))
        self._done.append((name, state, reason))
        self._news.set()

    def ready(self, request: Request) -> bool:
        return self._late_grammars or request.request_id not in self._compiling

    def device_params(self, request: Request, params: SamplingParams) -> SamplingParams:
        """Takes over `min_tokens`, and of requests with a grammar `ignore_eos`, which the masks
        enforce: a complete grammar ends the text."""
        if not params.masked:
            return params
        if params.structured_outputs is None:
            return msgspec.structs.replace(params, min_tokens=0)
        return msgspec.structs.replace(params, min_tokens=0, ignore_eos=False)

    @property
    def proposes_drafts(self) -> bool:
        return self._forced_drafts and self._drafts > 0

    @property
    def drafting(self) -> bool:
        return bool(self._states)

    @property
    def certain(self) -> bool:
        return True

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        """Returns the number of forced tokens behind each row's own, if they pay."""
        counts = np.zeros_like(lanes)
        self._claims.clear()
        for i in np.flatnonzero(self._gated[lanes] & (room > 0)).tolist():
            lane = int(lanes[i])
            row = self._current[lane]
            state = None if row is None else row.masks.state
            if row is None or state is None or state.forced is None or not row.alive:
                continue
            # The row's own token is at `planned + 1` if all drafts in flight are right.
            text, first = state.forced.text, row.request.planned + 1
            counts[i] = min(len(text.after(first)), int(room[i]))
            if counts[i]:
                self._claims[lane] = text
        total = int(counts.sum())
        if not total or not self._costs.pays(len(lanes), total):
            self._claims.clear()
            return np.zeros_like(lanes)
        return counts

    def _claim(self, builder: PlanBuilder) -> None:
        """Claims the forced texts of the rows that verify them."""
        drafted = builder.lanes[builder.q_len > 1].tolist()
        texts = {lane: self._claims[lane] for lane in drafted if lane in self._claims}
        if texts:
            ids = np.full((len(texts), claim_width(self._drafts)), -1, dtype=np.int32)
            for line, text in zip(ids, texts.values(), strict=True):
                tokens = text.tokens[: len(line)]
                line[: len(tokens)] = tokens
            lanes = int32(list(texts))
            builder.write(DRAFT_IDS, lanes, ids)
            builder.write(DRAFT_START, lanes, int32([text.start for text in texts.values()]))
        self._claims.clear()

    def plan(self, builder: PlanBuilder) -> None:
        for admit in builder.admits:
            self._gated[admit.lane] = admit.params.masked
        if self._claims:
            self._claim(builder)
        samples = (builder.flags & RowFlag.SAMPLE) != 0
        rows = np.flatnonzero(self._gated[builder.lanes] & samples).tolist()
        if not rows:
            return
        builder.gate(rows)
        if self._held:
            rows = self._go_on(builder, rows)
        gated = [self._gated_row(builder, row) for row in rows]
        if gated:
            self._waiting.append(_GatedStep(builder.step_id, gated))

    def _go_on(self, builder: PlanBuilder, rows: list[int]) -> list[int]:
        """Gives the rows of held lanes the masks that came late. Returns the other rows."""
        held = (builder.flags[rows] & RowFlag.HELD) != 0
        lanes = builder.lanes[rows][held]
        if len(lanes):
            self._executor.submit_inputs(builder.step_id, lanes)
            self._held.difference_update(lanes.tolist())
        return [row for row, of_held in zip(rows, held.tolist(), strict=True) if not of_held]

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        self._held.update(lanes.tolist())
        for lane in lanes.tolist() if self._compiling else ():
            row = self._current[lane]
            self._compile_late_rows += row is not None and self._compiles(row.request)

    def _compiles(self, request: Request) -> bool:
        return request.request_id in self._compiling

    def inputs_ready(self, lanes: Int32) -> Flags:
        return np.array([self._built(lane) for lane in lanes.tolist()], dtype=bool)

    def _built(self, lane: int) -> bool:
        row = self._current[lane]
        return row is None or row.built

    def _gated_row(self, builder: PlanBuilder, row: int) -> _GatedRow:
        request, lane = builder.requests[row], int(builder.lanes[row])
        prompt = bool(builder.flags[row] & RowFlag.PROMPT)
        q_len = 0 if prompt else int(builder.q_len[row])
        return _GatedRow(request, lane, request.lane_epoch, request.planned, q_len)

    def release(self, request: Request) -> bool:
        if request.lane >= 0:
            self._gated[request.lane] = False
            self._current[request.lane] = None
            self._held.discard(request.lane)
        with self._unbuilt_lock:
            self._unbuilt.pop(request.request_id, None)
        return False

    def finish(self, request: Request) -> None:
        name = request.request_id
        self._states.pop(name, None)
        if self._compiling.pop(name, None) is not None:
            self._compiler.forget(_grammar_of(request))
        if (copy := self._copies.pop(name, None)) is not None:
            self._compiler.release(_grammar_of(request), copy[1])

    # -- the engine loop's part: compiling -----------------------------------------------------

    @property
    def waits(self) -> bool:
        return bool(self._compiling or self._held)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        failed: list[Failure] = []
        while self._broken:
            row, error = self._broken.popleft()
            if row.alive:
                failed.append((row.request, error))
        if not self._compiling and not self._done and not self._held:
            return (), failed
        if patience and not self._done and not any(map(self._built, self._held)):
            self._news.wait(patience)
        self._news.clear()
        ready = []
        while self._done:
            name, state, reason = self._done.popleft()
            if name not in self._compiling or self._states.get(name) is not state:
                continue
            request, _ = self._compiling.pop(name)
            if reason is not None:
                failed.append((request, reason))
            elif not self._late_grammars:
                ready.append(name)
        return ready, failed + self._late()

    def _late(self) -> list[Failure]:
        """Gives up on grammars that took too long to compile."""
        now = time.monotonic()
        late = [name for name, (_, limit) in self._compiling.items() if limit < now]
        return [self._give_up(self._compiling.pop(name)[0]) for name in late]

    def _give_up(self, request: Request) -> Failure:
        error = self._compiler.late(_grammar_of(request))
        self._compiler.forget(_grammar_of(request))
        return request, error

    # -- the engine loop's part: masks ---------------------------------------------------------

    def may_launch(self) -> bool:
        """Whether all masks are begun. While some wait for tokens of steps in flight, no step may
        be submitted: its launch might wait for the device, which waits for the masks."""
        return not self._waiting

    def before_submit(self) -> None:
        self._begin_masks()  # a first launch waits for the device, which waits for the masks

    def after_update(self) -> None:
        self._begin_masks()

    def _begin_masks(self) -> None:
        """Starts to build the masks of every step whose tokens are all known."""
        while self._waiting and all(row.ready for row in self._waiting[0].rows):
            step = self._waiting.popleft()
            gone = [row.lane for row in step.rows if not row.alive]
            if gone:
                # Whatever these rows give is ignored. Another row's masks may lie in their lines.
                self._executor.submit_inputs(step.step_id, int32(gone))
                step.rows = [row for row in step.rows if row.alive]
            for row in step.rows:
                self._current[row.lane] = row
            if self._compiling:
                step.rows = self._compiled_rows(step)
            if not step.rows:
                continue
            for row in step.rows:
                row.masks = self._mask_row(row, self._states[row.request.request_id])
            # The device waits for the masks, and their thread for the interpreter's lock, which
            # this one would hold on to: for milliseconds, if it has much to do.
            entered = threading.Event()
            self._thread.put(partial(self._build, step, entered))
            entered.wait(_HANDOVER)

    def _compiled_rows(self, step: _GatedStep) -> list[_GatedRow]:
        """Puts off the rows whose grammars are being compiled. Returns the others."""
        rows = []
        with self._unbuilt_lock:
            for row in step.rows:
                name = row.request.request_id
                state = self._states[name]
                if name in self._compiling and state.matcher is None and state.error is None:
                    self._unbuilt[name] = _GatedStep(step.step_id, [row])
                else:
                    rows.append(row)
        return rows

    def _mask_row(self, row: _GatedRow, state: GrammarState) -> MaskRow:
        """Advances a row's grammar past all known tokens."""
        tokens = row.request.tokens
        state.advance(tokens.view(state.position).tolist())
        text = tokens.view() if row.q_len > 1 else None
        return MaskRow(state, row.lines, (), text, row.lane * (1 + self._drafts))

    def _build(self, step: _GatedStep, entered: threading.Event) -> None:
        """Builds a step's masks, on their thread.

        Args:
            entered: Set when that needs the interpreter no more.
        """
        if self._closed:
            return
        self._add_drafts(step, entered)
        lines = self._executor.input_lines()
        rows = [each.masks for each in step.rows]
        try:
            self._masks.build(rows, lines, self._compiler.tokenizer_vocab, entered.set)
        except BaseException as error:  # a grammar must not end the engine, or keep it waiting
            reason = GrammarError(f"The grammar failed ({type(error).__name__}).")
            for row in rows:
                lines[row.line : row.line + row.lines] = -1
                if row.state is not None:
                    row.state.error = row.state.error or reason
        # Before the step has a result, which gives such rows any token.
        for each in step.rows:
            if each.masks.state is not None and each.masks.state.error is not None:
                self._broken.append((each, each.masks.state.error))
            each.built = True
        self._executor.submit_inputs(step.step_id, int32([each.lane for each in step.rows]))
        entered.set()
        if self._held:
            self._news.set()
        self._masks.settle(rows)

    def _add_drafts(self, step: _GatedStep, entered: threading.Event) -> None:
        """Adds the drafts that rows verify, once they are made."""
        if all(row.lines == 1 for row in step.rows):
            return
        claims = self._executor.claimed(step.step_id, wait=False)
        if claims is None:
            entered.set()
            claims = self._executor.claimed(step.step_id, wait=True)
        if claims is None:
            return  # the engine ends
        ids, starts = claims
        for row in step.rows:
            masks = row.masks
            if masks.text is not None and masks.lines > 1:
                start, most = int(starts[row.lane]), masks.lines - 1
                drafts = claimed_drafts(ids[row.lane], start, masks.text, most)
                row.masks = masks._replace(drafts=drafts.tolist())

    def stats(self) -> dict[str, Any]:
        memory = self._compiler.memory
        stats = GrammarStats(
            compiles=self._compiler.compiles,
            compile_seconds=self._compiler.compile_seconds,
            compile_late_rows=self._compile_late_rows,
        )
        if memory is not None:
            stats.mask_lookups, stats.mask_hits = memory.lookups, memory.hits
        return {"grammars": stats}

    def close(self, drain: Callable[[], None] | None) -> None:
        self._closed = True
        self._thread.close()
        self._compiler.shutdown()


def _grammar_of(request: Request) -> StructuredOutputsParams:
    asked = request.params.structured_outputs
    if asked is None:
        raise QuireError(f"the request {request.request_id} has no grammar")
    return asked
