"""The scheduler's side of the host and disk tiers.

**Out.** What the prefix tree gives up goes to the host's pool, in the step that takes its blocks.
What the pool gives up goes to files, ahead of need, so that there are free slots when a step comes.

**In.** A request that is about to start, and of which a lower tier holds more than the device does,
is parked. Files are read into the pool first; blocks are then booked on the device and copied to.
When they have arrived they are part of the prefix tree, and the request starts as one that hits.
Others go on meanwhile, and no step ever waits for a copy. What fails to come is computed.

**Swap.** A preempted request leaves what it computed in the tree. So its blocks go out when they
are needed, as any others, and come in before it starts again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager, Evicted, Match, next_hash
from quire.cache.host_tier import HashList, HostTier
from quire.cache.loading import PrefixLoader
from quire.offload.costs import CostModel
from quire.offload.jobs import Job, Kind
from quire.offload.tier_stats import TierStats
from quire.plan import Transfer
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

_MOST_ATTEMPTS = 4
"""Times that a request is parked for blocks before it computes those that are not there."""
_SPILL_BATCH = 16
"""Blocks of one transfer to or from files: what fails, fails together."""
_MOST_SPILLS = 16
"""Transfers to files at a time."""


class FetchState(msgspec.Struct):
    """A request's fetches. attempts: how often it was parked since it last ran. loaded: how many
    blocks were read from files for it. recompute: its blocks are not worth bringing back."""

    attempts: int = 0
    loaded: int = 0
    recompute: bool = False


class OffloadFeature(Feature):
    """slots: of the host's pool. block_bytes: of a block on the device. files: hashes of the blocks
    in files at the start, oldest first, or None without a disk tier; most_files: how many fit."""

    def __init__(
        self,
        slots: int,
        block_bytes: int,
        costs: CostModel,
        files: Sequence[bytes] | None = None,
        most_files: int = 0,
    ) -> None:
        self._host = HostTier(slots)
        self._wanted: dict[str, FetchState] = {}
        """By request id."""
        self._files = None if files is None else HashList(most_files, files)
        self._costs = costs
        self._block_bytes = block_bytes
        self._reserve = max(1, min(4096, slots // 8))
        self._jobs: dict[int, Job] = {}
        self._job_of: dict[bytes, Job] = {}
        """The job that a block_hash's contents arrive by, on the host or on the device."""
        self._leaving, self._places = Job(Kind.OUT, []), list[tuple[int, int]]()
        """The blocks that the next plan moves out: a job, and (block, slot) pairs."""
        self._queue: list[Transfer] = []
        self._next_id = 0
        self._spilling = 0
        self.counts = TierStats(
            host_blocks_total=slots,
            prefill_rate=costs.rates.prefill,
            out_rate=costs.rates.out,
            in_rate=costs.rates.into,
        )

    @property
    def has_files(self) -> bool:
        return self._files is not None

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks
        self._loader = PrefixLoader(blocks)
        self._wake = wake

    def stats(self) -> TierStats:
        self.counts.host_blocks_used = len(self._host)
        self.counts.disk_blocks = 0 if self._files is None else len(self._files)
        self.counts.host_evictions = self._host.evictions
        return msgspec.structs.replace(self.counts)

    # -- out -----------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[Evicted]) -> None:
        if not self._costs.worth_keeping:
            return
        for one in blocks:
            if one.block_hash in self._host:
                self._host.touch(one.block_hash)
                continue
            slot = self._host.expect(one.block_hash)
            if slot is not None:
                self._leaving.hashes.append(one.block_hash)
                self._places.append((one.block, slot))
                self._job_of[one.block_hash] = self._leaving

    def plan(self, builder: PlanBuilder) -> None:
        if self._places:
            blocks, slots = zip(*self._places, strict=True)
            self._send(self._leaving, "out", "host", slots, blocks=blocks)
            self._leaving, self._places = Job(Kind.OUT, []), []
            self.counts.swapped_out += len(blocks)
            self.counts.swapped_out_bytes += len(blocks) * self._block_bytes
        if self._files is not None:
            self._spill(self._files)
        for transfer in self._queue:
            builder.transfer(transfer)
        self._queue = []

    def _spill(self, files: HashList) -> None:
        """Makes room in the host's pool, oldest first."""
        lacking = self._reserve - self._host.num_free - self._spilling
        if lacking <= 0:
            return
        batch: list[bytes] = []
        for block_hash in self._host.oldest(lacking):
            if block_hash in files:
                self._host.drop(block_hash)
            else:
                batch.append(block_hash)
        for at in range(0, len(batch), _SPILL_BATCH):
            if self._spilling >= _MOST_SPILLS * _SPILL_BATCH:
                return
            self._write(batch[at : at + _SPILL_BATCH])

    def _write(self, hashes: list[bytes]) -> None:
        """To files; what was written gives up its slot."""
        self._spilling += len(hashes)
        slots = [self._host.pin(block_hash) for block_hash in hashes]
        self._send(Job(Kind.SPILL, hashes), "out", "disk", slots, names=hashes)

    def _send(
        self,
        job: Job,
        direction: str,
        place: str,
        slots: Sequence[int],
        blocks: Sequence[int] | Int32 = (),
        names: Iterable[bytes] = (),
    ) -> None:
        self._next_id += 1
        self._jobs[self._next_id] = job
        if job.kind is not Kind.SPILL:
            self._job_of.update(dict.fromkeys(job.hashes, job))
        self._queue.append(
            Transfer(
                id=self._next_id,
                direction="in" if direction == "in" else "out",
                place=place,
                group=0,
                blocks=int32(blocks),
                slots=int32(slots),
                keys=np.frombuffer(b"".join(names), dtype=np.int32).reshape(-1, 4),
            )
        )

    # -- in ------------------------------------------------------------------------------------

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        wanted = self._wanted.setdefault(request.request_id, FetchState())
        if wanted.recompute or wanted.attempts >= _MOST_ATTEMPTS or not self._anything:
            return False
        size = self._blocks.block_size
        whole = limit // size * size
        match = self._blocks.match(request.namespace, tokens, whole, whole_only=True)
        run, jobs, loads = self._run(request, match, tokens[:whole])
        if not run or not self._costs.fetch_pays(len(run) * size, len(loads) * size):
            return False
        if loads:
            jobs += self._load(loads)
            wanted.loaded += len(loads)
        if not jobs:
            run = list(itertools.takewhile(self._host.holds, run))
            jobs = self._bring(wanted, request, tokens, match, run)
        for job in jobs:
            job.waiters.append(request.request_id)
        wanted.attempts += bool(jobs)
        return bool(jobs)

    def _bring(
        self, wanted: FetchState, request: Request, tokens: Int32, match: Match, run: list[bytes]
    ) -> list[Job]:
        """Books blocks after a match for what the host holds, and has them filled."""
        end = match.length + len(run) * self._blocks.block_size
        if end == match.length:
            return []
        # Booking may push blocks out, to slots of the pool: not to those that are about to be read.
        slots = [self._host.pin(block_hash) for block_hash in run]
        loading = self._loader.begin(request.namespace, match, tokens[:end].copy(), request.known)
        if loading is None:
            for block_hash in run:
                self._host.unpin(block_hash)
            return []
        job = Job(Kind.IN, run, loading, loaded=min(wanted.loaded, len(run)))
        wanted.loaded = 0
        self._send(job, "in", "host", slots, blocks=loading.blocks[0])
        return [job]

    @property
    def _anything(self) -> bool:
        return bool(len(self._host) or self._files)

    def _run(
        self, request: Request, match: Match, tokens: Int32
    ) -> tuple[list[bytes], list[Job], list[bytes]]:
        """Finds the blocks after a match that can be had, from the first on: their hashes, the jobs
        by which some are arriving already, and the hashes that are in files only. tokens: int32
        [whole blocks]."""
        run: list[bytes] = []
        jobs: dict[int, Job] = {}
        loads: list[bytes] = []
        size = self._blocks.block_size
        files = self._files if not request.lora_id else None
        block_hash = self._loader.block_hash(request.namespace, match)
        for at in range(match.length, len(tokens), size):
            block_hash = next_hash(block_hash, tokens[at : at + size].tobytes())
            job = self._job_of.get(block_hash)
            if job is not None:
                jobs[id(job)] = job
            elif files is not None and block_hash in files and not self._host.holds(block_hash):
                loads.append(block_hash)
            elif not self._host.holds(block_hash):
                break
            self._host.touch(block_hash)
            run.append(block_hash)
        return run, list(jobs.values()), loads

    def _load(self, hashes: list[bytes]) -> list[Job]:
        """Reads files into the pool, as far as it has room."""
        jobs = []
        hashes = hashes[: max(1, self._host.num_slots // 2)]
        for at in range(0, len(hashes), _SPILL_BATCH):
            part, slots = [], []
            for block_hash in hashes[at : at + _SPILL_BATCH]:
                slot = self._host.expect(block_hash)
                if slot is None:
                    break
                part.append(block_hash)
                slots.append(slot)
            if not part:
                break
            jobs.append(Job(Kind.LOAD, part))
            self._send(jobs[-1], "in", "disk", slots, names=part)
        return jobs

    # -- what became of it ---------------------------------------------------------------------

    def pending(self, idle: bool) -> bool:
        if self._queue or self._places:
            return True
        return idle and bool(self._jobs)

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        self.counts.transfer_failures += sum(id in self._jobs for id in failed)
        for ids, good in ((finished, True), (failed, False)):
            for id in ids:
                if id in self._jobs:  # else it is another feature's
                    self._end(self._jobs.pop(id), good)

    def _end(self, job: Job, good: bool) -> None:
        for block_hash in job.hashes:
            if self._job_of.get(block_hash) is job:
                del self._job_of[block_hash]
        match job.kind:
            case Kind.OUT:
                self._arrived(job, good)
            case Kind.LOAD:
                self._loaded(job, good)
            case Kind.SPILL:
                self._spilled(job, good)
            case Kind.IN:
                self._brought(job, good)
        for request_id in job.waiters:
            self._wake(request_id)

    def _arrived(self, job: Job, good: bool) -> None:
        for block_hash in job.hashes:
            self._host.arrived(block_hash, good and not job.stale)

    def _loaded(self, job: Job, good: bool) -> None:
        self._arrived(job, good)
        if good:
            seconds = time.monotonic() - job.began
            self._costs.observe_load(len(job.hashes) * self._block_bytes, seconds)
        elif self._files is not None:
            for block_hash in job.hashes:
                self._files.discard(block_hash)

    def _spilled(self, job: Job, good: bool) -> None:
        self._spilling -= len(job.hashes)
        for block_hash in job.hashes:
            self._host.unpin(block_hash, good=False)
            if good and self._files is not None and not job.stale:
                self._files.add(block_hash)
        self.counts.disk_writes += len(job.hashes) * good

    def _brought(self, job: Job, good: bool) -> None:
        if job.loading is not None:
            self._loader.end(job.loading, good and not job.stale)
        for block_hash in job.hashes:
            self._host.unpin(block_hash, good and not job.stale)
        if good:
            count, size = len(job.hashes), self._blocks.block_size
            self.counts.swapped_in += count
            self.counts.swapped_in_bytes += count * self._block_bytes
            self.counts.disk_hit_tokens += job.loaded * size
            self.counts.host_hit_tokens += (count - job.loaded) * size

    # -- the end -------------------------------------------------------------------------------

    def evict_all(self) -> None:
        """Move what only the device has to the host, with the next plan."""
        self._blocks.evict_all()

    def save(self) -> None:
        """Write what only the host has to files, last used first, with the next plan."""
        if self._files is None:
            return
        hashes = [
            block_hash
            for block_hash in self._host.oldest(self._host.num_slots)
            if block_hash not in self._files
        ]
        for at in range(len(hashes), 0, -_SPILL_BATCH):
            self._write(hashes[max(0, at - _SPILL_BATCH) : at][::-1])

    # -- requests ------------------------------------------------------------------------------

    def preempt(self, request: Request) -> bool:
        done = request.computed if request.generating else request.planned
        pays = self._costs.swap_pays(done)
        wanted = self._wanted.setdefault(request.request_id, FetchState())
        wanted.attempts, wanted.recompute = 0, not pays
        return pays

    def finish(self, request: Request) -> None:
        self._wanted.pop(request.request_id, None)

    def forget(self) -> None:
        self._host.clear()
        for job in (*self._jobs.values(), self._leaving):
            job.stale = True
        if self._files is not None:
            self._files.clear()
