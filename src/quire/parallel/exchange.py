"""All-reduces by copies between GPUs, which overlap with kernels that fill the multiprocessors.

`send` runs on a side stream. It copies the rank's tensor to every peer, which occupies no
multiprocessor, and then sets a flag. `collect` runs on the stream that needs the sum. Its kernel
waits for the peers' flags and adds the terms (`ops/triton/collectives/all_reduce.py`).
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
"""Receive buffers for each peer: two for each half of a step, used in turn.

Two are enough. A rank sends sum n of a half after it has collected sum n - 1. That sum needed the
peers' parts, which they sent after they had collected sum n - 2. So all ranks have collected sum
n - 2, and its buffer is free."""

_ALIGNED = 4
"""Alignment in words of 4 bytes, because kernels are compiled for addresses aligned to 16 bytes."""


class Exchange:
    """The receive buffers of all ranks in a group.

    Args:
        group: the ranks.
        storages: `exchange_bytes` of memory from each rank, zero at first. The exchange holds them,
            because peers may write there at any time.
        most: size of the largest sum, in words of 4 bytes.
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

        def words(owner: int, start: int, count: int) -> Tensor:
            view = torch.empty(0, dtype=torch.int32, device=device)
            view.set_(storages[owner], start // 4, (count,), (1,))
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
            # A peer's buffers are in the order of ranks, beginning with the rank after it.
            places = [(rank - peer - 1) % world for peer in peers]
            self._targets.append(
                [
                    words(peer, starts[first + place], most)
                    for peer, place in zip(peers, places, strict=True)
                ]
            )

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        """Returns whether the exchange can sum tensors of this size, shape and dtype."""
        words = kernels.words_of(x)
        return words is not None and words <= self._most and residual_matches(x, residual)

    def send(self, slot: int, x: Tensor) -> None:
        """Copies x to all peers, on the current stream.

        Args:
            slot: 0 to `SLOTS` - 1, the receive buffer.
            x: this rank's term of the sum.
        """
        words = x.view(-1).view(torch.int32)
        for target in self._targets[slot]:
            target[: len(words)].copy_(words)
        kernels.signal(self._group.peers, self._parts[slot])

    def collect(
        self, slot: int, x: Tensor, residual: Tensor | None, out: Tensor, name: str
    ) -> None:
        """Writes the sum of all ranks' x, plus the residual, to `out`.

        The copies of `send` must have ended on this rank.

        Args:
            slot: the receive buffer that was passed to `send`.
            x: this rank's term of the sum.
            residual: added to the sum, or None.
            out: like x.
            name: name of the sum in error messages.
        """
        site = self._group.site(name)
        kernels.collect(self._group.peers, self._parts[slot], x, residual, out, site)


def exchange_bytes(most: int, world: int) -> int:
    """Returns the bytes of each rank's buffers and flags, for sums of up to `most` words each."""
    return _starts(most, world)[-1]


def _flags(world: int) -> int:
    """Returns the number of words for a slot's flags."""
    return -(-world // _ALIGNED) * _ALIGNED


def _starts(most: int, world: int) -> list[int]:
    """Returns the byte offsets of all buffers, then of the flags, then the total size."""
    return aligned_starts([4 * most] * (SLOTS * (world - 1)) + [4 * SLOTS * _flags(world)])


def make_exchange(
    group: TorchGroup, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> Exchange | None:
    """Makes the exchange of a group. All ranks must call it together.

    Args:
        group: the ranks.
        rows: most rows of a sum.
        width: elements of a row.
        dtype: dtype of the elements.
        device: device of this rank.

    Returns:
        None if the ranks have no access to each other's memory.
    """
    if not isinstance(group, SymmetricGroup):
        return None
    most = -(-rows * width * dtype.itemsize // 4)
    size = exchange_bytes(most, group.world)
    own = torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
    exchange = Exchange(group, group.share(own), most)
    # A peer may write only after this memory is zero.
    torch.cuda.synchronize(device)
    torch.distributed.barrier(group.handle)
    return exchange
