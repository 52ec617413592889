"""Places experts and their redundant copies so that ranks have equal work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Placement = tuple[tuple[int, ...], ...]
"""The experts of each rank, in the order of its slots; -1: the slot is empty."""

_MOST_SWAPS = 200


def rooms_of(held: Sequence[int], further: int) -> list[int]:
    """Returns the number of slots of each rank. The numbers differ by at most one.

    Args:
        held: number of experts of each rank without copies. They differ by at most one.
        further: number of redundant copies over all ranks.
    """
    rooms = list(held)
    for _ in range(further):
        rooms[rooms.index(min(rooms))] += 1
    return rooms


def place(loads: Sequence[float], rooms: Sequence[int]) -> Placement:
    """Returns which experts each rank holds.

    An expert's load is divided evenly among its copies, and a rank holds at most one of them. Each
    further copy is given to the expert with the most load per copy. Then each copy, heaviest first,
    goes to the rank with the least work that has room. Finally two experts are exchanged as long as
    that makes the ranks' work more even.

    Args:
        loads: load of each expert.
        rooms: slots of each rank. They differ by at most one, and there are at least as many as
            experts.
    """
    ranks = len(rooms)
    copies = _copies(loads, min(sum(rooms), len(loads) * ranks), ranks)
    shares = [load / count for load, count in zip(loads, copies, strict=True)]
    held: list[set[int]] = [set() for _ in rooms]
    work = [0.0] * ranks
    order = sorted(range(len(loads)), key=lambda expert: (-shares[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            fit = [r for r in range(ranks) if len(held[r]) < rooms[r] and expert not in held[r]]
            rank = min(fit, key=lambda r: (work[r], r), default=-1)
            if rank < 0:
                rank = _make_room(expert, held, rooms, shares, work)
            held[rank].add(expert)
            work[rank] += shares[expert]
    for _ in range(_MOST_SWAPS):
        if not _swap(held, shares, work):
            break
    return tuple(
        (*sorted(own), *(-1,) * (room - len(own))) for own, room in zip(held, rooms, strict=True)
    )


def _copies(loads: Sequence[float], total: int, ranks: int) -> list[int]:
    """Returns how many copies each expert has. Their sum is `total`."""
    copies = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(total - len(loads)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
    return copies


def _make_room(
    expert: int,
    held: list[set[int]],
    rooms: Sequence[int],
    shares: Sequence[float],
    work: list[float],
) -> int:
    """Makes room for an expert on a full rank without it, and returns the rank.

    It moves another expert from there to a rank with room. Such an expert exists: the ranks with
    room all have `expert`. The full rank has no fewer experts than they, but not this one.
    """
    target = next(r for r in range(len(rooms)) if len(held[r]) < rooms[r])
    rank = min((r for r in range(len(rooms)) if expert not in held[r]), key=lambda r: work[r])
    moved = min(held[rank] - held[target], key=lambda e: (shares[e], e))
    held[rank].remove(moved)
    held[target].add(moved)
    work[rank] -= shares[moved]
    work[target] += shares[moved]
    return rank


def _swap(held: list[set[int]], shares: Sequence[float], work: list[float]) -> bool:
    """Exchanges two experts between the ranks with the most and the least work, if that makes their
    work more even. Returns whether it did."""
    most = max(range(len(work)), key=lambda r: work[r])
    least = min(range(len(work)), key=lambda r: work[r])
    wanted = (work[most] - work[least]) / 2
    pairs = (
        (abs(wanted - (shares[mine] - shares[other])), mine, other)
        for mine in held[most] - held[least]
        for other in held[least] - held[most]
    )
    error, mine, other = min(pairs, default=(wanted, -1, -1))
    if error >= wanted * (1 - 1e-6):
        return False
    held[most] ^= {mine, other}
    held[least] ^= {mine, other}
    moved = shares[mine] - shares[other]
    work[most] -= moved
    work[least] += moved
    return True


def imbalance(loads: Sequence[float], placement: Placement) -> float:
    """Returns the largest work of a rank, divided by the mean; 1 without any work."""
    copies = [0] * len(loads)
    for own in placement:
        for expert in own:
            if expert >= 0:
                copies[expert] += 1
    work = [sum(loads[e] / copies[e] for e in own if e >= 0) for own in placement]
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def keep_slots(before: Placement, after: Placement) -> Placement:
    """Returns `after` with the slots reordered, so that experts that a rank already has keep their
    slots."""
    kept = []
    for old, new in zip(before, after, strict=True):
        come = iter([expert for expert in new if expert not in old or expert < 0])
        kept.append(
            tuple(expert if expert >= 0 and expert in new else next(come) for expert in old)
        )
    return tuple(kept)
