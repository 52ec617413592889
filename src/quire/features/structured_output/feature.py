"""Requests with a grammar: the scheduler's part, and the engine loop's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import CompilerBusyError, QuireError, RequestError
from quire.executor import Capacity, Executor
from quire.features.call import CallType
from quire.features.loop_feature import EngineInterface, Failure, LoopFeature
from quire.features.structured_output.args import StructuredOutputArgs, mask_processes
from quire.features.structured_output.calls import CHECK_GRAMMAR, no_grammars
from quire.features.structured_output.compiler import Cache, compiler_setup, grammar_key
from quire.features.structured_output.forced_text import NO_TEXT, DraftCosts, ForcedText
from quire.features.structured_output.mask_builders import (
    MaskBuilders,
    MaskProcesses,
    MaskThread,
)
from quire.features.structured_output.messages import (
    Close,
    Compiled,
    Enter,
    Forced,
    FromMasks,
    GatedRow,
    Leave,
    MaskFailure,
    MaskParams,
    MaskStats,
    Open,
    Rows,
    Stats,
)
from quire.features.structured_output.stats import GrammarStats
from quire.plan import DRAFT_IDS, DRAFT_START, RowFlag, claim_width
from quire.request import Request
from quire.sampling_params import SamplingParams, StructuredOutputsParams, TokenRules
from quire.scheduler import Feature, PlanBuilder
from quire.scheduler.lanes import Flags
from quire.scheduler.step import Index

_FOREVER = 2**31 - 1
_KNOWN_GRAMMARS = 4096
"""Grammars of which is kept who has compiled them."""
_HELD_SECONDS = 2e-4
"""Seconds between two looks at whether late masks are there."""


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
            return no_grammars()
        name = "allowed_token_ids" if params.allowed_token_ids else "bad_token_ids"
        return RequestError(f"{name} needs a tokenizer, which was not loaded", name)


def open_grammars(config: EngineConfig) -> LoopFeature:
    """Returns the feature for an engine, which without a tokenizer has no grammars."""
    if config.tokenizer_path is None:
        return NoGrammars()
    args = StructuredOutputArgs.of(config.args)
    count = mask_processes(args, config.device)
    setup = compiler_setup(config, walks=True, parts=max(1, count))
    builders: MaskBuilders
    if count:
        builders = MaskProcesses(setup, count)
    else:
        builders = MaskThread(setup.open(), device=config.device != "cpu")
    # Op by op, a step's head cannot run before all its masks are there.
    late = config.device != "cpu" and not config.eager
    return GrammarFeature(
        builders,
        config.scheduler.max_num_seqs,
        config.vocab_size,
        config.eos_token_ids,
        late_grammars=late,
        forced_drafts=bool(args.structured_outputs_drafts),
    )


class _PlannedStep(NamedTuple):
    """The rows of a step that have masks, int32 [rows, 5] as of `GatedRow`."""

    step_id: int
    rows: Int32


@dataclass(slots=True, eq=False)
class _MaskedRequest:
    """A request with masks.

    Attributes:
        key: Its number.
        builder: Number of the builder of its masks.
        turn: See `Enter`.
        lane: Its lane, or -1.
        late: The step of its last row, if that was late and it has not gone on; else -1.
        forced: Text that its grammar forces.
    """

    request: Request
    key: int
    builder: int
    turn: int = 0
    lane: int = -1
    late: int = -1
    forced: ForcedText = NO_TEXT


@dataclass(slots=True)
class _BuilderLoad:
    """A builder's part of the work.

    Attributes:
        requests: Its requests, by key.
        checks: Number of grammars that it checks.
        stats: Its counts.
    """

    requests: dict[int, _MaskedRequest] = field(default_factory=dict)
    checks: int = 0
    stats: MaskStats = field(default_factory=MaskStats)


class _Check(NamedTuple):
    """A grammar that is checked.

    Attributes:
        builder: Number of the builder that compiles it.
        verdict: The answer.
    """

    builder: int
    verdict: Future[None]


class GrammarFeature(Feature, LoopFeature):
    """Belongs to the engine's thread, like the scheduler that calls it.

    It says to the builders which rows were planned. They read the tokens before these rows where
    the device writes them, and set the rows' flags.

    Args:
        eos_token_ids: What a grammar allows where the text may end.
        late_grammars: Whether a request runs its prompt while its grammar is compiled. Else it
            waits for the grammar.
        forced_drafts: Whether rows verify tokens that their grammars force.
    """

    waits_for = "grammar"

    def __init__(
        self,
        builders: MaskBuilders,
        num_lanes: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        late_grammars: bool = False,
        forced_drafts: bool = False,
    ) -> None:
        self._builders = builders
        self._loads = [_BuilderLoad() for _ in range(builders.count)]
        self._vocab_size, self._eos = vocab_size, tuple(eos_token_ids)
        self._keys = 0
        self._masked: dict[str, _MaskedRequest] = {}
        """By request id."""
        self._by_key: dict[int, _MaskedRequest] = {}
        self._lanes: list[_MaskedRequest | None] = [None] * num_lanes
        self._gated = np.zeros(num_lanes, dtype=bool)
        self._turns = [0] * num_lanes
        self._row_keys, self._row_builders, self._epochs, self._last_steps = np.zeros(
            (4, num_lanes), dtype=np.int32
        )
        """By lane: its request's key and builder, its late rows, and its last step."""
        self._planned: deque[_PlannedStep] = deque()
        """The rows of steps in flight, oldest first."""
        self._drafts = 0
        self._forced_drafts = forced_drafts
        self._claims: dict[int, ForcedText] = {}
        """By lane, what the rows of the next step are to verify."""
        self._held: set[int] = set()
        """Lanes whose last rows were late, and that have not gone on."""
        self._compiling: set[str] = set()
        """Requests whose grammars are not compiled."""
        self._late_grammars = late_grammars
        self._homes: Cache[bytes, set[int]] = Cache(_KNOWN_GRAMMARS)
        """By grammar, the builders that have compiled it."""
        self._repeated: Cache[bytes, bool] = Cache(_KNOWN_GRAMMARS)
        """Grammars of requests that have come."""
        self._checks: dict[int, _Check] = {}
        """By key, the grammars that are checked."""
        self._compile_late_rows = 0
        self._ready: list[str] = []
        self._failed: list[tuple[_MaskedRequest, MaskFailure]] = []
        self._turns_given: dict[tuple[int, int], _MaskedRequest] = {}
        """By lane and turn, the requests that have it or have had it not long ago."""

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._inputs = executor.host_inputs()
        self._drafts = capacity.drafts
        self._costs = DraftCosts(capacity.step_seconds)
        self._builders.start(self._inputs, self._let_go)
        return self

    def _place(self, grammar: bytes | None) -> int:
        """Returns the builder with the least work; of several, one that knows the grammar."""
        work = [len(load.requests) + load.checks for load in self._loads]
        least = [builder for builder, count in enumerate(work) if count == min(work)]
        if grammar is None:
            return least[0]
        homes = self._homes.get(grammar)
        if homes is None:
            homes = set()
            self._homes.put(grammar, homes)
        builder = next((each for each in least if each in homes), least[0])
        homes.add(builder)
        return builder

    # -- the scheduler's part ------------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        asked, params = request.params.structured_outputs, request.params
        if not params.masked:
            return None
        try:
            if params.allowed_token_ids or params.bad_token_ids:
                TokenRules(params.allowed_token_ids, params.bad_token_ids, self._vocab_size)
            grammar = None if asked is None else grammar_key(asked)
        except RequestError as error:
            return error
        self._keys += 1
        repeated = False
        if grammar is not None:
            repeated = bool(self._repeated.get(grammar))
            self._repeated.put(grammar, True)
        masked = _MaskedRequest(request, self._keys, self._place(grammar))
        self._masked[request.request_id] = self._by_key[masked.key] = masked
        self._loads[masked.builder].requests[masked.key] = masked
        if asked is not None:
            self._compiling.add(request.request_id)
        mask_params = MaskParams(
            asked,
            request.prompt_len,
            self._ends(request, params),
            tuple(params.allowed_token_ids or ()),
            tuple(tuple(each) for each in params.bad_token_ids or ()),
            repeated,
            asked is not None and self.proposes_drafts and params.speculative != "off",
        )
        self._builders.send(masked.builder, Open(masked.key, mask_params))
        return None

    def _ends(self, request: Request, params: SamplingParams) -> list[tuple[tuple[int, ...], int]]:
        """Returns the end tokens that a request does not take at first, or at all."""
        found = list[tuple[tuple[int, ...], int]]()
        if params.ignore_eos and params.structured_outputs is not None:
            found.append((self._eos, _FOREVER))
        if params.min_tokens:
            ends = () if params.ignore_eos else self._eos
            until = request.prompt_len + params.min_tokens
            found.append(((*ends, *params.stop_token_ids), until))
        return found

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
        return bool(self._masked)

    @property
    def certain(self) -> bool:
        return True

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        """Returns the number of forced tokens behind each row's own, if they pay."""
        counts = np.zeros_like(lanes)
        self._claims.clear()
        for i in np.flatnonzero(self._gated[lanes] & (room > 0)).tolist():
            lane = int(lanes[i])
            masked = self._lanes[lane]
            if masked is None:
                continue
            # The row's own token is at `planned + 1` if all drafts in flight are right.
            text, first = masked.forced, masked.request.planned + 1
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
        entered = [admit.lane for admit in builder.admits if admit.params.masked]
        for admit in builder.admits:
            self._gated[admit.lane] = False
        self._gated[entered] = True
        if self._claims:
            self._claim(builder)
        samples = (builder.flags & RowFlag.SAMPLE) != 0
        rows = np.flatnonzero(self._gated[builder.lanes] & samples)
        if entered:
            requests = dict(zip(builder.lanes.tolist(), builder.requests, strict=True))
            for lane in entered:
                self._enter(requests[lane], lane)
        if len(rows):
            held = (builder.flags[rows] & RowFlag.HELD) != 0
            builder.gate(rows[~held].tolist())
            self._plan_rows(builder, rows, held)

    def _plan_rows(self, builder: PlanBuilder, rows: Index, held: Flags) -> None:
        """Says to the builders which rows a step has. Masks of HELD rows are there."""
        lanes = builder.lanes[rows]
        prompt = (builder.flags[rows] & RowFlag.PROMPT) != 0
        lines = np.where(prompt, 1, builder.q_len[rows])
        columns = self._row_keys[lanes], rows, lines, self._epochs[lanes], held
        step = _PlannedStep(builder.step_id, int32(np.column_stack(columns)))
        self._planned.append(step)
        self._last_steps[lanes] = builder.step_id
        for lane in lanes[held].tolist() if self._held else ():
            self._held.discard(lane)
            if (masked := self._lanes[lane]) is not None:
                self._inputs.copy_line(masked.late, builder.step_id, lane)
                masked.late = -1
        builders = self._row_builders[lanes]
        for number in range(self._builders.count):
            own = step.rows[builders == number]
            if len(own):
                self._builders.send(number, Rows.of(step.step_id, own))

    def _enter(self, request: Request, lane: int) -> None:
        masked = self._masked[request.request_id]
        self._lanes[lane] = masked
        masked.late, masked.forced = -1, NO_TEXT
        self._row_keys[lane], self._row_builders[lane] = masked.key, masked.builder
        self._last_steps[lane] = -1
        masked.lane, masked.turn = lane, self._turns[lane]
        self._turns[lane] += 1
        passed = int(self._inputs.turns[lane])
        for turn in range(passed - 1, -1, -1):
            if self._turns_given.pop((lane, turn), None) is None:
                break
        self._turns_given[lane, masked.turn] = masked
        self._send_text(masked)

    def _send_text(self, masked: _MaskedRequest) -> None:
        """Says to a request's builder which tokens are known."""
        request = masked.request
        start = max(0, request.prompt_len - claim_width(self._drafts))
        tail = request.tokens.view(start).tobytes()
        message = Enter(masked.key, request.lane, masked.turn, tail, request.known)
        self._builders.send(masked.builder, message)

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        self._epochs[lanes] += 1
        for lane in lanes.tolist():
            self._held.add(lane)
            if (masked := self._lanes[lane]) is not None:
                masked.late = self._planned[0].step_id
                self._compile_late_rows += masked.request.request_id in self._compiling

    def inputs_ready(self, lanes: Int32) -> Flags:
        return np.array([self._built(lane) for lane in lanes.tolist()], dtype=bool)

    def _built(self, lane: int) -> bool:
        masked = self._lanes[lane]
        return masked is None or bool(self._inputs.flags[lane] > masked.late)

    def release(self, request: Request) -> bool:
        masked = self._masked.get(request.request_id)
        if request.lane >= 0:
            self._gated[request.lane] = False
            self._lanes[request.lane] = None
            self._held.discard(request.lane)
            if masked is not None:
                self._builders.send(masked.builder, Leave(masked.key, masked.lane, masked.turn))
                masked.lane = -1
        return False

    def finish(self, request: Request) -> None:
        masked = self._masked.pop(request.request_id, None)
        self._compiling.discard(request.request_id)
        if masked is not None:
            del self._by_key[masked.key]
            del self._loads[masked.builder].requests[masked.key]
            self._builders.send(masked.builder, Close(masked.key))

    # -- the engine loop's part ----------------------------------------------------------------

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {CHECK_GRAMMAR: self._check}

    def _check(self, engine: EngineInterface, grammar: StructuredOutputsParams) -> Future[None]:
        """Lets a builder compile a grammar that no request has yet. Returns its verdict."""
        check = _Check(self._place(grammar_key(grammar)), Future())
        self._keys += 1
        self._checks[self._keys] = check
        self._loads[check.builder].checks += 1
        self._builders.send(check.builder, Open(self._keys, MaskParams(grammar, 0)))
        return check.verdict

    def _judge(self, key: int, error: QuireError | None) -> None:
        """Ends a check."""
        check = self._checks.pop(key)
        self._loads[check.builder].checks -= 1
        self._builders.send(check.builder, Close(key))
        if error is None:
            check.verdict.set_result(None)
        else:
            check.verdict.set_exception(error)

    @property
    def waits(self) -> bool:
        return bool(self._compiling or self._held or self._checks)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        self._receive()
        deadline = time.monotonic() + patience
        while patience and not (self._ready or self._failed or any(map(self._built, self._held))):
            left = deadline - time.monotonic()
            if left <= 0.0:
                break
            self._receive(min(left, _HELD_SECONDS) if self._held else left)
        ready, self._ready = self._ready, []
        return ready, self._failures()

    def _failures(self) -> list[Failure]:
        """Returns the requests that have failed. Their tokens of earlier steps come first."""
        found, later = list[Failure](), list[tuple[_MaskedRequest, MaskFailure]]()
        for masked, failed in self._failed:
            if failed.step_id >= 0 and self._planned and self._planned[0].step_id < failed.step_id:
                later.append((masked, failed))
            else:
                found.append((masked.request, failed.error()))
        self._failed = later
        return found

    def after_update(self, step_id: int) -> None:
        while self._planned and self._planned[0].step_id <= step_id:
            self._planned.popleft()

    def _receive(self, seconds: float = 0.0) -> None:
        """Takes the answers of builders. Waits for some for up to so many seconds."""
        for builder, message in self._builders.answers(seconds):
            if message is None:
                self._bury(builder)
            else:
                self._take(builder, message)

    def _take(self, builder: int, message: FromMasks) -> None:
        if isinstance(message, Stats):
            self._loads[builder].stats = message.stats
            return
        if message.key in self._checks:
            self._judge(message.key, message.error() if isinstance(message, MaskFailure) else None)
            return
        masked = self._by_key.get(message.key)
        if masked is None:
            return
        if isinstance(message, Compiled):
            self._compiling.discard(masked.request.request_id)
            if not self._late_grammars:
                self._ready.append(masked.request.request_id)
        elif isinstance(message, MaskFailure):
            self._fail(masked, message)
        elif isinstance(message, Forced):
            masked.forced = ForcedText(message.start, message.tokens)
        else:
            self._again(masked)

    def _fail(self, masked: _MaskedRequest, failed: MaskFailure) -> None:
        self._compiling.discard(masked.request.request_id)
        self._failed.append((masked, failed))

    def _again(self, masked: _MaskedRequest) -> None:
        """Lets a builder that has missed results of a request go on from the known tokens."""
        if masked.lane < 0:
            return
        self._send_text(masked)
        if masked.late >= 0:
            # Its result is known: it gave no token.
            late = GatedRow(masked.key, -1, 1, int(self._epochs[masked.lane]) - 1, False)
            self._builders.send(masked.builder, Rows.of(masked.late, int32([late])))
        for step_id, rows in self._planned:
            own = rows[rows[:, 0] == masked.key].copy()
            own[:, -1] = self._inputs.flags[masked.lane] > step_id
            self._builders.send(masked.builder, Rows.of(step_id, own))

    # -- builders that end ---------------------------------------------------------------------

    def _let_go(self, builder: int) -> None:
        """Lets no step wait for the requests of a builder that has ended. From any thread."""
        for masked in list(self._loads[builder].requests.values()):
            lane = masked.lane
            if lane >= 0 and self._inputs.turns[lane] == masked.turn:
                self._inputs.put(int(self._last_steps[lane]), lane)

    def _bury(self, builder: int) -> None:
        """Fails the requests of a builder that has ended. Another one takes its place."""
        self._let_go(builder)
        load = self._loads[builder]
        message = "The process that built the masks of this answer has ended; try again."
        for masked in load.requests.values():
            self._fail(masked, MaskFailure(masked.key, message, busy=True))
        for key in [key for key, check in self._checks.items() if check.builder == builder]:
            self._judge(key, CompilerBusyError(message))
        for homes in self._homes.values():
            homes.discard(builder)
        for (lane, turn), masked in self._turns_given.items():
            if masked.builder == builder and (masked.lane, masked.turn) != (lane, turn):
                # It may have ended before it could leave the lane.
                self._builders.send(builder, Leave(masked.key, lane, turn))

    def stats(self) -> dict[str, Any]:
        self._receive()
        stats = GrammarStats(compile_late_rows=self._compile_late_rows)
        for load in self._loads:
            for name in MaskStats.__struct_fields__:
                value = getattr(stats, name) + getattr(load.stats, name)
                setattr(stats, name, value)
        return {"grammars": stats}

    def close(self, drain: Callable[[], None] | None) -> None:
        self._builders.close()
