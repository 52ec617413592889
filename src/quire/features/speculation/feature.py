"""The scheduler's side: it chooses each row's source and number of drafts, and writes the claims.

Speculation works with steps in flight. A claim is a continuation from a source. It begins at the
first token that the host does not know, and is long enough for the drafts of several steps. The
device compares the claim with the tokens drawn meanwhile. If they agree, its drafts are the part of
the claim after its own position.

In a pipeline the source on the device drafts ahead. After a step it makes the drafts of its rows'
next step, before that step is planned. That step may verify these drafts or ignore them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.block_tables import BlockTables
from quire.config import EngineConfig
from quire.executor import Capacity, Executor
from quire.features.loop_feature import LoopFeature
from quire.features.speculation.device_source import DeviceSource, DraftHeadSource, DraftModelSource
from quire.features.speculation.draft_count import (
    AcceptanceRates,
    Choice,
    Floats,
    StepCosts,
    choose,
    may_pay,
)
from quire.features.speculation.lookup import TextSource
from quire.features.speculation.settings import (
    DEVICE,
    LOOKUP,
    MASKED,
    NONE,
    NUM_KINDS,
    TREE,
    SpeculationSettings,
    by_device,
    read_settings,
)
from quire.features.speculation.stats import SourceStats, SpeculationStats
from quire.features.speculation.trials import Trials
from quire.plan import RowFlag, claim_width
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

_BUSY = 256
"""Steps with more prompt tokens than this get no drafts, because they take long anyway."""


def open_speculation(config: EngineConfig) -> LoopFeature:
    """Returns the feature for an engine."""
    return SpeculationFeature(config, read_settings(config.args))


def _device_source(config: EngineConfig, settings: SpeculationSettings) -> DeviceSource | None:
    lanes = config.scheduler.max_num_seqs
    if settings.source is None:
        return None
    if settings.source == "draft":
        scheduler = config.scheduler
        return DraftModelSource(
            lanes, scheduler.max_num_batched_tokens, scheduler.pipeline_depth > 1
        )
    return DraftHeadSource(lanes)


class SpeculationFeature(Feature, LoopFeature):
    """Brings drafts into plans. Belongs to the engine's thread, like the scheduler that calls it.

    It keeps one value per lane of:
        `_wanted`: Whether the request should have drafts.
        `_own_kind`: The kind of its drafts from the source on the device.
        `_made`: The number of these drafts made ahead.
        `_found`: The acceptance probability of the draft looked up for its last row.
    """

    def __init__(self, config: EngineConfig, settings: SpeculationSettings) -> None:
        self._settings = settings
        lanes = config.scheduler.max_num_seqs
        self._vocab_size = config.vocab_size
        self._requests: list[Request | None] = [None] * lanes
        self._wanted = np.zeros(lanes, dtype=bool)
        self._own_kind = np.full(lanes, DEVICE, dtype=np.int32)
        self._device = _device_source(config, settings)
        self._ahead = config.scheduler.pipeline_depth > 1
        self._made = np.zeros(lanes, dtype=np.int32)
        self._found = np.zeros(lanes)
        self._blocks: BlockManager | None = None
        self._kinds = np.zeros(lanes, dtype=np.int32)
        self._acceptance = AcceptanceRates(NUM_KINDS, lanes)
        self._trials = Trials()
        self._in_flight: deque[Int32] = deque()
        self._prompt_tokens = 0
        self._stats = SpeculationStats()

    def start(self, executor: Executor, capacity: Capacity) -> Feature | None:
        if not capacity.drafts:
            return None
        self._costs = StepCosts(capacity.step_seconds)
        self._most = capacity.drafts
        width = claim_width(capacity.drafts)
        self._texts = TextSource(self._settings, len(self._wanted), width, self._vocab_size)
        return self

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks
        self._texts.attach(blocks)

    # -- how many ------------------------------------------------------------------------------

    def lookahead(self, lanes: Int32, room: Int32) -> Int32:
        self._kinds[lanes] = NONE
        self._acceptance.fade()
        likeliest, most = float(self._acceptance.of_kinds().max()), int(room.max(initial=0))
        if self._prompt_tokens > _BUSY or not may_pay(self._costs, len(lanes), likeliest, most):
            return np.zeros_like(lanes)
        kinds, chance = self._look_up(lanes)
        to_make = np.zeros(len(lanes), dtype=bool)  # Rows whose drafts this step makes.
        if self._device is not None:
            own = self._acceptance.of(self._own_kind[lanes], lanes)
            if self._ahead:
                best = self._made[lanes] > 0
                room = np.where(best, np.minimum(room, self._made[lanes]), room)
                self._book_ahead(lanes)
            else:
                best = to_make = self._wanted[lanes] & (own > chance)
                best &= self._device.ready(lanes, best)
            kinds[best], chance[best] = self._own_kind[lanes][best], own[best]
        room = np.where(kinds == NONE, 0, np.minimum(room, self._most))
        choice = choose(self._costs, chance, to_make, int32(room))
        if not self._trials.wants_drafts(len(lanes), choice.gain):
            choice = Choice(np.zeros_like(lanes))
        self._kinds[lanes] = np.where(choice.counts > 0, kinds, NONE)
        self._stats.gain = choice.gain
        return choice.counts

    def _look_up(self, lanes: Int32) -> tuple[Int32, Floats]:
        """Returns the kinds of drafts that were found for rows, int32 [n], and their acceptance
        probabilities."""
        kinds, chance = np.zeros_like(lanes), np.zeros(len(lanes))
        if self._settings.lookup:
            kinds = self._texts.look_up(lanes, self._wanted[lanes], self._requests)
            found = kinds != NONE
            chance[found] = self._acceptance.of(kinds[found], lanes[found])
            self._found[lanes] = chance
        return kinds, chance

    # -- a step --------------------------------------------------------------------------------

    def plan(self, builder: PlanBuilder) -> None:
        if builder.admits:
            self._admit(builder)
        prompt = (builder.flags & RowFlag.PROMPT) != 0
        self._prompt_tokens = int(builder.q_len[prompt].sum())
        lanes, q_len = builder.lanes[~prompt], builder.q_len[~prompt]
        drafted = q_len > 1
        if drafted.any():
            kinds = self._kinds.copy()
            self._in_flight.append(kinds)
            self._stats.steps += 1
            self._texts.claim(builder, lanes[drafted & (kinds[lanes] >= TREE)])
        if len(lanes):
            self._stats.drafts_per_row = float((q_len - 1).mean())
        self._trials.plan(
            len(lanes),
            drafted=bool(drafted.any()),
            gain=self._stats.gain,
            prompts=bool(prompt.any()),
            now=time.perf_counter(),
        )
        if self._device is not None:
            drafting = ~prompt & by_device(self._kinds[builder.lanes])
            drafts = int32(np.where(drafting, builder.q_len - 1, 0))
            if self._ahead:
                self._device.passed(lanes, q_len)
                drafts = self._drafts_ahead(builder)
                self._made[builder.lanes] = drafts
            chances = self._acceptance.of_kinds()[self._own_kind[builder.lanes]]
            chance = float(chances.max(initial=0.0))
            pays = may_pay(self._costs, len(builder.lanes), chance, self._most)
            self._device.plan(builder, drafts, self._wanted, pays)

    def _drafts_ahead(self, builder: PlanBuilder) -> Int32:
        """Returns the number of drafts to make after this step for each row's next step, int32 [R].

        It is 0 for a row for which a lookup has found better drafts.
        """
        counts = np.zeros_like(builder.lanes)
        rows = np.flatnonzero((builder.flags & (RowFlag.PROMPT | RowFlag.SAMPLE)) != RowFlag.PROMPT)
        if self._device is None or self._prompt_tokens > _BUSY or not len(rows):
            return counts
        lanes = builder.lanes[rows]
        own = self._acceptance.of(self._own_kind[lanes], lanes)
        wanted = self._wanted[lanes] & (own > self._found[lanes])
        wanted &= self._device.ready(lanes, wanted)
        requests = [builder.requests[row] for row in rows.tolist()]
        planned = int32([request.planned for request in requests])
        ends = int32([request.max_total - 2 for request in requests])
        for group in self._groups():
            ends = np.minimum(ends, group.booked[lanes])
        room = np.where(wanted, (ends - planned).clip(0, self._most), 0)
        choice = choose(self._costs, own * wanted, wanted, int32(room))
        if self._trials.wants_drafts(len(rows), choice.gain):
            counts[rows] = choice.counts
        return counts

    def _book_ahead(self, lanes: Int32) -> None:
        """Books blocks for the drafts that may be made after the next step, if some are free."""
        requests = [self._requests[lane] for lane in lanes.tolist()]
        most = 1 + 2 * self._most
        ends = [0 if r is None else min(r.planned + most, r.max_total - 1) for r in requests]
        if self._blocks is not None:
            self._blocks.book(lanes, int32(ends))

    def _groups(self) -> list[BlockTables]:
        """Returns the KV groups in which a growing text needs more blocks."""
        return [] if self._blocks is None else [g for g in self._blocks.groups if g.grows]

    def _admit(self, builder: PlanBuilder) -> None:
        """Starts following the requests that get a lane."""
        owners = {request.lane: request for request in builder.requests}
        lanes = int32([admit.lane for admit in builder.admits])
        self._acceptance.forget(lanes)
        self._made[lanes] = 0
        self._found[lanes] = 0.0
        if self._device is not None:
            self._device.admit(lanes)
        for admit in builder.admits:
            request = self._requests[admit.lane] = owners[admit.lane]
            params = request.params
            wanted = params.speculative != "off" and request.pooling is None
            self._wanted[admit.lane] = wanted
            self._own_kind[admit.lane] = MASKED if params.masked else DEVICE

    # -- results -------------------------------------------------------------------------------

    def late(self, lanes: Int32, rows: Int32, tokens: Int32) -> None:
        if self._device is not None:
            self._device.late(lanes, rows, tokens)

    def verified(self, lanes: Int32, drafts: Int32, accepted: Int32) -> None:
        kinds = self._in_flight.popleft()[lanes]
        self._trials.verified(int(accepted.sum()))
        if self._device is not None:
            other = ~by_device(kinds)
            self._device.verified(lanes[other], drafts[other], accepted[other])
        rows = np.flatnonzero(drafts > 0)
        if not len(rows):
            return
        kinds, lanes, drafts = kinds[rows], lanes[rows], drafts[rows]
        held = np.clip(accepted[rows] - 1, 0, drafts)
        self._acceptance.add(kinds, lanes, drafts, int32(held))
        source = self._settings.source or ""
        for name, own in (
            (source, by_device(kinds)),
            ("tree", kinds == TREE),
            ("suffix", kinds >= LOOKUP),
        ):
            if own.any():
                self._count(name, drafts[own], held[own])

    def _count(self, name: str, drafts: Int32, accepted: Int32) -> None:
        stats = self._stats.sources.setdefault(name, SourceStats(accepted_at=[0] * self._most))
        stats.rows += len(drafts)
        stats.drafted += int(drafts.sum())
        stats.accepted += int(accepted.sum())
        for place in range(int(accepted.max(initial=0))):
            stats.accepted_at[place] += int((accepted > place).sum())

    def finish(self, request: Request) -> None:
        self._texts.finish(request)

    def forget(self) -> None:
        self._texts.forget()

    def stats(self) -> dict[str, Any]:
        return {"speculation": self._stats}
