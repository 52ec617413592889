"""The scheduler's side of the host and disk tiers.

**Out.** Blocks that the prefix tree evicts go to the host's pool, in the step that reuses them.
Blocks that the pool evicts go to files ahead of need, so that a step finds free slots.

**In.** If a lower tier holds more of a request's prefix than the device, the request is parked
before it starts. Blocks in files are first read into the pool. Then blocks are booked on the
device, and the pool's blocks are copied to them. The prefix tree takes the blocks in, and the
request starts with a prefix hit. Other requests go on meanwhile, and no step waits for a copy. If a
copy fails, the request computes the tokens.

A recurrent state is a block of its own KV group. Its key is the hash of all tokens before it. It
leaves the device with its tree node or earlier, and comes back with the missing KV up to it. A
state may lie within a block, so partly filled blocks go out as well.

**Swap.** A preempted request's blocks stay in the prefix tree. They go out when other requests need
them, like any others, and come in before the request starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.arrays import Int32, int32
from quire.cache import BlockManager, Evicted, Match, next_hash
from quire.cache.loading import PrefixLoader
from quire.cache.state_slots import Checkpoints
from quire.features.kv_offload.costs import CostModel
from quire.features.kv_offload.stats import TierStats
from quire.features.kv_offload.tiers import GroupTier, Job, Kind, PrefixLoad
from quire.plan import Transfer
from quire.request import Request
from quire.scheduler import Feature, PlanBuilder

_MOST_ATTEMPTS = 4
"""Most times that a request is parked for blocks. Then it computes the missing ones."""


class FetchState(msgspec.Struct):
    """The state of a request's fetches.

    Attributes:
        attempts: how often it was parked since it last ran.
        loaded: number of tokens that were read from files for it.
        recompute: computing its tokens is faster than copying the blocks back.
    """

    attempts: int = 0
    loaded: int = 0
    recompute: bool = False


@dataclass(slots=True)
class _ReachablePrefix:
    """A prefix of a request that the device and the lower tiers hold together.

    Attributes:
        end: Its length in tokens.
        kept: The part that the device has.
        wanted: Hashes of the other blocks, by tier.
    """

    end: int
    kept: Match
    wanted: list[tuple[GroupTier, list[bytes]]]


@dataclass(frozen=True, slots=True)
class _Sources:
    """The places to search for blocks: whether to include files and arriving blocks."""

    files: bool
    arriving: bool


class OffloadFeature(Feature):
    """Moves blocks between the device and the lower tiers.

    Args:
        tiers: the tiers of each KV group. Each group keeps the KV of every position, or recurrent
            states.
    """

    def __init__(self, tiers: Sequence[GroupTier], costs: CostModel) -> None:
        self._tiers = {tier.group: tier for tier in tiers}
        self._kv = [tier for tier in tiers if not tier.state]
        self._states = [tier for tier in tiers if tier.state]
        self._wanted: dict[str, FetchState] = {}
        """Fetches by request id."""
        self._costs = costs
        self._jobs: dict[int, tuple[GroupTier, Job]] = {}
        """Running transfers by id."""
        self._queue: list[Transfer] = []
        self._next_id = 0
        self.counts = TierStats(
            host_blocks_total=sum(tier.host.num_slots for tier in self._kv),
            host_states_total=sum(tier.host.num_slots for tier in self._states),
            prefill_rate=costs.rates.prefill,
            out_rate=costs.rates.out,
            in_rate=costs.rates.into,
        )

    @property
    def has_files(self) -> bool:
        return self._kv[0].files is not None

    def attach(self, blocks: BlockManager, wake: Callable[[str], None]) -> None:
        self._blocks = blocks
        self._loader = PrefixLoader(blocks)
        self._wake = wake
        self._checkpoints: dict[int, Checkpoints] = {}
        for tier in self._states:
            checkpoints = blocks.groups[tier.group].sparse
            if isinstance(checkpoints, Checkpoints):
                self._checkpoints[tier.group] = checkpoints
                checkpoints.on_take = self._taker(tier)

    def _taker(self, tier: GroupTier) -> Callable[[bytes, int], None]:
        return lambda block_hash, slot: self._leave(tier, block_hash, slot)

    def stats(self) -> TierStats:
        counts = self.counts
        counts.host_blocks_used = sum(len(tier.host) for tier in self._kv)
        counts.host_states_used = sum(len(tier.host) for tier in self._states)
        counts.disk_blocks = sum(len(tier.files or ()) for tier in self._kv)
        counts.disk_states = sum(len(tier.files or ()) for tier in self._states)
        counts.host_evictions = sum(tier.host.evictions for tier in self._tiers.values())
        return msgspec.structs.replace(counts)

    # -- out -----------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[Evicted]) -> None:
        for one in blocks:
            self._leave(self._tiers[one.group], one.block_hash, one.block)

    def _leave(self, tier: GroupTier, block_hash: bytes, block: int) -> None:
        if tier.state:
            saves = int(self._checkpoints[tier.group].saves[block])
            if not self._costs.state_worth_keeping(saves):
                return
            tier.host.note(block_hash, saves)
        elif not self._costs.worth_keeping:
            return
        tier.leave(block_hash, block)

    def plan(self, builder: PlanBuilder) -> None:
        for tier in self._tiers.values():
            job, places = tier.take_leaving()
            if places:
                blocks, slots = zip(*places, strict=True)
                self._send(tier, job, "out", "host", slots, blocks)
                self.counts.swapped_out += len(blocks)
                self.counts.swapped_out_bytes += len(blocks) * tier.block_bytes
            for hashes in tier.spills():
                self._write(tier, hashes)
        for transfer in self._queue:
            builder.transfer(transfer)
        self._queue = []

    def _write(self, tier: GroupTier, hashes: list[bytes]) -> None:
        """Starts writing blocks to files. Their slots in the pool are freed at its end."""
        tier.spilling += len(hashes)
        slots = [tier.host.pin(block_hash) for block_hash in hashes]
        self._send(tier, Job(Kind.SPILL, hashes), "out", "disk", slots)

    def _send(
        self,
        tier: GroupTier,
        job: Job,
        direction: str,
        place: str,
        slots: Sequence[int],
        blocks: Sequence[int] | Int32 = (),
    ) -> None:
        self._next_id += 1
        self._jobs[self._next_id] = tier, job
        if job.kind is not Kind.SPILL:
            tier.arriving.update(dict.fromkeys(job.hashes, job))
        keys = b"".join(job.hashes) if place == "disk" else b""
        self._queue.append(
            Transfer(
                id=self._next_id,
                direction="in" if direction == "in" else "out",
                place=place,
                group=tier.group,
                blocks=int32(blocks),
                slots=int32(slots),
                keys=np.frombuffer(keys, dtype=np.int32).reshape(-1, 4),
            )
        )

    # -- in ------------------------------------------------------------------------------------

    def fetch(self, request: Request, tokens: Int32, limit: int) -> bool:
        wanted = self._wanted.setdefault(request.request_id, FetchState())
        if wanted.recompute or wanted.attempts >= _MOST_ATTEMPTS or not self._anything:
            return False
        tokens = tokens[:limit]
        match = self._blocks.match(request.namespace, tokens, limit)
        files = self.has_files and not request.lora_id
        reach = self._reach(request, match, tokens, _Sources(files, arriving=True))
        if reach is None:
            return False
        jobs, loads = _missing(reach)
        size = sum(len(hashes) * tier.block_bytes for tier, hashes in reach.wanted)
        of_files = sum(len(hashes) * tier.block_bytes for tier, hashes in loads)
        spared = reach.end - match.length
        if not self._costs.fetch_pays(spared, size, of_files):
            return False
        for tier, hashes in loads:
            if tier.state:
                tier.host.note(hashes[0], spared)
            jobs += self._load(tier, hashes)
            read = spared if tier.state else len(hashes) * self._blocks.block_size
            wanted.loaded = min(spared, wanted.loaded + read)
        if not jobs:
            here = self._reach(request, match, tokens, _Sources(files=False, arriving=False))
            jobs = [] if here is None else self._bring(wanted, request, tokens, match, here)
        for job in jobs:
            job.waiters.append(request.request_id)
        wanted.attempts += bool(jobs)
        return bool(jobs)

    @property
    def _anything(self) -> bool:
        return any(len(tier.host) or tier.files for tier in self._tiers.values())

    def _reach(
        self, request: Request, match: Match, tokens: Int32, sources: _Sources
    ) -> _ReachablePrefix | None:
        """Finds the longest prefix of `tokens`, int32 [n], that the device and the lower tiers hold
        together. If the model has recurrent states, the tiers must hold the state at its end.

        Returns None if the device alone holds as much.
        """
        size = self._blocks.block_size
        kept = self._loader.kept(match, tokens)
        last = self._loader.block_hash(request.namespace, kept)
        run: list[bytes] = []
        for at in range(kept.length, len(tokens) - size + 1, size):
            block_hash = next_hash(last, tokens[at : at + size].tobytes())
            if not _all_have(self._kv, block_hash, sources):
                break
            run.append(block_hash)
            last = block_hash
        end = kept.length + len(run) * size
        if not self._states:
            return self._reached(end, kept, run) if end > match.length else None
        found = self._behind_tail(kept, run, last, tokens, sources)
        if found is None:
            found = self._at_boundary(request, match.length // size, kept, run, sources)
        return found if found is not None and found.end > match.length else None

    def _behind_tail(
        self, kept: Match, run: list[bytes], last: bytes, tokens: Int32, sources: _Sources
    ) -> _ReachablePrefix | None:
        """Finds a state within the block after a run. last: the hash of the run's end."""
        size = self._blocks.block_size
        begin = kept.length + len(run) * size
        tail = None if run else self._loader.kept_tail(kept, tokens)
        for end in range(min(begin + size - 1, len(tokens)), begin, -1):
            block_hash = next_hash(last, tokens[begin:end].tobytes())
            if not _all_have(self._states, block_hash, sources):
                continue
            if tail is not None and tail.length == end:
                return self._reached(end, tail, [], block_hash)
            if _all_have(self._kv, block_hash, sources):
                return self._reached(end, kept, [*run, block_hash], block_hash)
        return None

    def _at_boundary(
        self, request: Request, first: int, kept: Match, run: list[bytes], sources: _Sources
    ) -> _ReachablePrefix | None:
        """Finds the last state at the end of a block after the first `first` blocks."""
        hashes = self._loader.block_hashes(request.namespace, kept, first) + run
        for count in range(len(hashes), 0, -1):
            block_hash, whole = hashes[count - 1], first + count
            if not _all_have(self._states, block_hash, sources):
                continue
            size, lacking = self._blocks.block_size, max(0, whole - kept.whole)
            if not lacking:
                kept = Match(whole * size, whole, kept.node.upto(whole), known=whole)
            return self._reached(whole * size, kept, run[:lacking], block_hash)
        return None

    def _reached(
        self, end: int, kept: Match, blocks: list[bytes], state: bytes | None = None
    ) -> _ReachablePrefix:
        """Returns the prefix up to `end`, with the blocks to copy back for it.

        Args:
            end: Tokens.
            kept: The part that the device has.
            blocks: Hashes of the KV blocks to copy back.
            state: Hash of the recurrent states to copy back; None: no states.
        """
        wanted = [(tier, blocks) for tier in self._kv if blocks]
        if state is not None:
            wanted += [(tier, [state]) for tier in self._states]
        return _ReachablePrefix(end, kept, wanted)

    def _bring(
        self,
        wanted: FetchState,
        request: Request,
        tokens: Int32,
        match: Match,
        reach: _ReachablePrefix,
    ) -> list[Job]:
        """Books blocks on the device for those on the host, and starts the copies."""
        # Booking may evict other blocks to the pool. They must not take the slots to be read.
        slots = [
            [tier.host.pin(block_hash) for block_hash in hashes] for tier, hashes in reach.wanted
        ]
        prefix = tokens[: reach.end].copy()
        loading = self._loader.begin(request.namespace, reach.kept, prefix, request.known)
        if loading is None:
            for tier, hashes in reach.wanted:
                for block_hash in hashes:
                    tier.host.unpin(block_hash)
            return []
        spared = reach.end - match.length
        prefix_load = PrefixLoad(loading, len(reach.wanted), spared, min(wanted.loaded, spared))
        wanted.loaded = 0
        jobs = []
        for (tier, hashes), places in zip(reach.wanted, slots, strict=True):
            jobs.append(Job(Kind.IN, hashes, prefix_load=prefix_load))
            self._send(tier, jobs[-1], "in", "host", places, loading.blocks[tier.group])
        return jobs

    def _load(self, tier: GroupTier, hashes: list[bytes]) -> list[Job]:
        """Starts reading files into the pool, as far as the pool has room."""
        jobs = []
        for part, slots in tier.expect(hashes):
            jobs.append(Job(Kind.LOAD, part))
            self._send(tier, jobs[-1], "in", "disk", slots)
        return jobs

    # -- ends of transfers ---------------------------------------------------------------------

    def pending(self, idle: bool) -> bool:
        if self._queue or any(tier.places for tier in self._tiers.values()):
            return True
        return idle and bool(self._jobs)

    def transferred(self, finished: Sequence[int], failed: Sequence[int]) -> None:
        self.counts.transfer_failures += sum(id in self._jobs for id in failed)
        for ids, good in ((finished, True), (failed, False)):
            for id in ids:
                if id in self._jobs:  # Others are transfers of other features.
                    self._end(*self._jobs.pop(id), good)

    def _end(self, tier: GroupTier, job: Job, good: bool) -> None:
        for block_hash in job.hashes:
            if tier.arriving.get(block_hash) is job:
                del tier.arriving[block_hash]
        match job.kind:
            case Kind.OUT:
                self._end_out(tier, job, good)
            case Kind.LOAD:
                self._end_load(tier, job, good)
            case Kind.SPILL:
                self._end_spill(tier, job, good)
            case Kind.IN:
                self._end_in(tier, job, good)
        for request_id in job.waiters:
            self._wake(request_id)

    def _end_out(self, tier: GroupTier, job: Job, good: bool) -> None:
        for block_hash in job.hashes:
            tier.host.arrived(block_hash, good and not job.stale)

    def _end_load(self, tier: GroupTier, job: Job, good: bool) -> None:
        self._end_out(tier, job, good)
        if good:
            seconds = time.monotonic() - job.began
            self._costs.observe_load(len(job.hashes) * tier.block_bytes, seconds)
        elif tier.files is not None:
            for block_hash in job.hashes:
                tier.files.discard(block_hash)

    def _end_spill(self, tier: GroupTier, job: Job, good: bool) -> None:
        tier.spilling -= len(job.hashes)
        for block_hash in job.hashes:
            tier.host.unpin(block_hash, good=False)
            if good and tier.files is not None and not job.stale:
                tier.files.add(block_hash)
        self.counts.disk_writes += len(job.hashes) * good

    def _end_in(self, tier: GroupTier, job: Job, good: bool) -> None:
        for block_hash in job.hashes:
            tier.host.unpin(block_hash, good and not job.stale)
        if good:
            self.counts.swapped_in += len(job.hashes)
            self.counts.swapped_in_bytes += len(job.hashes) * tier.block_bytes
        prefix_load = job.prefix_load
        if prefix_load is None:
            return
        prefix_load.good &= good and not job.stale
        prefix_load.left -= 1
        prefix_load.waiters += job.waiters
        job.waiters = [] if prefix_load.left else prefix_load.waiters
        if prefix_load.left:
            return
        self._loader.end(prefix_load.loading, prefix_load.good)
        if prefix_load.good:
            self.counts.disk_hit_tokens += prefix_load.loaded
            self.counts.host_hit_tokens += prefix_load.tokens - prefix_load.loaded

    # -- the end -------------------------------------------------------------------------------

    def evict_all(self) -> None:
        """Moves blocks that only the device holds to the host, with the next plan."""
        self._blocks.evict_all()

    def save(self) -> None:
        """Writes blocks that only the host holds to files with the next plan. The most recently
        used ones go first."""
        for tier in self._tiers.values():
            for hashes in tier.unwritten():
                self._write(tier, hashes)

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
        for tier in self._tiers.values():
            tier.forget()
        for _, job in self._jobs.values():
            job.stale = True


def _all_have(tiers: Sequence[GroupTier], block_hash: bytes, sources: _Sources) -> bool:
    return all(
        tier.has(block_hash, files=sources.files, arriving=sources.arriving) for tier in tiers
    )


def _missing(reach: _ReachablePrefix) -> tuple[list[Job], list[tuple[GroupTier, list[bytes]]]]:
    """Returns the running jobs that move some of the blocks, and by tier the hashes to load from
    files. Blocks that the host holds are marked as used."""
    jobs: dict[int, Job] = {}
    loads: list[tuple[GroupTier, list[bytes]]] = []
    for tier, hashes in reach.wanted:
        of_files: list[bytes] = []
        for block_hash in hashes:
            job = tier.arriving.get(block_hash)
            if job is not None:
                jobs[id(job)] = job
            elif not tier.host.holds(block_hash):
                of_files.append(block_hash)
            else:
                tier.host.touch(block_hash)
        if of_files:
            loads.append((tier, of_files))
    return list(jobs.values()), loads
