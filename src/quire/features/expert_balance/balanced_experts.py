"""A layer of experts with redundant copies on several ranks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.features.expert_balance.placement import (
    Placement,
    imbalance,
    keep_slots,
    place,
    rooms_of,
)
from quire.features.expert_balance.stats import ExpertStats
from quire.layers.expert_weights import even_shard
from quire.layers.experts import Experts
from quire.ops.experts import ExpertCopies

ENOUGH = 1.15
"""A layer keeps its placement while the largest work of a rank, divided by the mean, is below
this."""


class BalancedExperts:
    """A layer's experts and redundant copies of some. `rearrange` places them by their loads.

    Args:
        redundant: number of copies over all ranks.

    Attributes:
        stats: statistics at the last call of `rearrange`.

    Raises:
        ConfigError: the experts have fixed input scales, which cannot move between ranks.
    """

    def __init__(self, layer: Experts, redundant: int) -> None:
        if layer.up.weight.input_scale is not None:
            raise ConfigError(
                "redundant_experts is not supported for experts with fixed input scales",
                "redundant_experts",
            )
        self.layer, self.group = layer, layer.group
        self.stats = ExpertStats()
        count, world = layer.spec.experts, layer.group.world
        held = [even_shard(count, 1, rank, world) for rank in range(world)]
        self._rooms = rooms_of([_size(own) for own in held], redundant)
        self.placement: Placement = tuple(
            (*range(*own), *(-1,) * (room - _size(own)))
            for own, room in zip(held, self._rooms, strict=True)
        )
        more = self._rooms[self.group.rank] - _size(held[self.group.rank])
        for linear in (layer.up, layer.down):
            linear.grow(more)
        device = layer.router.weight.device
        layer.router.copies = self._copies = ExpertCopies(
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, world, dtype=torch.int32, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
        )
        # The loads are not known yet, so they are assumed to be equal.
        self._move(place([1.0] * count, self._rooms))
        self.stats.moves = 0

    def rearrange(self) -> None:
        """Places the copies anew if ranks had unequal work since the last call, and resets the
        counts of tokens. All ranks call it between the same steps."""
        # All ranks must use the same counts.
        counted = self.group.all_gather(self._copies.loads, 0)
        loads = counted[: self.layer.spec.experts].tolist()
        self._copies.loads.zero_()
        found, mean = imbalance(loads, self.placement), sum(loads) / self.group.world
        self.stats.most_work += found * mean
        self.stats.mean_work += mean
        if found <= ENOUGH:
            return
        wanted = place(loads, self._rooms)
        if imbalance(loads, wanted) < found:
            self._move(wanted)

    def _move(self, wanted: Placement) -> None:
        wanted = keep_slots(self.placement, wanted)
        routes, lists = _routes(self.placement, wanted)
        rank, rounds = self.group.rank, max(map(len, lists))
        self.stats.moves += len(routes)
        for linear in (self.layer.up, self.layer.down):
            arrived: list[tuple[int, list[Tensor]]] = []
            for index in range(rounds):
                own = lists[rank][index : index + 1]
                # A rank with nothing to send takes part with a tensor that no rank reads.
                sent = self.placement[rank].index(own[0]) if own else 0
                parts = [self._gathered(tensor) for tensor in linear.tensors(sent)]
                for target, slot, source, expert in routes:
                    if target == rank and lists[source][index : index + 1] == [expert]:
                        arrived.append((slot, [part[source].clone() for part in parts]))
            # Slots are written only here because the sends above read them.
            for slot, tensors in arrived:
                for stored, new in zip(linear.tensors(slot), tensors, strict=True):
                    stored.view(torch.uint8).copy_(new.view_as(stored.view(torch.uint8)))
        self.placement = wanted
        self._tell()

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Returns the bytes of every rank's tensor, [ranks, bytes]. Bytes are gathered because the
        collective does not support all dtypes."""
        raw = tensor.contiguous().view(torch.uint8).reshape(1, -1)
        return self.group.all_gather(raw, 0)

    def _tell(self) -> None:
        """Updates the tables that the layer's router reads."""
        world = self.group.world
        counts = [0] * self.layer.spec.experts
        slots = [[-1] * world for _ in counts]
        for rank, own in enumerate(self.placement):
            for slot, expert in enumerate(own):
                if expert >= 0:
                    if rank == self.group.rank:
                        slots[expert][counts[expert]] = slot
                    counts[expert] += 1
        self._copies.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        self._copies.slots.copy_(torch.tensor(slots, dtype=torch.int32))


def _routes(
    before: Placement, after: Placement
) -> tuple[list[tuple[int, int, int, int]], list[list[int]]]:
    """Returns the moves as (to rank, to slot, from rank, expert), and the experts that each rank
    sends. A rank sends an expert once, even if several ranks need it."""
    holders: dict[int, list[int]] = {}
    for rank, own in enumerate(before):
        for expert in own:
            holders.setdefault(expert, []).append(rank)
    routes, lists = [], [list[int]() for _ in before]
    sender: dict[int, int] = {}
    load: Counter[int] = Counter()
    for target, (old, new) in enumerate(zip(before, after, strict=True)):
        for slot, (was, expert) in enumerate(zip(old, new, strict=True)):
            if expert < 0 or expert == was:
                continue
            if expert not in sender:
                source = min(holders[expert], key=lambda rank: (load[rank], rank))
                sender[expert] = source
                load[source] += 1
                lists[source].append(expert)
            routes.append((target, slot, sender[expert], expert))
    return routes, lists


def _size(cut: tuple[int, int]) -> int:
    return cut[1] - cut[0]
