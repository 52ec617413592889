"""Drives a scheduler and checks it from the inside after every call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache import BlockManager, DetachedBlocks, PrefixTree
from quire.cache.block_tables import BlockTables
from quire.cache.node import NO_BLOCK, Node
from quire.cache.state_slots import StateSlots
from quire.plan import RowFlag, StepPlan
from quire.request import Request, RequestStatus
from quire.scheduler import Scheduler
from quire.scheduler.fair_share import FairShare
from tests.fakes import FakeExecutor


def nodes_of(tree: PrefixTree) -> list[Node]:
    """Returns all nodes except the roots."""
    found: list[Node] = []
    stack = list(tree._roots.values())
    while stack:
        children = list(stack.pop().children.values())
        found.extend(children)
        stack.extend(children)
    return found


def check_blocks(
    manager: BlockManager, lanes: Sequence[int], detached: Sequence[DetachedBlocks] = ()
) -> None:
    """Checks that no block is lost, freed twice or counted wrongly. Recounts the holders from the
    occupied lanes and the detached blocks."""
    tree = manager.tree
    nodes = nodes_of(tree)
    assert len(nodes) == tree.num_nodes
    users = {id(node): 0 for node in nodes}
    lasts = [manager.lanes.last(lane) for lane in lanes]
    for last in lasts + [each.last for each in detached if each.last is not None]:
        at: Node | None = last
        while at is not None and at.parent is not None:
            users[id(at)] += 1
            at = at.parent
    if manager.caching:
        for lane, last in zip(lanes, lasts, strict=True):
            for g in (g for g in range(len(manager.groups)) if manager.groups[g].sparse is None):
                # A node in use without its block would make the block unusable.
                table = manager.groups[g].table[lane, : last.end]
                assert last.path(g, 0, last.end).tolist() == table.tolist()
    for node in nodes:
        assert node.users == users[id(node)]
        assert (node.users == 0) == (node in tree._idle)
        check_node(node, tree.block_size)
    order = {id(node): place for place, node in enumerate(tree._idle)}
    for node in tree._idle:
        assert all(order[id(child)] < order[id(node)] for child in node.children.values())
    assert tree.num_idle == sum(node.count for node in tree._idle)
    for g, group in enumerate(manager.groups):
        holders = np.zeros(group.pool.num_blocks, dtype=np.int64)
        for lane in lanes:
            np.add.at(holders, group.held(lane), 1)
        for each in detached:
            np.add.at(holders, each.blocks[g], 1)
        np.add.at(holders, on_their_way(group), 1)
        of_tree = [block for node in nodes for block in node.blocks[g] if block != NO_BLOCK]
        assert len(set(of_tree)) == len(of_tree)
        unheld = {block for block in of_tree if not holders[block]}
        holders[of_tree] += 1
        if group.sparse is None:
            assert len(of_tree) == sum(node.count for node in nodes)
        assert (group.pool.holders == holders).all()
        assert group.pool.num_free == int((holders == 0).sum())
        if group.sparse is not None:
            places = group.sparse.places()
            assert set(places) == unheld
            for block, (node, place) in places.items():
                owner = node.upto(place + 1)
                assert owner.blocks[g][place - owner.start] == block
        else:
            # Evicting an idle node frees its blocks, so they do count as available.
            assert all((holders[list(node.blocks[g])] == 1).all() for node in tree._idle)
    check_free_list(manager)


def on_their_way(group: BlockTables) -> list[int]:
    """Returns the slots of new states that belong neither to the tree nor to a lane."""
    if not isinstance(group, StateSlots):
        return []
    assert not group._new
    return [saved.slot for of_lane in group._saved.values() for saved in of_lane]


def check_node(node: Node, block_size: int) -> None:
    """Checks a node's shape and its children's."""
    stride = 4 * block_size
    assert node.count > 0
    assert len({len(ids) for ids in node.blocks}) == 1
    assert node.written <= node.count
    if len(node.run) % stride:
        assert (node.count, node.users, len(node.children)) == (1, 0, 0)
        assert len(node.run) < stride
    else:
        assert len(node.run) == node.count * stride
    order = [] if node.order is None else node.order.keys()
    for key, child in node.children.items():
        assert child.parent is node
        assert child.start == node.end
        assert bytes(child.run[:stride]) == child.first_tokens == key
        tail = len(key) < stride
        assert not any(o.startswith(key) for o in order if tail and o != key)
    assert order == sorted(key for key, child in node.children.items() if child.written)


def check_free_list(manager: BlockManager) -> None:
    for group in manager.groups:
        pool = group.pool
        free = pool._returned[: pool._num_returned].tolist()
        assert len(free) == len(set(free))
        assert not pool.holders[free].any()
        assert not pool.holders[pool._fresh :].any()


def check_rows_held(scheduler: Scheduler, plan: StepPlan) -> None:
    """Checks that blocks and slots a row may read or write are not free when it is planned."""
    lanes = scheduler._lanes
    for lane in plan.lanes.tolist():
        floor = int(lanes.computed[lane])
        for group in scheduler.blocks.groups:
            if isinstance(group, StateSlots):
                assert group.pool.holders[group.held(lane)].tolist() == [1]
                continue
            size = group.block_size
            last = -(-int(lanes.planned[lane]) // size)
            first = group.first_needed(
                max(floor, int(lanes.planned[lane] - lanes.drafted[lane]) - 1)
            )
            assert group.end[lane] >= last
            assert (group.pool.holders[group.table[lane, first:last]] > 0).all()


def check_scheduler(scheduler: Scheduler) -> None:
    """Checks the invariants that hold between any two calls."""
    running = [entry[2] for entry in scheduler._running.entries]
    lanes = [request.lane for request in running]
    assert len(set(lanes)) == len(lanes)
    blocks = scheduler.blocks
    loading_lanes = range(len(scheduler._lanes.last), len(blocks.lanes.inserted))
    loading = [lane for lane in loading_lanes if lane not in blocks.loading_lanes]
    check_blocks(blocks, lanes + loading, list(scheduler._detached.values()))
    assert all(r.status is RequestStatus.RUNNING for r in running)
    assert all(r.computed <= r.planned < r.max_total for r in running)
    assert all(r.known <= r.max_total for r in running)
    generating = scheduler._running.generating
    assert generating.requests == [r for r in generating.requests if r.generating]
    assert generating.lanes.tolist() == [r.lane for r in generating.requests]
    assert len(generating.requests) == sum(r.generating for r in running)
    assert scheduler.num_running + scheduler.num_waiting == len(scheduler._requests)
    order, requests = scheduler._order, list(scheduler._requests.values())
    waiting = [r for r in requests if r.status is RequestStatus.WAITING]
    assert len(order) == len(waiting)
    assert order.tokens == sum(r.known for r in waiting)
    if isinstance(order, FairShare):
        check_tenants(order, requests)


def check_tenants(queue: FairShare, requests: list[Request]) -> None:
    """Recounts each tenant's requests, lanes and tokens."""
    assert queue.contested == (len({r.tenant for r in requests}) > 1)
    assert len(queue._turns) == len(set(queue._turns))
    for name, tenant in queue._tenants.items():
        of_it = [r for r in requests if r.tenant == name]
        assert tenant.requests == len(of_it)
        assert tenant.lanes == sum(r.status is RequestStatus.RUNNING for r in of_it)
        assert len(tenant.queue) == sum(r.status is RequestStatus.WAITING for r in of_it)
        assert tenant.queued == (tenant in queue._turns)
        assert tenant.queued or not len(tenant.queue)


