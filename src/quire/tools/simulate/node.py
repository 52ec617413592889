"""One simulated engine: continuous batching over a prefix cache, in simulated time.

Requests start in order of arrival while rows and KV are available. A step computes one token of
each generating request, and the rest of its budget is for prompts. Between two events a node only
generates, so many steps are simulated at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.tools.simulate.engine_model import EngineModel, pairs_of

Blocks = tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request at a node.

    Attributes:
        arrived: time of arrival.
        prompt: number of prompt tokens.
        output: number of output tokens.
        blocks: names of the prompt's whole blocks.
        to_compute: number of prompt tokens that are not computed yet.
        left: number of output tokens that are not generated yet.
        cached: number of prompt tokens that were cached.
        first: time of the first token.
        last: time of the last token.
    """

    arrived: float
    prompt: int
    output: int
    blocks: Blocks
    to_compute: int = 0
    left: int = 0
    cached: int = 0
    first: float = math.nan
    last: float = math.nan


class BlockCache:
    """The cached blocks, in LRU order. Blocks of running requests are not evicted."""

    def __init__(self, blocks: int) -> None:
        self._most = blocks
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._used: dict[bytes, int] = {}
        self.running_blocks = 0
        """Number of running requests' blocks that are not in `_used`."""
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []

    def held(self, blocks: Blocks) -> int:
        """Counts how many of the first blocks are cached."""
        count = 0
        for name in blocks:
            if name not in self._used and name not in self._idle:
                break
            count += 1
        return count

    @property
    def busy(self) -> int:
        """Counts the blocks that cannot be evicted."""
        return len(self._used) + self.running_blocks

    @property
    def most(self) -> int:
        return self._most

    def use(self, blocks: Blocks, more: int) -> None:
        """Books a request's shared blocks, and `more` others."""
        for name in blocks:
            if name in self._used:
                self._used[name] += 1
                continue
            if name in self._idle:
                del self._idle[name]
            else:
                self.stored.append(name)
            self._used[name] = 1
        self.running_blocks += more
        self._evict()

    def leave(self, blocks: Blocks, more: int) -> None:
        """Releases a request's blocks. Longer prefixes will be evicted before shorter ones."""
        for name in reversed(blocks):
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]
                self._idle[name] = None
        self.running_blocks -= more
        self._evict()

    def add(self, blocks: Blocks) -> None:
        """Adds blocks that another node has computed."""
        self.use(blocks, 0)
        self.leave(blocks, 0)

    def _evict(self) -> None:
        while self._idle and len(self._idle) + self.busy > self._most:
            self.removed.append(self._idle.popitem(last=False)[0])


@dataclass(slots=True)
class SimulatedStep:
    """A run of equal steps in flight.

    Attributes:
        begin: time at which the first step begins.
        seconds: time of each step.
        count: number of steps. It is 1 if there are prompts.
        prompts: requests, and the number of prompt tokens that the step computes.
    """

    begin: float
    seconds: float
    count: int
    prompts: list[tuple[SimulatedRequest, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.begin + self.seconds * self.count


class SimulatedNode:
    """A simulated engine. `advance` must be called at `wakes`, and `add` in order of time."""

    def __init__(self, model: EngineModel, block_size: int) -> None:
        self.model = model
        self.cache = BlockCache(max(1, model.kv_tokens // block_size))
        self.waiting: deque[SimulatedRequest] = deque()
        self.prefilling: deque[SimulatedRequest] = deque()
        self.generating: list[SimulatedRequest] = []
        self.step: SimulatedStep | None = None
        self._size = block_size
        self._context = self._waiting_tokens = 0

    @property
    def wakes(self) -> float:
        """The time of the node's next event."""
        return math.inf if self.step is None else self.step.end

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens that are not computed yet."""
        return self._waiting_tokens + sum(request.to_compute for request in self.prefilling)

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Adds a request."""
        self.waiting.append(request)
        self._waiting_tokens += request.prompt
        step = self.step
        if step is None:
            self._begin(now)
        elif step.count > 1:
            # The request may start after the step that runs now.
            step.count = max(1, math.ceil((now - step.begin) / step.seconds))

    def advance(self, now: float) -> Iterable[SimulatedRequest]:
        """Ends the steps that are over. Returns the requests that end with them."""
        step = self.step
        if step is None or step.end > now:
            return ()
        self.step = None
        ended = self._end(step)
        self._begin(step.end)
        return ended

    def _end(self, step: SimulatedStep) -> list[SimulatedRequest]:
        ended = []
        for request in self.generating:
            request.left -= step.count
            if request.left <= 0:
                request.last = step.end
                ended.append(request)
        self._context += step.count * len(self.generating)
        for request, tokens in step.prompts:
            request.to_compute -= tokens
            if not request.to_compute:
                # Until now the prompt's attention was counted by pairs.
                self._context += request.prompt
                self.prefilling.remove(request)
                request.first, request.left = step.end, request.output - 1
                if request.left:
                    self.generating.append(request)
                else:
                    request.last = step.end
                    ended.append(request)
        if ended:
            gone = set(map(id, ended))
            self.generating = [each for each in self.generating if id(each) not in gone]
            for request in ended:
                self._context -= request.prompt + request.output - 1
                self.cache.leave(request.blocks, self._own_blocks(request))
        return ended

    def _own_blocks(self, request: SimulatedRequest) -> int:
        return -(-(request.prompt + request.output) // self._size) - len(request.blocks)

    def _start_waiting(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            rows = len(self.generating) + len(self.prefilling)
            held = self.cache.held(request.blocks)
            own = self._own_blocks(request)
            fits = self.cache.busy + own + len(request.blocks) - held <= self.cache.most
            if rows >= self.model.max_rows or (rows and not fits):
                return
            self.waiting.popleft()
            self._waiting_tokens -= request.prompt
            request.cached = min(held * self._size, request.prompt - 1)
            request.to_compute = request.prompt - request.cached
            self.cache.use(request.blocks, own)
            self.prefilling.append(request)

    def _begin(self, now: float) -> None:
        """Begins the next steps, if there is anything to compute."""
        self._start_waiting()
        room = self.model.max_tokens - len(self.generating)
        prompts: list[tuple[SimulatedRequest, int]] = []
        pairs = 0.0
        for request in self.prefilling:
            if room <= 0:
                break
            tokens = min(room, request.to_compute)
            prompts.append((request, tokens))
            pairs += pairs_of(request.prompt - request.to_compute, tokens)
            room -= tokens
        if not prompts and not self.generating:
            return
        count = 1
        if not prompts:
            count = min(request.left for request in self.generating)
        tokens, rows = sum(tokens for _, tokens in prompts), len(self.generating)
        # All steps take the time of the step in the middle.
        context = self._context + rows * (count - 1) // 2
        self.step = SimulatedStep(
            now, self.model.step(tokens, rows, context, pairs), count, prompts
        )
