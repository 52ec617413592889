"""Sums over GPUs whose parts travel by copies, beside kernels that fill the card.

A sum begins on a stream of its own: the rank's part goes to every peer by copies between GPUs, for
which no multiprocessor works, and a flag follows. It ends on the stream that needs it, by a kernel
that waits for the peers' flags and adds up (`ops/triton/all_reduce.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.triton import all_reduce as kernels
from quire.parallel.symmetric_memory import (
    SymmetricGroup,
    addresses_in,
    aligned_starts,
    alike,
)
from quire.parallel.torch_group import TorchGroup

SLOTS = 4
"""Places for parts, which sums take in turns: those of two halves of a step, of each half two. A
rank sends its part of a sum after it has collected the one before of the same half. That needed the
peers' parts of it, which they sent after they had collected the one before that. So what was two
sums ago in a half has been collected everywhere."""


class Exchange:
    """The memory for parts of sums, in which all ranks of a group write.

    most: words of 32 bits of a sum at most. All ranks make theirs at once.
    """

    def __init__(self, group: SymmetricGroup, most: int, device: torch.device) -> None:
        self._group = group
        self._most = -(-most // 4) * 4  # parts begin at multiples of 16 bytes
        rank, world = group.rank, group.world
        sizes = [4 * self._most] * (SLOTS * (world - 1)) + [4 * SLOTS * world]
        starts = aligned_starts(sizes)
        # Held as long as peers may write into it.
        self._memory = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        self._storages = group.share(self._memory.untyped_storage())
        epochs = torch.zeros(SLOTS, dtype=torch.int32, device=device)

        def words(of: int, start: int, count: int) -> Tensor:
            view = torch.empty(0, dtype=torch.int32, device=device)
            view.set_(self._storages[of], start // 4, (count,), (1,))
            return view

        self._parts, self._targets = [], []
        for slot in range(SLOTS):
            first, flags = slot * (world - 1), starts[-2] + 4 * slot * world
            # Neighbouring places are as far apart as any.
            apart = starts[1] // 4
            received = words(rank, starts[first], apart * (world - 1)).view(world - 1, apart)
            self._parts.append(
                kernels.Parts(
                    flags=addresses_in(self._storages, flags, device),
                    epoch=epochs[slot : slot + 1],
                    own_flags=words(rank, flags, world),
                    received=received,
                )
            )
            # In a peer's memory this rank stands where it does counted from there.
            self._targets.append(
                [
                    words(peer, starts[first + (rank - peer - 1) % world], self._most)
                    for peer in ((rank + step) % world for step in range(1, world))
                ]
            )
        torch.cuda.synchronize(device)
        torch.distributed.barrier(group.handle)

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        """Whether it sums tensors like these."""
        words = kernels.words_of(x)
        return words is not None and words <= self._most and alike(x, residual)

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


def exchange_of(
    group: TorchGroup, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Exchange | None:
    """Returns the exchange for sums of so many rows; None: the ranks have no access to each other's
    memory."""
    if not isinstance(group, SymmetricGroup):
        return None
    return Exchange(group, -(-rows * width * dtype.itemsize // 4), device)
