"""Requests with a grammar, as the scheduler and the engine's loop see them.

A request is parked until its grammar is compiled. From then on its sampling rows are GATED: the
step's head waits for their masks. A mask needs all tokens before it; as soon as these are known,
masks are built on other threads, while the step's body runs, and handed to the executor from there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from llguidance import LLMatcher

from quire.arrays import Int32
from quire.errors import GrammarError, RequestError
from quire.executor import Executor
from quire.plan import HeadInputs, RowFlag
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder
from quire.structured.compiler import Compiler
from quire.structured.masks import MaskBuilder, Walk

_NAME = "structured"
_FOREVER = 2**31 - 1
_HANDOVER = 0.002
"""Seconds at most that the engine's thread lets the one that builds masks go first."""


@dataclass(slots=True)
class _Gated:
    """A step whose gated rows wait. needs: how many tokens must be known for each row's mask."""

    step_id: int
    requests: list[Request]
    lanes: Int32
    lane_epochs: list[int]
    needs: list[int]

    @property
    def places(self) -> range:
        return range(len(self.requests))

    def alive(self, i: int) -> bool:
        request = self.requests[i]
        return request.lane == self.lanes[i] and request.lane_epoch == self.lane_epochs[i]


class GrammarFeature(Feature):
    """Belongs to the engine's thread, like the scheduler that calls it.

    The engine's loop calls `compiled` for what has become of parked requests, and `begin` before it
    submits a step and when tokens have come.
    """

    def __init__(self, compiler: Compiler, num_lanes: int) -> None:
        self._compiler = compiler
        self._masks = MaskBuilder(compiler.vocab_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._gated = np.zeros(num_lanes, dtype=bool)
        self._waiting: deque[_Gated] = deque()
        self._parked: dict[str, tuple[Request, float]] = {}
        self._done: deque[tuple[str, Walk, LLMatcher | None, GrammarError | None]] = deque()
        self._news = threading.Event()
        self._failures: list[tuple[Request, RequestError]] = []
        self._broken: deque[tuple[_Gated, int, GrammarError]] = deque()
        self._room: Callable[[int, int], Int32]
        self._release: Callable[[HeadInputs], None]

    def connect(self, executor: Executor) -> None:
        """Where masks are to go."""
        self._room, self._release = executor.mask_room, executor.submit_head

    # -- what the scheduler asks ---------------------------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        asked, params = request.params.structured_outputs, request.params
        if asked is None:
            return None
        try:
            compiled = self._compiler.compile(asked)
        except GrammarError as error:
            return error
        walk = Walk(position=request.prompt_len)
        eos = self._compiler.eos_token_ids
        if params.ignore_eos:
            walk.forbidden, walk.until = eos, _FOREVER
        elif params.min_tokens:
            walk.forbidden = (*eos, *params.stop_token_ids)
            walk.until = request.prompt_len + params.min_tokens
        request.state[_NAME] = walk
        # The masks see to both: a grammar that is complete ends the text.
        request.params = msgspec.structs.replace(params, min_tokens=0, ignore_eos=False)
        self._parked[request.request_id] = request, time.monotonic() + self._compiler.config.timeout
        compiled.add_done_callback(partial(self._on_compiled, request.request_id, walk))
        return None

    def _on_compiled(self, name: str, walk: Walk, done: Future[LLMatcher]) -> None:
        """On whichever thread."""
        try:
            self._done.append((name, walk, done.result().deep_copy(), None))
        except GrammarError as error:
            self._done.append((name, walk, None, error))
        except BaseException as error:
            reason = GrammarError(f"The grammar could not be compiled ({type(error).__name__}).")
            self._done.append((name, walk, None, reason))
        self._news.set()

    def ready(self, request: Request) -> bool:
        walk = request.state.get(_NAME)
        return walk is None or walk.matcher is not None

    def plan(self, builder: PlanBuilder) -> None:
        for admit in builder.admits:
            self._gated[admit.lane] = admit.params.structured_outputs is not None
        samples = (builder.flags & RowFlag.SAMPLE) != 0
        rows = np.flatnonzero(self._gated[builder.lanes] & samples)
        if not len(rows):
            return
        builder.gate(rows.tolist())
        requests = [builder.requests[row] for row in rows.tolist()]
        self._waiting.append(
            _Gated(
                builder.step_id,
                requests,
                builder.lanes[rows],
                [request.lane_epoch for request in requests],
                [request.planned for request in requests],
            )
        )

    def release(self, request: Request) -> bool:
        if _NAME in request.state:
            self._parked.pop(request.request_id, None)
            if request.lane >= 0:
                self._gated[request.lane] = False
        return False

    # -- what the engine's loop asks: compiling ------------------------------------------------

    @property
    def parked(self) -> bool:
        """Whether some requests wait for nothing but their grammar."""
        return bool(self._parked)

    def compiled(self, patience: float = 0.0) -> list[str]:
        """The requests that are ready since the last call, to be woken; waits up to `patience`
        seconds for news."""
        if not self._parked and not self._done:
            return []
        if patience and not self._done:
            self._news.wait(patience)
        self._news.clear()
        ready = []
        while self._done:
            name, walk, matcher, error = self._done.popleft()
            if name not in self._parked or self._parked[name][0].state[_NAME] is not walk:
                continue
            request, _ = self._parked.pop(name)
            if error is not None:
                self._failures.append((request, error))
                continue
            walk.matcher = matcher
            ready.append(name)
        self._give_up_late()
        return ready

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for name in [name for name, (_, limit) in self._parked.items() if limit < now]:
            self._failures.append((self._parked.pop(name)[0], self._compiler.too_slow()))

    def failures(self) -> list[tuple[Request, RequestError]]:
        """Requests that must end, each told once."""
        while self._broken:
            step, i, error = self._broken.popleft()
            if step.alive(i):
                self._failures.append((step.requests[i], error))
        failures, self._failures = self._failures, []
        return failures

    # -- what the engine's loop asks: masks ----------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether all masks are begun. While some wait for tokens of steps in flight, no step may
        be submitted: its launch might wait for the device, which waits for the masks."""
        return not self._waiting

    def begin(self) -> None:
        """Starts on the masks of every step whose tokens are all known."""
        while self._waiting:
            step = self._waiting[0]
            if not all(
                request.known >= need or not step.alive(i)
                for i, (request, need) in enumerate(zip(step.requests, step.needs, strict=True))
            ):
                return
            self._waiting.popleft()
            rows = [self._advanced(step, i) for i in step.places]
            # The device waits for the masks, and their thread for the interpreter's lock, which
            # this one would hold on to: for milliseconds, if it has much to do.
            entered = threading.Event()
            self._thread.submit(self._build, step, rows, entered)
            entered.wait(_HANDOVER)

    def _advanced(self, step: _Gated, i: int) -> Walk | None:
        """A row's walk, past all that is known. None: the request is gone."""
        if not step.alive(i):
            return None
        request = step.requests[i]
        walk: Walk = request.state[_NAME]
        walk.advance(request.tokens.view(walk.position).tolist())
        return walk

    def _build(self, step: _Gated, rows: list[Walk | None], entered: threading.Event) -> None:
        """On the thread that builds masks. entered: set when that needs the interpreter no more."""
        masks = self._room(step.step_id, len(rows))
        try:
            self._masks.build(rows, masks, self._compiler.tokenizer_vocab, entered.set)
        except BaseException as error:  # a grammar must not end the engine, or keep it waiting
            masks[:] = -1
            reason = GrammarError(f"The grammar failed ({type(error).__name__}).")
            for walk in rows:
                if walk is not None:
                    walk.error = walk.error or reason
        self._release(HeadInputs(step.step_id, masks))
        for i, walk in enumerate(rows):
            if walk is not None and walk.error is not None:
                self._broken.append((step, i, walk.error))

    def shutdown(self) -> None:
        """Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown()
