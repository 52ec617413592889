"""The interface of features. The scheduler knows features only by this interface.

A feature overrides the methods it needs. The scheduler never calls a method that is not overridden,
so a feature costs nothing where it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager, Evicted
from quire.errors import RequestError
from quire.plan import Admit, RowFlag, StepPlan, StepResult, Transfer
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.lanes import Flags
from quire.scheduler.step import StepInFlight


class Feature:
    """The base of features, and the definition of their interface. Its methods do nothing.

    The methods are in the order in which the scheduler calls them.

    Attributes:
        waits_for: what a request waits for while `ready` is false. A label of metrics.
    """

    waits_for = "feature"

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        """Gives the feature the scheduler's blocks and its `wake`. Called once, before all else."""

    # -- a request, from its arrival to its lane -----------------------------------------------

    def admit(self, request: Request) -> RequestError | None:
        """Checks an arriving request. An error refuses it, and is shown to the user."""
        return None

    def ready(self, request: Request) -> bool:
        """Whether the request may be queued. False parks it until `Scheduler.wake`, which asks
        again."""
        return True

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        """Returns whether the feature loads blocks for a request that is about to start.

        True parks the request until `Scheduler.wake`. The feature loads blocks that the device does
        not have.

        Args:
            tokens: int32 [known].
            limit: how many of them the request may take from the cache.
        """
        return False

    def reusable(self, request: Request, n: int) -> int:
        """Returns how many of its first `n` tokens a request may take from the cache.

        The number is below `n` if the feature needs hidden states of earlier positions, or if the
        request cannot go on from position `n`. The scheduler asks again about each shorter prefix.
        """
        return n

    def device_params(self, request: Request, params: SamplingParams) -> SamplingParams:
        """Returns the parameters that the device applies to a request that gets a lane.

        A feature removes the parameters that it applies itself.

        Args:
            params: the parameters that earlier features have not removed.
        """
        return params

    # -- a step --------------------------------------------------------------------------------

    def prompt_end(self, request: Request, start: int, end: int) -> int:
        """Returns the position, from `start` to `end`, at which the next step ends its part of the
        prompt. With `start`, the step leaves the request out.

        The scheduler may drop the row afterwards; `plan` shows the rows of the step.

        Args:
            start: the first position that the step would compute.
            end: the end of the positions that fit the step.
        """
        return end

    @property
    def proposes_drafts(self) -> bool:
        """Whether `lookahead` may ask for drafts."""
        return type(self).lookahead is not Feature.lookahead

    @property
    def drafting(self) -> bool:
        """Whether `lookahead` may ask for drafts in the next step."""
        return True

    @property
    def certain(self) -> bool:
        """Whether all drafts of the feature are accepted.

        The scheduler asks such features first. All drafts of a row come from one feature.
        """
        return False

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        """Returns the most draft tokens that each row verifies in the next step, int32 [n].

        The scheduler may cut the counts. The feature writes the drafts themselves in `plan`, as
        claims (see `StepPlan`). The executor must verify drafts (`Capacity.drafts`).

        Args:
            lanes: int32 [n], the lanes of generating rows.
            room: int32 [n], the most draft tokens that each row could have.
        """
        return np.zeros_like(lanes)

    def pending(self, idle: bool) -> bool:
        """Whether a step must be launched even without rows.

        A step is needed if there are transfers to send. With no step in flight (`idle`), it is also
        needed if there are transfers to wait for.
        """
        return False

    def plan(self, builder: PlanBuilder) -> None:
        """Adds the feature's data to a step whose rows are final. Features are called in the order
        of registration."""

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        """Receives the ids of transfers that ended."""

    def verified(self, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        """Receives the results of a step with drafts.

        Args:
            lanes: int32 [n], the lanes of generating rows.
            drafts: int32 [n], number of drafts that each row verified.
            accepted: int32 [n], number of tokens that each row produced.
        """

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        """Receives the lanes whose rows were late (`StopReason.LATE`), int32 [n] each.

        The scheduler plans no row of such a lane until `inputs_ready`. It calls `late` before
        `verified`, which does not receive these rows.

        Args:
            rows: number of each lane's generating rows that give no token: the late row, unless it
                is a prompt's, and the rows in flight after it.
            tokens: number of positions of these rows.
        """

    def inputs_ready(self, lanes: Int32) -> Flags:
        """Returns whether the host now has the late inputs of each lane, int32 [n]: bool [n]."""
        return np.ones(len(lanes), dtype=bool)

    def result(self, request: Request, tokens: Int32) -> int:
        """Returns how many of a row's new tokens, int32 [n], to keep.

        If it keeps fewer than `n`, the request is preempted, and continues from the kept tokens.
        """
        return len(tokens)

    # -- a request that gives its lane back, or ends -------------------------------------------

    def preempt(self, request: Request) -> bool:
        """Called before a request is preempted. Returns whether the feature will bring its blocks
        back, so that they need not be computed again."""
        return False

    def release(self, request: Request) -> bool:
        """Called when a request gives its blocks back, because it ended or was preempted.

        True keeps the blocks of an ended request as they are until `Scheduler.free_detached`.
        """
        return False

    def finish(self, request: Request) -> None:
        """Called when a request has ended, or when any feature has refused it. No call about the
        request follows."""

    # -- other weights -------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Called before the first step with other weights is planned. KV of earlier steps is of no
        use to later requests: their namespaces differ."""

    # -- prefixes that leave the cache ---------------------------------------------------------

    def evict(self, blocks: Sequence[Evicted]) -> None:
        """Receives blocks that leave the prefix tree.

        The next step may overwrite them. That step's plan is the last that may move them out.
        """

    def forget(self) -> None:
        """Called when all prefixes are forgotten."""


class PlanBuilder:
    """A step with final rows, to which features add their data.

    Attributes:
        requests: the rows' requests, in row order.
        lanes: int32 [R], read-only.
        q_len: int32 [R], read-only.
        n_logits: int32 [R], read-only.
        flags: int32 [R], read-only.
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

    @property
    def writes(self) -> Mapping[str, tuple[Int32, Int32]]:
        """The columns written so far."""
        return self._plan.writes

    def gate(self, rows: Sequence[int]) -> None:
        """Makes the head wait for these rows' inputs (`Executor.host_inputs`)."""
        # Steady steps share the array of flags, so it is replaced, not changed.
        flags = self._plan.flags.copy()
        flags[list(rows)] |= int(RowFlag.GATED)
        self._plan.flags = flags

    def skip_sampling(self, rows: Sequence[int]) -> None:
        """Makes these rows, which end their prompts, sample no token."""
        flags = self._plan.flags.copy()
        flags[list(rows)] &= ~int(RowFlag.SAMPLE)
        self._plan.flags = flags

    def write(self, column: str, lanes: Int32, values: Int32) -> None:
        """Sets a per-lane column: lanes int32 [n], values int32 [n, ...]."""
        lanes, values = int32(lanes), int32(values)
        if column in self._plan.writes:
            before_lanes, before_values = self._plan.writes[column]
            lanes = np.concatenate([before_lanes, lanes])
            values = np.concatenate([before_values, values])
        self._plan.writes[column] = (lanes, values)

    def transfer(self, transfer: Transfer) -> None:
        """Adds a transfer."""
        self._plan.transfers.append(transfer)


class FeatureSet:
    """All features of a scheduler. It calls a method only for features that override it.

    Attributes:
        verified: bound methods `Feature.verified`, which the scheduler calls itself.
        looks_ahead: the features that propose drafts.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self._calls: dict[str, list[Callable[..., Any]]] = {
            name: []
            for name, method in vars(Feature).items()
            if not name.startswith("_") and callable(method)
        }
        """By method, the bound methods of the features that override it."""
        self.verified = self._calls["verified"]
        self.looks_ahead: list[Feature] = []
        for feature in features:
            self.add(feature)

    def add(self, feature: Feature) -> None:
        for name, calls in self._calls.items():
            if getattr(type(feature), name) is not getattr(Feature, name):
                calls.append(getattr(feature, name))
        if feature.proposes_drafts:
            self.looks_ahead.append(feature)
            self.looks_ahead.sort(key=lambda each: not each.certain)

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        for attach in self._calls["attach"]:
            attach(blocks, wake)
        blocks.on_evict = self._calls["evict"]

    def admit(self, request: Request) -> None:
        """Raises the first refusal, after all features know that the request has ended."""
        try:
            for admit in self._calls["admit"]:
                if refusal := admit(request):
                    raise refusal
        except Exception:
            # If a feature refuses the request or fails, the others must still forget the request.
            self.finish(request)
            raise

    def unready(self, request: Request) -> str | None:
        """Returns what the request waits for before it can be queued, or None."""
        for ready in self._calls["ready"]:
            if not ready(request):
                feature: Feature = ready.__self__  # type: ignore[attr-defined]
                return feature.waits_for
        return None

    @property
    def fetches(self) -> bool:
        """Whether any feature loads blocks."""
        return bool(self._calls["fetch"])

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        return any(fetch(request, tokens, limit) for fetch in self._calls["fetch"])

    def reusable(self, request: Request, n: int) -> int:
        for reusable in self._calls["reusable"]:
            n = min(n, reusable(request, n))
        return n

    @property
    def limits_prompts(self) -> bool:
        """Whether any feature ends parts of prompts."""
        return bool(self._calls["prompt_end"])

    def prompt_end(self, request: Request, start: int, end: int) -> int:
        for prompt_end in self._calls["prompt_end"]:
            end = prompt_end(request, start, end)
        return end

    def device_params(self, request: Request) -> SamplingParams:
        params = request.params
        for device_params in self._calls["device_params"]:
            params = device_params(request, params)
        return params

    @property
    def drafting(self) -> bool:
        """Whether any feature may ask for drafts in the next step."""
        return any(feature.drafting for feature in self.looks_ahead)

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        """Returns the most drafts that any feature proposes for each row, at most `room`."""
        counts = np.zeros_like(lanes)
        for feature in [each for each in self.looks_ahead if each.drafting]:
            own = np.minimum(feature.lookahead(lanes, room), room)
            counts = np.maximum(counts, own)
            if feature.certain and own.any():
                room = np.where(own > 0, 0, room)
        return counts

    def preempt(self, request: Request) -> bool:
        # A list, because every feature must be called even after one of them has agreed.
        answers = [preempt(request) for preempt in self._calls["preempt"]]
        return any(answers)

    def release(self, request: Request) -> bool:
        answers = [release(request) for release in self._calls["release"]]
        return any(answers)

    def finish(self, request: Request) -> None:
        for finish in self._calls["finish"]:
            finish(request)

    def pending(self, idle: bool) -> bool:
        return any(pending(idle) for pending in self._calls["pending"])

    def forget(self) -> None:
        for forget in self._calls["forget"]:
            forget()

    def weights_changed(self) -> None:
        for weights_changed in self._calls["weights_changed"]:
            weights_changed()

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        for late in self._calls["late"]:
            late(lanes, rows, tokens)

    def inputs_ready(self, lanes: Int32) -> Flags:
        """Returns whether all features have the late inputs of each lane by now."""
        ready: Flags = np.ones(len(lanes), dtype=bool)
        for inputs_ready in self._calls["inputs_ready"]:
            ready &= inputs_ready(lanes)
        return ready

    def plan(self, plan: StepPlan, requests: list[Request]) -> None:
        if self._calls["plan"]:
            builder = PlanBuilder(plan, requests)
            for add in self._calls["plan"]:
                add(builder)

    def transferred(self, result: StepResult) -> None:
        if result.finished_transfers or result.failed_transfers:
            for transferred in self._calls["transferred"]:
                transferred(result.finished_transfers, result.failed_transfers)

    def cut(self, step: StepInFlight, tokens: Int32, n: Int32) -> list[int]:
        """Lets features keep fewer tokens of a row. Returns the rows that lost tokens.

        Args:
            tokens: int32 [R, W].
            n: int32 [R], number of each row's tokens. The call lowers the entries.
        """
        results = self._calls["result"]
        if not results:
            return []
        cut = []
        for i, (request, count) in enumerate(zip(step.requests, n.tolist(), strict=True)):
            kept = min([count, *(keep(request, tokens[i, :count]) for keep in results)])
            if count and kept < count:
                n[i] = max(kept, 0)
                cut.append(i)
        return cut
