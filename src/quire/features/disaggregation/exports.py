"""Prompts that this engine computes for others: their grants and blocks.

A grant goes through these states. Only the engine's loop changes them; threads carry messages:

==========  =====================================================================================
computing   the prompt is a request like others; async mode sends whole blocks as steps fill them
held        the prompt is in the prefix tree, and a loading lane keeps its blocks from eviction
closed      nothing more is sent, but copies that have begun still end
==========  =====================================================================================

The engine frees a block of the cache when its copies have ended. It frees a slot of the memory
between engines when the reader has acknowledged it, or when the connection's threads have ended. A
reader counts as dead if the engine waits for it and it is silent for the length of a lease.

If readers read the cache itself, an "out" transfer copies nothing. Its end means that the blocks
have been written; the blocks of an ended prompt always are. The engine frees the blocks when the
reader has acknowledged the last batch, or when the grant is closed. A reader that is still reading
then gets no `End`, and discards its copy. If a running prompt loses a batch before the reader
acknowledges it, the reader discards that batch and the engine sends it again.

In layer-by-layer mode, the engine names a running prompt's blocks to the reader when it plans the
step that fills them. The message names the step, and a clock tells the reader which of its layers
have been written. The KV of a draft model or draft head is sent only when the prompt ends.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager
from quire.cache.loading import LoadingPrefix, PrefixLoader
from quire.errors import QuireError
from quire.features.disaggregation.export import BatchInFlight, Entries, Export
from quire.features.disaggregation.free_slots import PeerSlots
from quire.features.disaggregation.layer_clock import LayerBatches
from quire.features.disaggregation.log_limit import LogLimit
from quire.features.disaggregation.messages import (
    BatchAck,
    BlockBatch,
    ClosedGrant,
    End,
    Grant,
    GrantAccepted,
    GrantRefused,
    KeepAlive,
    MemoryHandle,
    OpenGrant,
)
from quire.features.disaggregation.reader_link import LinkClosed, ReaderLink, ReaderMessage
from quire.features.disaggregation.stats import DisaggStats
from quire.features.loop_feature import Failure
from quire.plan import Transfer
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduler import PlanBuilder

_log = logging.getLogger(__name__)
_log.addFilter(LogLimit())

_FIRST_ID = 1 << 40
"""The first transfer id. It differs from the ids of other features."""
_MOST_CLOSED = 1024
"""Closed grants to remember until `take_closed` returns them."""

Status = tuple[int, str]


class Exports:
    """All grants of an engine. Belongs to the engine's loop.

    Args:
        slots: The free slots of the memory between engines.
        sizes: Bytes of a block, by KV group.
        lease: Seconds after which a silent reader counts as dead.
        port: The port where readers connect.
        chunks: Whether blocks are sent as steps fill them.
        layers: Whether readers on this host may read a block after each layer of the step.
        memory: Memory between engines that readers can map; None: they read the cache itself.
        model_groups: Number of the model's own KV groups; None: all. A drafter's groups follow
            them. Their KV is computed after the results of a step.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        slots: PeerSlots,
        sizes: Sequence[int],
        stats: DisaggStats,
        *,
        lease: float,
        port: int,
        chunks: bool,
        layers: bool = False,
        memory: MemoryHandle | None,
        model_groups: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = secrets.token_hex(8)
        self._slots = slots
        self._sizes = sizes
        self._stats = stats
        self._lease = lease
        self._port = port
        self._chunks = chunks
        self._layers = layers
        self._memory = memory
        self._model_groups = model_groups
        self._clock = clock
        self._generations = itertools.count(1)
        self._ids = itertools.count(_FIRST_ID)
        self._by_name: dict[str, Export] = {}
        self._by_link: dict[ReaderLink, Export] = {}
        self._failures: list[Failure] = []
        self._closed: deque[ClosedGrant] = deque(maxlen=_MOST_CLOSED)

    def attach(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._loader = PrefixLoader(blocks)
        groups = blocks.groups
        own = len(groups) if self._model_groups is None else self._model_groups
        self._drafts = [g >= own for g in range(len(groups))]
        # A later step copies a recurrent state, which can be read after that step.
        self._readable = [
            self._memory is None and group.grows and not drafts
            for group, drafts in zip(groups, self._drafts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def tails(self) -> bool:
        """Whether prompts may end inside a block."""
        return self._loader.tails

    # -- grants --------------------------------------------------------------------------------

    def grant(
        self, tokens: Int32, first: int, salt: str, reader: str, *, layers: bool = False
    ) -> Grant:
        """Grants a reader the KV of a prompt. The caller adds a request with the grant's name.

        Args:
            tokens: the prompt's tokens, int32 [n]; in whole blocks unless `tails`.
            first: number of leading blocks that the reader has.
            reader: engine that may use the grant.
            layers: whether the reader can wait for each layer.
        """
        grant = Grant(
            name=secrets.token_hex(16),
            epoch=self.epoch,
            generation=next(self._generations),
            reader=reader,
            lease=self._lease,
            port=self._port,
        )
        now = self._clock()
        sent_to = [first if group.grows else 0 for group in self._blocks.groups]
        export = Export(grant, tokens, salt, sent_to, now, now + self._lease)
        if layers and self._layers:
            export.layers = LayerBatches()
        self._by_name[grant.name] = export
        return grant

    def revoke(self, name: str, outcome: str, reason: str) -> None:
        """Forgets a grant whose request was refused. Ignored if the grant has already ended."""
        export = self._by_name.get(name)
        if export is None:
            return
        export.finished = True
        self._close(export, outcome, reason)

    def take_closed(self) -> list[ClosedGrant]:
        """Returns the grants that were closed since the last call."""
        closed = list(self._closed)
        self._closed.clear()
        return closed

    def admit(self, request: Request) -> None:
        """Records a grant's request. Other requests are ignored."""
        export = self._by_name.get(request.request_id.rpartition("/")[0])
        if export is not None:
            export.request = request

    def finish(self, request: Request) -> None:
        """Holds the blocks of a grant's request, which has ended."""
        export = self._by_name.get(request.request_id.rpartition("/")[0])
        if export is None:
            return
        export.finished = True
        if export.closed:
            self._forget_ended(export)
            return
        computed = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if computed:
            export.held = self._loader.hold(request.namespace, export.tokens)
        now = self._clock()
        export.computed, export.deadline = now - export.granted, now + self._lease
        if export.held is None:
            outcome = "overloaded" if computed else "aborted"
            self._refuse(export, (503, "the prompt's blocks could not be kept"), outcome)
            return
        export.settled = self._loader.tails and not export.held.copied
        self._keep_sent(export)
        self._offer(export)
        self._end_if_sent(export)

    # -- news ----------------------------------------------------------------------------------

    def handle(self, event: ReaderMessage | LinkClosed) -> None:
        """Handles an event from a connection's thread."""
        export = self._by_link.get(event.link)
        match event:
            case ReaderMessage(link, OpenGrant(grant)) if export is None:
                self._redeem(link, grant)
            case ReaderMessage(_, BatchAck(number)) if export is not None and number in export.sent:
                self._handle_ack(export, export.sent.pop(number))
            case ReaderMessage(link, _):
                link.close()  # The message is invalid in this state.
            case LinkClosed(link, broken):
                self._by_link.pop(link, None)
                if export is not None:
                    self._stopped(export, broken)

    def greet(self, link: ReaderLink, grant: Grant) -> None:
        """Tells a reader that shows its grant which blocks the running step fills. The loop may
        notice the reader only after that step. From any thread."""
        export = self._by_name.get(grant.name)
        if export is not None and export.grant == grant and not export.closed and export.layers:
            export.layers.greet(link)

    def _redeem(self, link: ReaderLink, grant: Grant) -> None:
        export = self._by_name.get(grant.name)
        refusal: Status | None = None
        if grant.epoch != self.epoch:
            refusal = (409, "the grant is of another engine, or from before a restart")
        elif export is None or export.closed:
            refusal = (410, "the grant has expired")
        elif (
            export.grant != grant
            or export.link is not None
            or (export.layers is not None and export.layers.link not in (None, link))
        ):
            refusal = (403, "the grant is not this reader's, or was used before")
        if export is None or refusal is not None:
            status, reason = refusal or (410, "the grant has expired")
            _log.warning("a reader was refused (%d): %s", status, reason)
            self._stats.readers_refused += 1
            link.send(GrantRefused(status, reason))
            link.close()
            return
        export.link = link
        self._by_link[link] = export
        self._extend_lease(export)
        if export.layers is not None:
            export.layers.greet(link)
        else:
            link.send(GrantAccepted(self._memory))
        self._offer(export)
        self._end_if_sent(export)

    def _handle_ack(self, export: Export, in_flight: BatchInFlight) -> None:
        batch = in_flight.batch
        self._give_back(in_flight)
        if self._may_be_lost(in_flight) and not self._kept(export, in_flight):
            # The prompt lost the blocks while the reader read them, so it may have read others.
            export.again.append(in_flight.entries)
            self._offer(export)
        self._stats.blocks_sent += batch.count
        self._stats.bytes_sent += batch.count * self._sizes[batch.group]
        self._extend_lease(export)
        self._end_if_sent(export)

    def _give_back(self, in_flight: BatchInFlight) -> None:
        """Frees the slots of a batch in the memory between engines."""
        self._slots.give(in_flight.batch.group, in_flight.batch.slots or [])

    def _extend_lease(self, export: Export) -> None:
        export.deadline = self._clock() + self._lease

    def _stopped(self, export: Export, broken: bool) -> None:
        """Frees what a connection's threads used, after they have ended."""
        export.link = None
        for in_flight in export.sent.values():
            self._give_back(in_flight)
        export.sent.clear()
        if not export.closed:
            outcome = "broken" if broken else "dead"
            self._close(export, outcome, "the reader's connection ended")
        self._forget_ended(export)

    def check(self) -> Sequence[Failure]:
        """Ends the grants whose readers were silent for too long. Returns the requests to abort."""
        now = self._clock()
        for export in list(self._by_name.values()):
            if export.closed:
                continue
            waits = export.link is None or bool(export.sent)
            if waits and now > export.deadline:
                self._refuse(export, (504, "the reader was silent for too long"), "timeout")
            elif (
                export.link is not None
                and not waits
                and now - export.last_keep_alive > self._lease / 4
            ):
                export.last_keep_alive = now
                export.link.send(KeepAlive())
        failures, self._failures = self._failures, []
        return failures

    # -- steps ---------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Whether the scheduler must make a plan, because blocks can be sent or are being sent."""
        return any(
            export.moving
            or (export.held is not None and not export.settled)
            or self._can_send(export)
            for export in self._by_name.values()
        )

    def _can_send(self, export: Export) -> bool:
        if export.closed or export.link is None:
            return False
        return any(self._slots.num_free(g) for g, _, _ in self._unsent(export))

    def _unsent(self, export: Export) -> list[Entries]:
        """Returns the table entries that the next plan can send."""
        if export.held is not None:
            ends = [end for _, end in self._ranges(export.held)]
            begins = [begin for begin, _ in self._ranges(export.held)]
            again = export.again
        else:
            # A recurrent state is the state after the prompt's last token.
            end, groups = self._filled(export), self._blocks.groups
            early = [
                group.grows and not (drafts and export.layers is not None)
                for group, drafts in zip(groups, self._drafts, strict=True)
            ]
            ends = [end if sends else 0 for sends in early]
            begins, again = [group.first_needed(len(export.tokens)) for group in groups], []
        starts = map(max, export.sent_to, begins)
        rest = ((g, at, end) for g, (at, end) in enumerate(zip(starts, ends, strict=True)))
        return [*again, *((g, at, end) for g, at, end in rest if at < end)]

    def _filled(self, export: Export) -> int:
        """Counts the blocks of a running request that launched steps have filled, with the partly
        filled one at the prompt's end."""
        request, (turn, done) = export.request, export.done
        if (
            not self._chunks
            or request is None
            or request.status is not RequestStatus.RUNNING
            or turn != request.num_preemptions
        ):
            return 0
        if done >= len(export.tokens):
            return self._blocks.groups[0].blocks(len(export.tokens))
        return done // self._blocks.block_size

    def _ranges(self, held: LoadingPrefix) -> list[tuple[int, int]]:
        """Returns the table entries of each group that a reader needs."""
        return [
            (place, place + len(blocks))
            for place, blocks in zip(held.places, held.blocks, strict=True)
        ]

    def plan(self, builder: PlanBuilder) -> None:
        """Sends the blocks that can be sent, as far as slots are free."""
        for export in list(self._by_name.values()):
            if not export.closed and export.link is not None:
                self._send_unsent(builder, export)
            export.settled = export.held is not None
            if export.request is not None:
                # This step copies blocks out before it fills new ones. So the next plan sends
                # those, unless the reader waits for each layer.
                done = export.request.num_preemptions, export.request.planned
                if done != export.done:
                    export.done, export.step = done, builder.step_id
                self._offer(export)

    def _send_unsent(self, builder: PlanBuilder, export: Export) -> None:
        held = export.held
        if held is not None and not export.settled:
            # The plan after `hold` copies a recurrent state only after its transfers out.
            return
        unsent, export.again = self._unsent(export), [] if held is not None else export.again
        for g, first, end in unsent:
            at = first
            while at < end and (count := self._send(builder, export, g, at, end)):
                at += count
            if first >= export.sent_to[g]:
                export.sent_to[g] = at
            elif at < end:
                export.again.append((g, at, end))
        self._end_if_sent(export)

    def _send(self, builder: PlanBuilder, export: Export, g: int, first: int, end: int) -> int:
        """Sends up to one batch of blocks. Returns their number."""
        in_flight = self._batch(export, g, first, end)
        if in_flight is None:
            return 0
        batch = in_flight.batch
        export.moving[batch.number] = in_flight
        slots = int32(batch.slots or [])
        builder.transfer(Transfer(batch.number, "out", "peer", g, in_flight.blocks, slots=slots))
        return batch.count

    def _batch(self, export: Export, g: int, first: int, end: int) -> BatchInFlight | None:
        """Returns a batch of the first blocks for which slots are free; None: no slot is free."""
        blocks = self._blocks_of(export, g, first, end)
        slots = self._slots.put(g, blocks)
        if not slots:
            return None
        batch = BlockBatch(next(self._ids), g, first, len(slots), slots)
        if export.held is not None:
            return BatchInFlight(batch, blocks[: len(slots)], None)
        batch.step = export.step if export.layers is not None else -1
        return BatchInFlight(batch, blocks[: len(slots)], export.done[0])

    def _offer(self, export: Export) -> None:
        """Tells a reader to read blocks in the cache, without a plan.

        That is possible if the prompt has ended, because its blocks have been written, or if the
        reader waits for each layer.
        """
        link: ReaderLink | LayerBatches[ReaderLink] | None = export.layers
        unsent, held = self._unsent(export), export.held
        readable = [each and not (held and held.copied) for each in self._readable]
        if held is not None:
            link = export.link
            unsent = [each for each in unsent if readable[each[0]]]
        if link is None or export.closed:
            return
        if held is not None:
            export.again = [each for each in export.again if not readable[each[0]]]
        for g, first, end in unsent:
            export.sent_to[g] = max(export.sent_to[g], end)
            while first < end and (in_flight := self._batch(export, g, first, end)):
                first += in_flight.batch.count
                export.sent[in_flight.batch.number] = in_flight
                link.send(in_flight.batch)
                self._extend_lease(export)

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        """Handles copies that have ended."""
        for export in list(self._by_name.values()):
            for id in [id for id in (*finished, *failed) if id in export.moving]:
                in_flight = export.moving.pop(id)
                if export.closed or export.link is None or id in failed:
                    self._give_back(in_flight)
                elif not self._kept(export, in_flight):
                    self._give_back(in_flight)
                    export.again.append(in_flight.entries)
                else:
                    export.sent[in_flight.batch.number] = in_flight
                    self._extend_lease(export)
                    export.link.send(in_flight.batch)
            self._forget_ended(export)

    def _blocks_of(self, export: Export, g: int, first: int, end: int) -> Int32:
        """Returns the prompt's blocks at these table entries, int32 [end - first]. They are the
        held blocks, or the running request's."""
        if export.held is not None:
            place = export.held.places[g]
            return export.held.blocks[g][first - place : end - place]
        assert export.request is not None
        # A copy: the table may change before the plan is launched.
        return self._blocks.groups[g].entries(export.request.lane, first, end).copy()

    def _kept(self, export: Export, in_flight: BatchInFlight) -> bool:
        """Tells whether the blocks belonged to the prompt as long as the reader read them.

        A request loses its blocks when it is preempted. At its end the tree may keep another
        request's blocks with the same tokens instead.
        """
        request = export.request
        if in_flight.turn is None or request is None:
            return True
        if request.num_preemptions != in_flight.turn:
            return False
        return np.array_equal(self._blocks_of(export, *in_flight.entries), in_flight.blocks)

    def _keep_sent(self, export: Export) -> None:
        """Marks the unacknowledged batches whose blocks are held, which cannot be lost any more."""
        for number, in_flight in export.sent.items():
            if self._kept(export, in_flight):
                export.sent[number] = replace(in_flight, turn=None)

    # -- the end -------------------------------------------------------------------------------

    def _end_if_sent(self, export: Export) -> None:
        """Ends a grant if the reader has acknowledged all batches.

        If all batches are sent and none can be lost, the connection sends `End` by itself after
        the last acknowledgement.
        """
        if export.held is None or export.closed or export.link is None or export.moving:
            return
        if not export.settled or self._unsent(export):
            return
        if not export.promised and not any(
            self._may_be_lost(each) for each in export.sent.values()
        ):
            export.promised = True
            export.link.end_after(list(export.sent), End(export.computed))
        if not export.sent:
            self._close(export, "done")

    def _may_be_lost(self, in_flight: BatchInFlight) -> bool:
        """Tells whether the prompt may lose a batch's blocks before the reader acknowledges it."""
        return self._memory is None and in_flight.turn is not None

    def _refuse(self, export: Export, status: Status, outcome: str) -> None:
        if export.link is not None:
            export.link.send(GrantRefused(*status))
        self._close(export, outcome, f"{status[0]}: {status[1]}")

    def _close(self, export: Export, outcome: str, reason: str = "") -> None:
        export.closed = True
        if outcome != "done":
            _log.warning("a grant ended (%s): %s", outcome, reason)
        seconds = self._clock() - export.granted
        self._closed.append(ClosedGrant(export.grant.name, outcome, export.computed, seconds))
        self._stats.grants[outcome] = self._stats.grants.get(outcome, 0) + 1
        if export.link is not None:
            export.link.close()
        if export.request is not None and not export.finished:
            self._failures.append((export.request, QuireError("the reader of the prompt is gone")))
        self._forget_ended(export)

    def _forget_ended(self, export: Export) -> None:
        """Frees the blocks and the name of a closed grant, once none of its copies are running."""
        if not export.closed or export.ended or export.moving:
            return
        if export.held is not None:
            self._loader.release(export.held)
            export.held = None
        if export.link is None and (export.finished or export.request is None):
            export.ended = True
            del self._by_name[export.grant.name]

    def forget(self) -> None:
        """Refuses all grants, because the weights change."""
        for export in list(self._by_name.values()):
            if not export.closed:
                status = 409, "the weights were updated after the grant"
                self._refuse(export, status, "refused")

    def stop(self) -> None:
        """Closes all grants."""
        for export in list(self._by_name.values()):
            if not export.closed:
                self._close(export, "aborted", "the engine ends")
