"""A snapshot of the engine's state for display, made on request."""

from __future__ import annotations

import time

import msgspec

from quire.arrays import Int32
from quire.cache.inspect import summarize as summarize_blocks
from quire.engine.loop.core import EngineCore
from quire.engine.loop.stats import EngineStats
from quire.request import Request, RequestStatus
from quire.scheduler import Scheduler
from quire.scheduler.inspect import StepSummary
from quire.scheduler.inspect import summarize as summarize_requests

MOST_CELLS = 4096
MOST_RUNNING = 128
MOST_WAITING = 64
MOST_ROWS = 256
MOST_RUNS = 160
_TOKENS_SHOWN = 24


class Pool(msgspec.Struct):
    """One KV group's blocks, as cells: see `quire.cache.inspect.PoolSummary`."""

    window: int | None
    blocks: int
    per_cell: int
    owner: Int32
    holders: Int32
    filled: Int32


class Running(msgspec.Struct, array_like=True):
    """A request with a lane.

    Attributes:
        cached: prompt tokens that were found in the prefix cache.
        since: time of its arrival, in seconds of the engine's clock.
        first: time of its first token, by the same clock.
        blocks: its blocks of the first KV group.
        delays: seconds so far by cause; see `RequestTimes`.
    """

    id: str
    lane: int
    prompt: int
    cached: int
    computed: int
    known: int
    most: int
    blocks: int
    since: float
    first: float | None
    preemptions: int
    delays: dict[str, float]


class Waiting(msgspec.Struct, array_like=True):
    """A request without a lane.

    Attributes:
        parked: whether it waits for something else than a free lane or block.
        cause: what it waits for; see `RequestTimes.phase`.
    """

    id: str
    tokens: int
    since: float
    parked: bool
    preemptions: int
    cause: str


class Row(msgspec.Struct, array_like=True):
    """A request's share of a step. `prompt`: its tokens are prompt tokens, not generated ones."""

    id: str
    lane: int
    tokens: int
    prompt: bool


class StepSnapshot(msgspec.Struct):
    """A launched step. `rows` may leave some requests out, but the sums count all of them."""

    number: int
    prompt_tokens: int
    generating: int
    rows: list[Row]


class Branch(msgspec.Struct, array_like=True):
    """See `quire.cache.inspect.TreeRun`. tokens: None if the caller did not ask for tokens."""

    parent: int
    length: int
    users: int
    hidden: int
    tokens: Int32 | None


class Snapshot(msgspec.Struct):
    """The engine's state.

    Attributes:
        time: time of the engine's clock, in seconds.
        budget: most tokens of a step.
        step: the last step.
        prompt_step: the last step that computed prompt tokens.
        firsts: the latest first tokens: number of the request, and seconds from its arrival.
    """

    time: float
    block_size: int
    budget: int
    lanes: int
    stats: EngineStats
    pools: list[Pool]
    running: list[Running]
    waiting: list[Waiting]
    step: StepSnapshot | None
    prompt_step: StepSnapshot | None
    firsts: list[tuple[int, float]]
    tree: list[Branch]
    tree_nodes: int


def take_snapshot(core: EngineCore, tokens: bool) -> Snapshot:
    """Describes the engine. Size and time are bounded, however much the engine holds.

    Args:
        tokens: includes the tokens of the prefix tree, which are the text of users.
    """
    blocks = summarize_blocks(core.scheduler.blocks, MOST_CELLS, MOST_RUNS, _TOKENS_SHOWN)
    requests = summarize_requests(core.scheduler, MOST_RUNNING, MOST_WAITING, MOST_ROWS)
    return Snapshot(
        time=time.monotonic(),
        block_size=core.scheduler.blocks.block_size,
        budget=core.config.scheduler.max_num_batched_tokens,
        lanes=core.config.scheduler.max_num_seqs,
        stats=core.stats(),
        pools=[
            Pool(p.window, p.num_blocks, p.per_cell, p.owner, p.holders, p.filled)
            for p in blocks.pools
        ],
        running=[_running(core.scheduler, request, held) for request, held in requests.running],
        waiting=[_waiting(request) for request in requests.waiting],
        step=_step(requests.step),
        prompt_step=_step(requests.prompt_step),
        firsts=list(core.telemetry.firsts),
        tree=[
            Branch(run.parent, run.length, run.users, run.hidden, run.tokens if tokens else None)
            for run in blocks.runs
        ],
        tree_nodes=blocks.num_nodes,
    )


def _running(scheduler: Scheduler, request: Request, blocks: int) -> Running:
    scheduler.delays.settle(request)
    times = request.times
    return Running(
        _name(request),
        request.lane,
        request.prompt_len,
        request.num_cached_tokens,
        request.computed,
        request.known,
        request.max_total,
        blocks,
        times.arrival,
        times.first_token,
        request.num_preemptions,
        times.delays,
    )


def _waiting(request: Request) -> Waiting:
    return Waiting(
        _name(request),
        request.known,
        request.arrival,
        request.status is RequestStatus.PARKED,
        request.num_preemptions,
        request.times.phase,
    )


def _name(request: Request) -> str:
    """Returns the request's id. The index of the first completion is left out."""
    return request.request_id.removesuffix("/0")


def _step(step: StepSummary | None) -> StepSnapshot | None:
    if step is None:
        return None
    columns = step.lanes.tolist(), step.q_len.tolist(), step.prompt.tolist()
    rows = [
        Row(_name(request), lane, tokens, prompt)
        for request, lane, tokens, prompt in zip(step.requests, *columns, strict=True)
    ]
    return StepSnapshot(step.step_id, step.prompt_tokens, step.generating, rows)
