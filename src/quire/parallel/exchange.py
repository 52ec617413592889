"""Sums over GPUs whose parts travel by copies, beside kernels that fill the card.

A sum begins on a stream of its own: the rank's part goes to every peer by copies between GPUs, for
which no multiprocessor works, and a flag follows. It ends on the stream that needs it, by a kernel
that waits for the peers' flags and adds up (`ops/triton/collectives/all_reduce.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.triton.collectives import all_reduce as kernels
from quire.parallel.symmetric_memory import (
    SymmetricGroup,
    aligned_starts,
    rank_addresses,
    residual_matches,
)
from quire.parallel.torch_group import TorchGroup

SLOTS = 4
"""Places for parts, which sums take in turns: those of two halves of a step, of each half two. A
rank sends its part of a sum after it has collected the one before of the same half. That needed the
peers' parts of it, which they sent after they had collected the one before that. So what was two
sums ago in a half has been collected everywhere."""

_ALIGNED = 4
"""Words: kernels are compiled for addresses that are multiples of 16 bytes."""


class Exchange:
    """Places for parts of sums in the memory of all ranks of a group.

    storages: of every rank `exchange_bytes`, zero at first, held as long as peers may write there.
    most: words of 32 bits of a sum at most.
    """

    def __init__(
        self, group: SymmetricGroup, storages: Sequence[torch.UntypedStorage], most: int
    ) -> None:
        self._group = group
        self._storages = storages
        self._most = most
        rank, world, device = group.rank, group.world, storages[group.rank].device
        starts = _starts(most, world)
        epochs = torch.zeros(SLOTS, _ALIGNED, dtype=torch.int32, device=device)

        def words(of: int, start: int, count: int) -> Tensor:
            view = torch.empty(0, dtype=torch.int32, device=device)
            view.set_(storages[of], start // 4, (count,), (1,))
            return view

        self._parts: list[kernels.Parts] = []
        self._targets: list[list[Tensor]] = []
        for slot in range(SLOTS):
            first, flags = slot * (world - 1), starts[-2] + 4 * slot * _flags(world)
            received = words(rank, starts[first], starts[1] // 4 * (world - 1))
            self._parts.append(
                kernels.Parts(
                    flags=rank_addresses(storages, flags, device),
                    epoch=epochs[slot],
                    own_flags=words(rank, flags, world),
                    received=received.view(world - 1, -1),
                )
            )
            peers = [(rank + step) % world for step in range(1, world)]
            # Places in a peer's memory are in the order of ranks, from the one behind it on.
            places = [(rank - peer - 1) % world for peer in peers]
            self._targets.append(
                [
                    words(peer, starts[first + place], most)
                    for peer, place in zip(peers, places, strict=True)
                ]
            )

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        """Whether it sums tensors like these."""
        words = kernels.words_of(x)
        return words is not None and words <= self._most and residual_matches(x, residual)

    def send(self, slot: int, x: Tensor) -> None:
        """Brings this rank's part to all peers, in the order of the current stream."""
        words = x.view(-1).view(torch.int32)
        for target in self._targets[slot]:
            target[: len(words)].copy_(words)
        kernels.signal(self._group.peers, self._parts[slot])

    def collect(
        self, slot: int, x: Tensor, residual: Tensor | None, out: Tensor, name: str
    ) -> None:
        """Writes the sum of all ranks' x, and the residual, to `out`. What `send` began must have
        ended on this rank. name: what an error calls the sum."""
        site = self._group.site(name)
        kernels.collect(self._group.peers, self._parts[slot], x, residual, out, site)


def exchange_bytes(most: int, world: int) -> int:
    """Returns the bytes that each rank's memory has, for sums of so many words."""
    return _starts(most, world)[-1]


def _flags(world: int) -> int:
    """Returns the words that a slot's flags take."""
    return -(-world // _ALIGNED) * _ALIGNED


def _starts(most: int, world: int) -> list[int]:
    """Returns where the places of all slots begin, then the flags, and how many bytes it all is."""
    return aligned_starts([4 * most] * (SLOTS * (world - 1)) + [4 * SLOTS * _flags(world)])


def make_exchange(
    group: TorchGroup, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Exchange | None:
    """Returns the exchange for sums of so many rows, which all ranks make at once; None: the ranks
    have no access to each other's memory."""
    if not isinstance(group, SymmetricGroup):
        return None
    most = -(-rows * width * dtype.itemsize // 4)
    size = exchange_bytes(most, group.world)
    own = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
    exchange = Exchange(group, group.share(own), most)
    # Nobody writes into memory that is not zero yet.
    torch.cuda.synchronize(device)
    torch.distributed.barrier(group.handle)
    return exchange
