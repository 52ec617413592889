"""The state of one prompt that this engine computes for another."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.arrays import Int32
from quire.cache.loading import LoadingPrefix
from quire.features.disaggregation.layer_clock import LayerBatches
from quire.features.disaggregation.messages import BlockBatch, Grant
from quire.features.disaggregation.reader_link import ReaderLink
from quire.request import Request

Entries = tuple[int, int, int]
"""A range of block table entries: KV group, first entry, and the entry after the last."""


@dataclass(frozen=True, slots=True)
class BatchInFlight:
    """A batch of blocks on its way to the reader.

    Attributes:
        blocks: blocks of the cache that the batch is read from, int32 [n].
        turn: number of preemptions of the request when the batch was made. None: the blocks are
            held, so the batch cannot be lost.
    """

    batch: BlockBatch
    blocks: Int32
    turn: int | None

    @property
    def entries(self) -> Entries:
        batch = self.batch
        return batch.group, batch.first, batch.first + batch.count


@dataclass(slots=True, eq=False)
class Export:
    """A grant, and its progress.

    The prompt:
        tokens: int32 [n].
        request: the grant's request; None until the scheduler admits it.
        finished: the request has ended.
        computed: seconds from the grant until the request's end.
        done: number of the request's preemptions and planned tokens at the last plan.
        step: the last step that computed a part of the prompt.
        held: the prompt's blocks in the prefix tree, which keep them from eviction after the
            request's end.
        settled: the scheduler has made a plan after it held the blocks.

    The reader:
        link: its connection; None until it has shown the grant.
        layers: batches for a reader that waits for each layer.
        deadline: time at which the reader counts as dead.
        last_keep_alive: time of the last `KeepAlive`.
        promised: the connection sends `End` by itself.

    The blocks:
        sent_to: by group, the table entry of the next block to send.
        again: table entries of lost batches, to send again.
        moving: batches on their way to the memory between engines, by transfer.
        sent: batches without the reader's acknowledgement, by number.

    The end:
        closed: nothing more is sent.
        ended: the grant is forgotten.
    """

    grant: Grant
    tokens: Int32
    salt: str
    sent_to: list[int]
    granted: float
    deadline: float
    request: Request | None = None
    finished: bool = False
    computed: float = 0.0
    done: tuple[int, int] = (0, 0)
    step: int = -1
    held: LoadingPrefix | None = None
    settled: bool = False
    link: ReaderLink | None = None
    layers: LayerBatches[ReaderLink] | None = None
    last_keep_alive: float = 0.0
    promised: bool = False
    again: list[Entries] = field(default_factory=list)
    moving: dict[int, BatchInFlight] = field(default_factory=dict)
    sent: dict[int, BatchInFlight] = field(default_factory=dict)
    closed: bool = False
    ended: bool = False
