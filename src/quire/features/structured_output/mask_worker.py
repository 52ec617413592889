"""Builds the masks of requests, from the results of the steps before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher

from quire.arrays import Int32, int32
from quire.errors import GrammarError, QuireError
from quire.features.structured_output.compiler import Compiler
from quire.features.structured_output.forced_text import NO_TEXT, ForcedTextFinder
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.features.structured_output.messages import (
    Compiled,
    Enter,
    Forced,
    FromMasks,
    GatedRow,
    Leave,
    Lost,
    MaskFailure,
    MaskParams,
    MaskStats,
    Open,
    Rows,
    Stats,
    ToMasks,
)
from quire.input_memory import DEPTH, InputMemory, OverwrittenError
from quire.plan import StopReason
from quire.sampling_params import TokenRules

_BARE = MaskRow(None)
_LATE: list[int] | None = [0, StopReason.LATE]


def claimed_drafts(ids: Int32, start: int, tokens: Int32, most: int) -> Int32:
    """Returns the draft tokens that a claim gives to a row, int32 [at most `most`].

    ids: int32 [W], the claimed tokens from position `start` on, padded with -1. tokens: int32
    [known], the tokens that the row knows; only the last W are looked at.
    """
    covered = len(tokens) - start
    if start < 0 or not 0 <= covered <= len(ids) or (ids[:covered] != tokens[start:]).any():
        return int32([])
    drafts = ids[covered:][: max(most, 0)]
    ends = np.flatnonzero(drafts < 0)
    return drafts[: ends[0]] if len(ends) else drafts


@dataclass(slots=True)
class _PlannedRow:
    """A row of a step that was planned.

    Attributes:
        built: Whether its masks are in their lines.
    """

    step_id: int
    row: GatedRow
    built: bool


@dataclass(slots=True, eq=False)
class _BuiltRequest:
    """A request, and its rows that have no result yet.

    Attributes:
        compiled: The compiled grammar; None: it has none.
        deadline: Moment at which its compilation takes too long.
        lane: Its lane, or -1.
        tokens: Its last known tokens: its text, and the end of its prompt.
        known: Number of all its known tokens.
        failed: Whether its failure was reported.
        lost: Whether results were missed, so that it must enter its lane again.
        rows: Its rows in the order of their steps.
    """

    key: int
    params: MaskParams
    state: GrammarState
    compiled: Future[LLMatcher] | None = None
    deadline: float = 0.0
    lane: int = -1
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    known: int = 0
    failed: bool = False
    lost: bool = False
    rows: deque[_PlannedRow] = field(default_factory=deque)

    @property
    def text(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[max(0, len(self.tokens) - self.known + self.params.prompt_len) :]

    @property
    def compiling(self) -> bool:
        return self.compiled is not None and self.state.matcher is None and not self.state.error


class MaskWorker:
    """Owns the matchers of some requests, and writes their masks. Belongs to one thread.

    The engine's messages say which rows were planned. A row's mask is built as soon as the result
    of the request's row before has arrived from the device, and the row's flag is set at once.

    Args:
        report: Takes answers, on any thread.
        changed: Called by other threads when `turn` may go on.
    """

    def __init__(
        self,
        compiler: Compiler,
        inputs: InputMemory,
        report: Callable[[FromMasks], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._compiler, self._inputs = compiler, inputs
        self._report, self._changed = report, changed
        self._masks = MaskBuilder(compiler.vocab_size)
        self._requests: dict[int, _BuiltRequest] = {}
        self._busy: dict[int, _BuiltRequest] = {}
        """Requests that have rows, or grammars that are being compiled."""
        self._leaving: list[tuple[int, int, int]] = []
        """Lanes that requests have left, with their turns and their last steps."""

    @property
    def waits(self) -> bool:
        """Whether the device, a compilation or another builder gives it work."""
        return bool(self._busy or self._leaving)

    @property
    def compiles(self) -> bool:
        """Whether it waits for a compilation, which may take too long."""
        return any(each.compiling for each in self._busy.values())

    # -- messages ------------------------------------------------------------------------------

    def handle(self, message: ToMasks) -> None:
        if isinstance(message, Rows):
            for row in message.read():
                self._plan(message.step_id, row)
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Enter):
            self._enter(message)
        elif isinstance(message, Leave):
            self._leave(message)
        else:
            self._close(message.key)

    def _open(self, message: Open) -> None:
        params = message.params
        state = GrammarState(
            params.prompt_len,
            forbidden=list(params.ends),
            forced=ForcedTextFinder() if params.forced else None,
        )
        request = _BuiltRequest(message.key, params, state)
        self._requests[message.key] = request
        if params.allowed or params.bad:
            state.rules = TokenRules(params.allowed, params.bad, self._compiler.vocab_size)
        if params.grammar is not None:
            self._busy[request.key] = request
            request.deadline = time.monotonic() + self._compiler.config.timeout
            try:
                request.compiled = self._compiler.compile(params.grammar)
            except GrammarError as error:
                self._fail(request, error)
            else:
                request.compiled.add_done_callback(lambda _: self._changed())

    def _enter(self, message: Enter) -> None:
        request = self._requests.get(message.key)
        if request is None:
            return
        request.lane, request.turn = message.lane, message.turn
        request.tokens = np.frombuffer(message.tail, np.int32).tolist()
        request.known, request.lost = message.known, False
        request.rows.clear()
        self._begin(request, None if request.compiling else request.compiled)

    def _begin(self, request: _BuiltRequest, compiled: Future[LLMatcher] | None) -> None:
        """Lets a request begin its grammar and take the text that is known.

        Args:
            compiled: The grammar; None: it has none, or it is not compiled yet.
        """
        state, params = request.state, request.params
        state.restart(params.prompt_len)
        if compiled is not None and params.grammar is not None and state.error is None:
            strings = self._compiler.walk(params.grammar, repeated=params.repeated)
            state.begin(compiled.result(), strings)
        state.advance(request.text)

    def _plan(self, step_id: int, row: GatedRow) -> None:
        request = self._requests.get(row.key)
        if request is None:
            return
        request.rows.append(_PlannedRow(step_id, row, bool(row.held)))
        self._busy[row.key] = request

    def _leave(self, message: Leave) -> None:
        request, last = self._requests.get(message.key), -1
        if request is not None and (request.lane, request.turn) == (message.lane, message.turn):
            last = request.rows[-1].step_id if request.rows else -1
            request.rows.clear()
            request.lane = -1
        self._leaving.append((message.lane, message.turn, last))
        self._leave_lanes()

    def _leave_lanes(self) -> None:
        """Leaves the lanes whose turns have come. Nothing waits for the rows that are left."""
        later = []
        for lane, turn, last in self._leaving:
            if self._inputs.turns[lane] == turn:
                self._inputs.put(last, lane)
                self._inputs.turns[lane] = turn + 1
            else:
                later.append((lane, turn, last))
        self._leaving = later

    def _close(self, key: int) -> None:
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._busy.pop(key, None)
        if request.compiled is not None and not request.compiled.done():
            assert request.params.grammar is not None
            self._compiler.forget(request.params.grammar)
        self._report_stats()

    # -- work ----------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Does all that can be done now. Returns whether that was anything."""
        if self._leaving:
            self._leave_lanes()
        done = False
        for request in list(self._busy.values()):
            if request.compiling:
                self._compile(request)
            else:
                done |= self._advance(request)
            if not request.rows and not request.compiling:
                del self._busy[request.key]
        if done:
            self._settle()
        return done

    def _compile(self, request: _BuiltRequest) -> None:
        """Takes a request's grammar, if it is compiled."""
        compiled, grammar = request.compiled, request.params.grammar
        if compiled is None or grammar is None:
            return
        if not compiled.done():
            if time.monotonic() >= request.deadline:
                self._fail(request, self._compiler.late(grammar))
                self._compiler.forget(grammar)
                request.compiled = None
            return
        # The compiler keeps a refusal. Raising it would add this request's frames to its traceback.
        refusal = compiled.exception()
        if refusal is not None:
            self._fail(request, _failure(refusal))
            return
        try:
            self._begin(request, compiled)
        except BaseException as error:
            self._fail(request, _failure(error))
        else:
            self._report_stats()
            self._report(Compiled(request.key))
            self._advance(request)

    def _fail(self, request: _BuiltRequest, error: QuireError) -> None:
        request.state.error = error if isinstance(error, GrammarError) else GrammarError(str(error))
        self._report_stats()
        self._report_failure(request, error)

    def _report_failure(self, request: _BuiltRequest, error: QuireError, step_id: int = -1) -> None:
        request.failed = True
        self._report(MaskFailure.of(request.key, error, step_id))

    def _advance(self, request: _BuiltRequest) -> bool:
        """Goes on with a request's rows, up to one that something is missing for. Returns whether
        it has built a mask."""
        rows, done = request.rows, False
        try:
            while rows and not request.lost:
                if not rows[0].built:
                    if not self._build(request, rows[0]):
                        return done
                    done = True
                row, result = rows[0].row, _LATE
                if row.place >= 0:
                    result = self._inputs.result(rows[0].step_id, row.place)
                if result is None:
                    return done
                self._take(request, result)
        except OverwrittenError:
            request.lost = True
            self._report(Lost(request.key))
        return done

    def _take(self, request: _BuiltRequest, result: list[int]) -> None:
        """Takes the result of a request's oldest row."""
        count, stop, *tokens = result
        row = request.rows.popleft().row
        if stop == StopReason.LATE:
            # Its masks stay where they are. The rows behind it give nothing.
            stale = sum(each.row.epoch == row.epoch for each in request.rows)
            self._drop(request, stale)
        elif stop != StopReason.NONE:
            self._drop(request, len(request.rows))
        tokens = tokens[:count]
        request.tokens += tokens
        request.known += len(tokens)
        request.state.advance(tokens)

    def _drop(self, request: _BuiltRequest, count: int) -> None:
        """Drops a request's next rows. Nothing waits for their masks any more."""
        for _ in range(count):
            dropped = request.rows.popleft()
            self._inputs.put(dropped.step_id, request.lane)

    def _build(self, request: _BuiltRequest, planned: _PlannedRow) -> bool:
        """Builds a row's masks, unless something is missing for them."""
        inputs, lane, lines = self._inputs, request.lane, planned.row.lines
        if inputs.turns[lane] != request.turn:
            return False
        begun, row = time.perf_counter(), _BARE._replace(state=request.state, lines=lines)
        if lines > 1:
            claim = inputs.claim(planned.step_id, lane)
            if claim is None:
                return False
            row = self._drafted(request, row, *claim)
        first = int(inputs.first_lines(planned.step_id, int32([lane]))[0])
        masks, state = inputs.buffer()[first : first + lines], request.state
        text = NO_TEXT if state.forced is None else state.forced.text
        try:
            self._masks.build([row], masks, self._compiler.tokenizer_vocab)
        except BaseException as error:  # a grammar must not end the engine, or keep it waiting
            masks[:] = -1
            state.error = state.error or GrammarError(
                f"The grammar failed ({type(error).__name__})."
            )
        # Before the step has a result, which gives such rows any token.
        if state.error is not None and not request.failed:
            self._report_failure(request, state.error, planned.step_id)
        if state.forced is not None and state.forced.text is not text:
            self._report(Forced(request.key, *state.forced.text))
        planned.built = True
        inputs.put(planned.step_id, lane)
        inputs.times[planned.step_id % DEPTH, lane] = begun, time.perf_counter()
        return True

    def _drafted(self, request: _BuiltRequest, row: MaskRow, ids: Int32, start: int) -> MaskRow:
        """Adds the drafts that a row verifies."""
        tail = int32(request.tokens[-len(ids) :])
        before = request.known - len(tail)
        drafts = claimed_drafts(ids, start - before, tail, row.lines - 1)
        return row._replace(drafts=drafts.tolist(), text=request.text)

    def _settle(self) -> None:
        """Lets matchers and documents catch up, which can wait until all masks are on their way."""
        for request in self._busy.values():
            request.state.settle()

    def _report_stats(self) -> None:
        compiler, memory = self._compiler, self._compiler.memory
        stats = MaskStats(compiler.compiles, compiler.compile_seconds)
        if memory is not None:
            stats.mask_lookups, stats.mask_hits = memory.lookups, memory.hits
        self._report(Stats(stats))


def _failure(error: BaseException) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return GrammarError(f"The grammar could not be compiled ({type(error).__name__}).")
