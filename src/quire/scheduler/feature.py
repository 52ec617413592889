"""What a feature may hook into the scheduler. The scheduler knows features by this interface only.

A feature overrides the methods it needs; the scheduler never calls one that is not overridden, so
that a feature costs nothing where it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager, Evicted
from quire.errors import RequestError
from quire.plan import Admit, RowFlag, StepPlan, Transfer
from quire.request import Request


class Feature:
    """Does nothing: the base of features, and the definition of their interface."""

    def admit(self, request: Request) -> RequestError | None:
        """When a request arrives. An error refuses it, and is what the user sees."""
        return None

    def ready(self, request: Request) -> bool:
        """Whether the request may be queued. False parks it until `Scheduler.wake`, which asks
        again."""
        return True

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        """Once, before anything else: the scheduler's blocks, and its `wake`."""

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        """A request is about to start, and may take up to `limit` of its tokens, int32 [known],
        from the cache. True parks it until `wake`: blocks of it that the device does not hold are
        on their way there."""
        return False

    def evict(self, blocks: Sequence[Evicted]) -> None:
        """These blocks leave the prefix tree, and may be overwritten by the next step planned. Its
        plan is the last that may move them out."""

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        """Transfers, by their ids, that ended."""

    def pending(self, idle: bool) -> bool:
        """Whether a step must be launched even if it has no rows: there are transfers to send or,
        with no step in flight (`idle`), some to wait for."""
        return False

    def preempt(self, request: Request) -> bool:
        """A request is about to be preempted. Whether what it has computed is to be brought back,
        should it lose its blocks, rather than computed again."""
        return False

    def forget(self) -> None:
        """All prefixes are forgotten."""

    def reusable(self, request: Request, n: int) -> int:
        """How many of its first `n` tokens a request that is about to start may take from the
        cache: fewer where hidden states of earlier positions are wanted."""
        return n

    def lookahead(self, request: Request, room: int) -> int:
        """How many draft tokens to book for a generating request's next row, at most `room`."""
        return 0

    def plan(self, builder: PlanBuilder) -> None:
        """Add to a step whose rows are settled."""

    def result(self, request: Request, tokens: Int32) -> int:
        """How many of a row's new tokens (int32 [n]) to keep. Keeping fewer than `n` takes the
        request off its lane: it goes on from the kept tokens by recomputing."""
        return len(tokens)

    def release(self, request: Request) -> bool:
        """When a request gives its blocks back (it ended or was preempted). True keeps the blocks
        of an ended request as they are until `Scheduler.free_detached`."""
        return False


class PlanBuilder:
    """A step whose rows are settled, open for features to add to.

    requests: the rows' requests, in row order. lanes, q_len, n_logits: int32 [R], read-only.
    """

    def __init__(self, plan: StepPlan, requests: list[Request]) -> None:
        self._plan = plan
        self.requests = requests

    @property
    def step_id(self) -> int:
        return self._plan.step_id

    @property
    def admits(self) -> list[Admit]:
        """The requests that take their lanes in this step."""
        return self._plan.admits

    @property
    def lanes(self) -> Int32:
        return self._plan.lanes

    @property
    def q_len(self) -> Int32:
        return self._plan.q_len

    @property
    def n_logits(self) -> Int32:
        return self._plan.n_logits

    @property
    def flags(self) -> Int32:
        return self._plan.flags

    def gate(self, rows: Sequence[int]) -> None:
        """The heads of these rows wait for `HeadInputs`."""
        # The flags of steady steps are shared between plans, so they are replaced, not changed.
        flags = self._plan.flags.copy()
        flags[list(rows)] |= int(RowFlag.GATED)
        self._plan.flags = flags

    def skip_sampling(self, rows: Sequence[int]) -> None:
        """These rows, which end their prompts, give no token."""
        flags = self._plan.flags.copy()
        flags[list(rows)] &= ~int(RowFlag.SAMPLE)
        self._plan.flags = flags

    def write(self, column: str, lanes: Int32, values: Int32) -> None:
        """Set a per-lane column: lanes int32 [n], values int32 [n, ...]."""
        lanes, values = int32(lanes), int32(values)
        if column in self._plan.writes:
            before_lanes, before_values = self._plan.writes[column]
            lanes = np.concatenate([before_lanes, lanes])
            values = np.concatenate([before_values, values])
        self._plan.writes[column] = (lanes, values)

    def set_host_drafts(self, drafts: Int32) -> None:
        """int32 [R, K], padded with -1."""
        self._plan.host_drafts = drafts

    def transfer(self, transfer: Transfer) -> None:
        self._plan.transfers.append(transfer)
