"""The loop's and the scheduler's part of updates, pauses and sleep.

Calls that change something are jobs, which run one after the other. A job is a generator: it yields
while it waits, and the loop goes on meanwhile. A job sends commands to all ranks by entries of
plans without rows, so all ranks change their weights between the same two steps, and no step
computes with weights that were written in part.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.arrays import Int32, int32
from quire.config import EngineConfig
from quire.errors import QuireError, RequestError, WeightsError
from quire.executor import Capacity, Executor
from quire.features.call import UNREADY, WEIGHTS, CallType, NewsType
from quire.features.loop_feature import EngineInterface, Failure, LoopFeature
from quire.features.weight_updates.calls import (
    ABORT_ALL,
    JOIN,
    LEAVE,
    PAUSE,
    RESUME,
    SLEEP,
    STATE,
    UPDATE,
    WAKE_UP,
    Pause,
    PauseMode,
    Sleep,
    Tag,
    UpdateWeights,
    WakeUp,
    WeightsState,
)
from quire.features.weight_updates.commands import (
    ENTRY,
    AwaitThread,
    Command,
    Drop,
    Join,
    LeaveGroup,
    Prepare,
    Release,
    Restore,
    Write,
    encode,
)
from quire.features.weight_updates.hook import UPDATES, CommandOutcome, UpdateHook
from quire.features.weight_updates.payloads import JoinGroup
from quire.features.weight_updates.stats import UpdateStats
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder, Scheduler

_KEPT_LABELS = 64
_POLL = 1e-3
"""Most seconds that one poll waits for a thread."""
_ID = re.compile(r"[0-9a-f]{32}")

HOLD: CallType[Any, int] = CallType("weights.hold", object, int)
"""Holds tensors of this process by name for a `LocalSource`, and returns their number. A number
lets go of them. No client can make this call."""

Job = Generator[None, None, Any]
"""Waits at each `yield`. Its value answers the call."""


@dataclass(slots=True)
class _Call:
    """A call whose job has not ended."""

    job: Job
    answer: Future[Any]


class WeightUpdates(Feature, LoopFeature):
    """Decides when ranks write weights, and what happens to requests. Belongs to the engine's
    thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._calls: deque[_Call] = deque()
        self._command: Command | None = None
        """The command of the next plan."""
        self._holding = False
        """Whether requests that have not begun must wait."""
        self._held: dict[str, None] = {}
        """Ids of the requests that wait."""
        self._woken: list[str] = []
        self._failures: list[Failure] = []
        self._paused = False
        """Whether a caller has paused the engine."""
        self._asleep: tuple[Tag, ...] = ()
        self._level = 0
        self._lost = False
        """Whether the weights were dropped, and must be read again."""
        self._missing: frozenset[str] = frozenset()
        """Tensors of the update that failed after its first byte."""
        self._labels: dict[int, str] = {}
        self._numbers = 0
        self._stats = UpdateStats()
        self._hook: UpdateHook
        self._scheduler: Scheduler

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        self._hook = executor.call(UPDATES, None)
        return self

    # -- the scheduler's part ------------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        if self._missing:
            raise WeightsError()
        return None

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        """Parks requests that have not begun while others must end."""
        if not self._holding or request.num_preemptions:
            return False
        self._held[request.request_id] = None
        return True

    def finish(self, request: Request) -> None:
        self._held.pop(request.request_id, None)

    def pending(self, idle: bool) -> bool:
        return self._command is not None

    def plan(self, builder: PlanBuilder) -> None:
        if self._command is not None:
            builder.write(ENTRY, int32([0]), encode(self._command))
            self._command = None

    # -- the loop's part -----------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        news = self._calls or self._woken or self._failures or self._held
        return self._stopped or bool(news)

    @property
    def _stopped(self) -> bool:
        """Whether requests stand still until a call."""
        return self._paused or bool(self._asleep)

    def poll(self, patience: float) -> tuple[Sequence[str], Sequence[Failure]]:
        if self._calls:
            if patience:
                time.sleep(min(patience, _POLL))
            self._advance()
        woken, self._woken = self._woken, []
        failures, self._failures = self._failures, []
        return woken, failures

    def _advance(self) -> None:
        """Continues the first job, and answers its call if it has ended."""
        call = self._calls[0]
        try:
            next(call.job)
            return
        except StopIteration as end:
            self._calls.popleft()
            call.answer.set_result(end.value)
        except Exception as error:
            self._calls.popleft()
            call.answer.set_exception(error)
        self._release_held()

    def _release_held(self) -> None:
        self._holding = False
        self._woken += self._held
        self._held.clear()
        if hasattr(self, "_scheduler"):
            self._scheduler.paused = self._stopped

    def calls(self) -> Mapping[CallType[Any, Any], Callable[[EngineInterface, Any], Any]]:
        return {
            UPDATE: self._starts(self._update),
            PAUSE: self._starts(self._pause),
            RESUME: self._starts(self._resume),
            SLEEP: self._starts(self._sleep),
            WAKE_UP: self._starts(self._wake_up),
            JOIN: self._starts(self._join),
            LEAVE: self._starts(self._leave),
            ABORT_ALL: self._starts(self._abort),
            STATE: lambda engine, _: self.state(),
            HOLD: lambda engine, asked: self._hold(asked),
        }

    def _starts(self, job: Callable[[Any], Job]) -> Callable[[EngineInterface, Any], Future[Any]]:
        """Returns a function that queues a job for a call."""

        def start(engine: EngineInterface, asked: Any) -> Future[Any]:
            self._scheduler = engine.scheduler
            call = _Call(job(asked), Future())
            self._calls.append(call)
            return call.answer

        return start

    def _hold(self, asked: Any) -> int:
        if isinstance(asked, int):
            self._hook.local.pop(asked, None)
            return asked
        self._numbers += 1
        self._hook.local[self._numbers] = asked
        return self._numbers

    def news(self) -> Mapping[NewsType[Any], Any]:
        reason = "", ""
        if self._missing:
            reason = "weights_incomplete", str(WeightsError())
        elif self._asleep:
            reason = "asleep", "The engine sleeps until POST /wake_up."
        return {UNREADY: reason, WEIGHTS: self.state().id}

    def state(self) -> WeightsState:
        scheduler = getattr(self, "_scheduler", None)
        version = 0 if scheduler is None else scheduler.version
        return WeightsState(
            version=version,
            label=self._labels.get(version, ""),
            id="" if scheduler is None else scheduler.weights,
            paused=self._paused,
            asleep=self._asleep,
            level=self._level,
            incomplete=bool(self._missing),
            labels=dict(self._labels),
        )

    def stats(self) -> dict[str, Any]:
        self._stats.incomplete = int(bool(self._missing))
        self._stats.asleep = int(bool(self._asleep))
        return {"weight_updates": self._stats}

    # -- jobs ----------------------------------------------------------------------------------

    def _send(self, command: Command) -> Generator[None, None, CommandOutcome]:
        """Makes all ranks carry out a command, in a plan without rows.

        Raises:
            QuireError: a rank has failed.
        """
        self._scheduler.paused = True
        self._command = command
        while not self._hook.outcomes:
            yield
        self._scheduler.paused = self._stopped
        outcome = self._hook.outcomes.pop(0)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def _update(self, asked: UpdateWeights) -> Job:
        """Checks an update, waits for requests as its mode says, and writes it."""
        if asked.id and not _ID.fullmatch(asked.id):
            raise RequestError("id must be 32 lower-case hexadecimal digits", "id")
        if "weights" in self._asleep:
            raise RequestError("the weights' memory is given up: wake it up first", "source")
        self._numbers += 1
        number = self._numbers
        try:
            names, drafts = yield from self._prepare(number, asked)
            yield from self._settle(asked.mode)
        except Exception:
            self._stats.failures += 1
            yield from self._drop(number)
            raise
        self._scheduler.change_weights(
            asked.id or secrets.token_hex(16), retract=asked.mode == "retract"
        )
        self._note_version(asked.label)
        try:
            outcome = yield from self._send(Write(number))
        except QuireError as error:
            self._stats.failures += 1
            self._missing |= names
            self._end_all(WeightsError())
            raise WeightsError(
                f"the update has failed, and the weights are incomplete: {error}"
            ) from None
        self._missing = frozenset()
        self._lost = False
        self._stats.updates += 1
        self._stats.bytes += outcome.bytes
        self._stats.seconds += outcome.seconds
        stale = self._stats.stale_draft_updates + 1
        self._stats.stale_draft_updates = stale if drafts < self._hook.drafts else 0
        return self.state()

    def _prepare(
        self, number: int, asked: UpdateWeights
    ) -> Generator[None, None, tuple[frozenset[str], int]]:
        """Opens and checks an update on all ranks, while steps go on.

        Returns the names of its tensors, and the number of draft heads that it reaches. The
        first rank checks first. Others have the same names and shapes.
        """
        ready = self._hook.prepare(number, asked.source, whole=asked.whole)
        while not ready.done():
            yield
        prepared = ready.result()
        names = prepared.names
        missing = self._missing - names
        if missing:
            raise RequestError(
                f"the last update has failed, so the next one must bring all of its tensors; it "
                f"lacks {min(missing)} and {len(missing) - 1} others",
                "source",
            )
        if self._config.args.ranks > 1:
            yield from self._send(Prepare(number, asked.source, asked.whole))
            yield from self._send(AwaitThread(number))
        return names, len(prepared.drafts)

    def _drop(self, number: int) -> Generator[None, None, None]:
        """Closes an update's source on all ranks."""
        if self._config.args.ranks > 1:
            yield from self._send(Drop(number))
        else:
            self._hook.drop(number)

    def _settle(self, mode: str) -> Generator[None, None, None]:
        """Lets running requests end, or ends them, as a mode says.

        Raises:
            RequestError: requests stand still, so they cannot end.
        """
        if mode == "wait" and self._stopped and self._begun():
            raise RequestError(
                "running requests cannot end while the engine is paused or asleep: resume it, or "
                "choose the mode keep, retract or abort",
                "mode",
            )
        if mode == "wait":
            self._holding = True
            while self._begun():
                yield
        elif mode == "abort":
            self._end_all(None)

    def _begun(self) -> bool:
        """Whether any request has begun and not ended, or a step is in flight."""
        scheduler = self._scheduler
        return bool(
            scheduler.num_running
            or scheduler.num_in_flight
            or any(request.num_preemptions for request in scheduler.requests())
        )

    def _note_version(self, label: str) -> None:
        version = self._stats.version = self._scheduler.version
        self._labels[version] = label
        self._labels.pop(version - _KEPT_LABELS, None)

    def _end_all(self, error: QuireError | None) -> int:
        """Ends all requests: with an error, or aborted. Returns their number."""
        ended = [(request, error) for request in self._scheduler.requests()]
        self._failures += ended
        return len(ended)

    def _abort(self, asked: None) -> Job:
        return self._end_all(None)
        yield

    def _pause(self, asked: Pause) -> Job:
        yield from self._stand_still(asked.mode)
        self._paused = True
        return self.state()

    def _stand_still(self, mode: PauseMode) -> Generator[None, None, None]:
        """Stops rows, after the running requests have done what a mode says."""
        yield from self._settle(mode)
        self._scheduler.paused = True
        if mode == "retract":
            self._scheduler.retract()
        while self._scheduler.num_in_flight:
            yield

    def _resume(self, asked: None) -> Job:
        self._paused = False
        return self.state()
        yield

    def _sleep(self, asked: Sleep) -> Job:
        """Gives memory up, once no step needs it."""
        if not self._config.args.enable_sleep_mode:
            raise RequestError("this engine cannot sleep in its process (--enable-sleep-mode)")
        if asked.level not in (1, 2):
            raise RequestError(f"level must be 1 or 2, got {asked.level}", "level")
        tags = tuple(tag for tag in asked.tags if tag not in self._asleep)
        if not tags:
            return self.state()
        count = len(list(self._scheduler.requests()))
        if asked.mode is None and count:
            raise RequestError(f"{count} requests run or wait", "mode", "requests_running")
        yield from self._stand_still(asked.mode or "keep")
        if "kv" in tags:
            self._scheduler.retract()
            if not self._scheduler.reset_prefix_cache():
                self._scheduler.paused = self._paused
                raise RequestError("the KV cache is in use by a transfer", "tags")
        yield from self._send(Release(asked.level, tags))
        self._asleep = tuple(sorted({*self._asleep, *tags}))
        if "weights" in tags:
            self._level = asked.level
            self._lost = self._lost or asked.level == 2
        self._level = max(self._level, 1)
        self._scheduler.paused = True
        return self.state()

    def _wake_up(self, asked: WakeUp) -> Job:
        """Takes memory again. Weights that were dropped are read from the model's files."""
        tags = tuple(tag for tag in self._asleep if not asked.tags or tag in asked.tags)
        if not tags:
            return self.state()
        read = "weights" in tags and self._lost
        if read and self._scheduler.version:
            # The files' weights may differ from those that were dropped.
            self._scheduler.change_weights(secrets.token_hex(16), retract=True)
            self._note_version("")
        yield from self._send(Restore(tags, read))
        if read and self._scheduler.version:
            # The drafts keep the weights of the last update.
            self._stats.stale_draft_updates += bool(self._hook.drafts)
        self._lost = self._lost and not read
        self._asleep = tuple(tag for tag in self._asleep if tag not in tags)
        self._level = self._level if self._asleep else 0
        return self.state()

    def _join(self, asked: JoinGroup) -> Job:
        """Joins a group in threads of all ranks, while steps go on."""
        self._numbers += 1
        number = self._numbers
        if self._config.args.ranks > 1:
            yield from self._send(Join(number, asked))
        joined = self._hook.join(number, asked)
        try:
            while not joined.done():
                yield
            joined.result()
            if self._config.args.ranks > 1:
                yield from self._send(AwaitThread(number))
        finally:
            self._hook.drop(number)

    def _leave(self, asked: str) -> Job:
        yield from self._send(LeaveGroup(asked))
