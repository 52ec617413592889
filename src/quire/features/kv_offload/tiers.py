"""The blocks in the lower tiers, and running transfers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.cache.host_tier import HashList, HostTier, StateTier
from quire.cache.loading import LoadingPrefix


class Kind(Enum):
    OUT = "device to host"
    IN = "host to device"
    SPILL = "host to disk"
    LOAD = "disk to host"


@dataclass(slots=True)
class Job:
    """A transfer of blocks of one KV group.

    Attributes:
        hashes: Hashes of the blocks that move.
        waiters: Ids of requests to wake at the end.
        prefix_load: The load that an IN job belongs to.
        stale: Whether the prefix cache was cleared during the transfer.
        began: Start, as `time.monotonic()`.
    """

    kind: Kind
    hashes: list[bytes] = field(default_factory=list)
    waiters: list[str] = field(default_factory=list)
    prefix_load: PrefixLoad | None = None
    stale: bool = False
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class PrefixLoad:
    """A prefix that is being copied to the device, with an IN job for each KV group with missing
    blocks.

    Attributes:
        loading: The device's blocks that the jobs fill.
        left: Number of unfinished jobs.
        tokens: Number of prompt tokens whose prefill it saves.
        loaded: Number of these tokens that were read from files.
        good: Whether every ended job succeeded.
        waiters: Ids of the requests that waited for ended jobs.
    """

    loading: LoadingPrefix
    left: int
    tokens: int
    loaded: int
    good: bool = True
    waiters: list[str] = field(default_factory=list)


# The blocks of one KV group in the lower tiers.

_SPILL_BATCH = 16
"""Most blocks of one transfer to or from files."""
_MOST_SPILLS = 16
"""Most transfers to files at a time."""


class GroupTier:
    """The blocks of one KV group on the host and in files. A recurrent state counts as a block.

    Args:
        group: index of the KV group.
        slots: number of slots in the host's pool.
        block_bytes: bytes of a block on the device.
        files: hashes of the blocks in files at the start, oldest first; None without a disk tier.
        most_files: number of blocks that fit in files.

    Attributes:
        arriving: by block hash, the job that copies the block to the host or to the device.
        outgoing: job of the blocks that the next plan moves to the host.
        places: (block, slot) pairs of that job.
        spilling: number of blocks that are being written to files.
    """

    def __init__(
        self,
        group: int,
        slots: int,
        block_bytes: int,
        files: Sequence[bytes] | None = None,
        most_files: int = 0,
        *,
        state: bool = False,
    ) -> None:
        self.group = group
        self.block_bytes = block_bytes
        self.state = state
        self.host = StateTier(slots) if state else HostTier(slots)
        self.files = None if files is None else HashList(most_files, files)
        self.arriving: dict[bytes, Job] = {}
        self.spilling = 0
        self._reserve = max(1, min(4096, slots // 8))
        self.outgoing, self.places = Job(Kind.OUT), list[tuple[int, int]]()

    def has(self, block_hash: bytes, *, files: bool, arriving: bool) -> bool:
        """Returns whether a block is on the host.

        Args:
            files: blocks in files count too.
            arriving: blocks that are being copied count too.
        """
        return (
            self.host.holds(block_hash)
            or (arriving and block_hash in self.arriving)
            or (files and self.files is not None and block_hash in self.files)
        )

    def leave(self, block_hash: bytes, block: int) -> None:
        """Plans to move an evicted block of the device to the host, if there is room for it."""
        if block_hash in self.host:
            self.host.touch(block_hash)
            return
        slot = self.host.expect(block_hash)
        if slot is not None:
            self.outgoing.hashes.append(block_hash)
            self.places.append((block, slot))
            self.arriving[block_hash] = self.outgoing

    def take_leaving(self) -> tuple[Job, list[tuple[int, int]]]:
        """Returns the job and the (block, slot) pairs for the plan that is being made."""
        left = self.outgoing, self.places
        self.outgoing, self.places = Job(Kind.OUT), []
        return left

    def expect(self, hashes: Sequence[bytes]) -> Iterator[tuple[list[bytes], list[int]]]:
        """Reserves slots on the host for blocks in files, as far as there is room. Yields the
        hashes and slots of each transfer."""
        hashes = hashes[: max(1, self.host.num_slots // 2)]
        for at in range(0, len(hashes), _SPILL_BATCH):
            part: list[bytes] = []
            slots: list[int] = []
            for block_hash in hashes[at : at + _SPILL_BATCH]:
                slot = self.host.expect(block_hash)
                if slot is None:
                    break
                part.append(block_hash)
                slots.append(slot)
            if not part:
                return
            yield part, slots

    def spills(self) -> Iterator[list[bytes]]:
        """Frees slots on the host ahead of need, oldest blocks first. It drops blocks that files
        hold, and yields the others, a list of hashes for each transfer to files."""
        lacking = self._reserve - self.host.num_free - self.spilling
        if self.files is None or lacking <= 0:
            return
        batch: list[bytes] = []
        for block_hash in self.host.oldest(lacking):
            if block_hash in self.files:
                self.host.drop(block_hash)
            else:
                batch.append(block_hash)
        for at in range(0, len(batch), _SPILL_BATCH):
            if self.spilling >= _MOST_SPILLS * _SPILL_BATCH:
                return
            yield batch[at : at + _SPILL_BATCH]

    def unwritten(self) -> Iterator[list[bytes]]:
        """Yields the blocks that only the host holds, most recently used first. Each list is for
        one transfer."""
        if self.files is None:
            return
        oldest = self.host.oldest(self.host.num_slots)
        hashes = [block_hash for block_hash in oldest if block_hash not in self.files]
        for at in range(len(hashes), 0, -_SPILL_BATCH):
            yield hashes[max(0, at - _SPILL_BATCH) : at][::-1]

    def forget(self) -> None:
        """Drops all blocks that are not being copied."""
        self.host.clear()
        self.outgoing.stale = True
        if self.files is not None:
            self.files.clear()
