"""What the engine is at, for someone who looks: made when asked for, from what is there anyway."""

from __future__ import annotations

import time
from itertools import islice

import msgspec

from quire.arrays import Int32
from quire.cache.inspect import summarize_pool, summarize_tree
from quire.engine.core import EngineCore
from quire.engine.stats import EngineStats
from quire.request import Request, RequestStatus
from quire.scheduler.lanes import Launched

MOST_CELLS = 4096
MOST_RUNNING = 128
MOST_WAITING = 64
MOST_ROWS = 256
MOST_RUNS = 160
_LOOKED_AT = 4096
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
    """A request with a lane. cached: tokens of its prompt that were found. since, first: seconds of
    the engine's clock, at which it came and had its first token. blocks: of the first KV group."""

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


class Waiting(msgspec.Struct, array_like=True):
    """A request without a lane. parked: something other than room keeps it waiting."""

    id: str
    tokens: int
    since: float
    parked: bool
    preemptions: int


class Row(msgspec.Struct, array_like=True):
    """A request's share of a step, in tokens; `prompt` tokens, or generated ones."""

    id: str
    lane: int
    tokens: int
    prompt: bool


class Step(msgspec.Struct):
    """A step that was launched; `rows` may leave some out, the sums do not."""

    number: int
    prompt_tokens: int
    generating: int
    rows: list[Row]


class Branch(msgspec.Struct, array_like=True):
    """As `quire.cache.inspect.TreeRun`; tokens: None where they were not asked for."""

    parent: int
    length: int
    users: int
    hidden: int
    tokens: Int32 | None


class Snapshot(msgspec.Struct):
    """time: the engine's clock, in seconds. budget: most tokens of a step. step: the last one;
    prompt_step: the last one with a part of a prompt. firsts: the last requests to get a first
    token, by number, and after how many seconds."""

    time: float
    block_size: int
    budget: int
    lanes: int
    stats: EngineStats
    pools: list[Pool]
    running: list[Running]
    waiting: list[Waiting]
    step: Step | None
    prompt_step: Step | None
    firsts: list[tuple[int, float]]
    tree: list[Branch]
    tree_nodes: int


def take_snapshot(core: EngineCore, tokens: bool) -> Snapshot:
    """Bounded in size and time, whatever the engine holds. tokens: with those of the prefix tree,
    which are what users have sent."""
    blocks = core.scheduler.blocks
    running, waiting = _requests(core)
    return Snapshot(
        time=time.monotonic(),
        block_size=blocks.block_size,
        budget=core.config.scheduler.max_num_batched_tokens,
        lanes=core.config.scheduler.max_num_seqs,
        stats=core.stats(),
        pools=_pools(core),
        running=running,
        waiting=waiting,
        step=_step(core.scheduler.last_step),
        prompt_step=_step(core.scheduler.last_prompt_step),
        firsts=list(core.telemetry.firsts),
        tree=[
            Branch(run.parent, run.length, run.users, run.hidden, run.tokens if tokens else None)
            for run in summarize_tree(blocks.tree, MOST_RUNS, _TOKENS_SHOWN)
        ],
        tree_nodes=blocks.tree.num_nodes,
    )


def _pools(core: EngineCore) -> list[Pool]:
    pools = []
    for group in core.scheduler.blocks.groups:
        found = summarize_pool(group, MOST_CELLS)
        pools.append(
            Pool(
                group.window,
                group.pool.num_blocks,
                found.per_cell,
                found.owner,
                found.holders,
                found.filled,
            )
        )
    return pools


def _requests(core: EngineCore) -> tuple[list[Running], list[Waiting]]:
    running: list[Running] = []
    waiting: list[Waiting] = []
    tables = core.scheduler.blocks.groups[0]
    for request in islice(core.scheduler.requests(), _LOOKED_AT):
        if request.status is not RequestStatus.RUNNING:
            if len(waiting) < MOST_WAITING:
                waiting.append(_waiting(request))
        elif len(running) < MOST_RUNNING:
            held = int(tables.end[request.lane] - tables.start[request.lane])
            running.append(_running(request, held))
        if len(waiting) == MOST_WAITING and len(running) == MOST_RUNNING:
            break
    return running, waiting


def _running(request: Request, blocks: int) -> Running:
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
    )


def _waiting(request: Request) -> Waiting:
    return Waiting(
        _name(request),
        request.known,
        request.arrival,
        request.status is RequestStatus.PARKED,
        request.num_preemptions,
    )


def _name(request: Request) -> str:
    """Short: the first completion's index is left out."""
    return request.request_id.removesuffix("/0")


def _step(step: Launched | None) -> Step | None:
    if step is None:
        return None
    tokens, split = step.q_len, step.num_generating
    # Prompts come last; where all are too many, they are what is shown, and generating rows before.
    first = max(0, len(step.requests) - MOST_ROWS)
    rows = [
        Row(_name(request), int(step.lanes[place]), int(tokens[place]), place >= split)
        for place, request in enumerate(step.requests[first:], first)
    ]
    return Step(step.step_id, int(tokens[split:].sum()), int(tokens[:split].sum()), rows)