class Loop:
    """Drives a scheduler and a fake executor, and collects the results of requests."""

    def __init__(self, scheduler: Scheduler, executor: FakeExecutor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, Request] = {}
        self.prompt_logprobs: dict[str, dict[int, float]] = {}
        self.plans: list[StepPlan] = []

    def launch(self) -> bool:
        """Plans and submits a step; returns whether there was one."""
        plan = self.scheduler.plan()
        check_scheduler(self.scheduler)
        if plan is None:
            return False
        if not plan.num_rows:
            assert not plan.admits
            self.executor.submit(plan)
            return True
        check_rows_held(self.scheduler, plan)
        assert plan.num_tokens <= self.scheduler._config.max_num_batched_tokens
        assert len(set(plan.lanes.tolist())) == plan.num_rows > 0
        generating = (plan.flags & RowFlag.PROMPT) == 0
        sampled = int(plan.n_logits[generating].sum())
        sampled += int(((plan.flags[~generating] & RowFlag.SAMPLE) != 0).sum())
        most = self.executor.capacity.logit_rows or self.scheduler._config.max_num_seqs
        assert sampled <= most
        self.plans.append(plan)
        self.executor.submit(plan)
        return True

    def collect(self) -> None:
        """Updates the scheduler with the oldest result."""
        progress = self.scheduler.update(self.executor.collect())
        for one in progress:
            name = one.request.request_id
            self.outputs.setdefault(name, []).extend(one.new_tokens.tolist())
            if one.prompt_logprobs is not None:
                seen = self.prompt_logprobs.setdefault(name, {})
                for position, value in zip(
                    one.prompt_logprobs.positions.tolist(),
                    one.prompt_logprobs.values[:, 0].tolist(),
                    strict=True,
                ):
                    assert position not in seen
                    seen[position] = value
            if one.finished:
                assert name not in self.finished
                self.finished[name] = one.request
                assert one.request.output.tolist() == self.outputs[name]
                times = one.request.times
                assert not times.phase
                assert all(seconds >= 0 for seconds in times.delays.values())
        check_scheduler(self.scheduler)

    def step(self) -> None:
        """Launches a step if possible; otherwise collects a result."""
        if not self.launch():
            assert self.scheduler.num_in_flight, "nothing runs, and nothing can be launched"
            self.collect()

    def drain(self, most: int = 100_000) -> None:
        """Runs until every request has ended."""
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("requests do not end")
