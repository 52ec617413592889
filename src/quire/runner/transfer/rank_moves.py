"""Moves of blocks by several ranks, each of its own heads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.parallel import ProcessGroup
from quire.runner.transfer.shared_memory import map_shared

_BOARD = 64
"""The beginning of a board, behind the token."""
OUT, INTO = 0, 1


class Moves:
    """The moves to and from a place. Those of one direction end in the order in which they began,
    on each rank; one has ended when it has on all.

    board: int64 [ranks, 2], of memory that all ranks map: how many moves out and in each has ended.
    """

    def __init__(self, board: Any, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._begun = [0, 0]
        self._own: tuple[deque[tuple[int, Callable[[], bool]]], ...] = deque(), deque()
        """By direction, moves that have not ended here: their numbers."""
        self._all: tuple[deque[tuple[int, int]], ...] = deque(), deque()
        """By direction, moves that have not ended everywhere: numbers and ids."""

    def begin(self, direction: int, id: int, done: Callable[[], bool]) -> None:
        """Adds a move. done: whether it has ended on this rank."""
        self._begun[direction] += 1
        self._own[direction].append((self._begun[direction], done))
        self._all[direction].append((self._begun[direction], id))

    def ended(self) -> list[int]:
        """Returns the ids of the moves that ended since the last call."""
        finished: list[int] = []
        for direction, (own, everywhere) in enumerate(zip(self._own, self._all, strict=True)):
            while own and own[0][1]():
                self._board[self._rank, direction] = own.popleft()[0]
            ended = int(self._board[:, direction].min()) if everywhere else 0
            while everywhere and everywhere[0][0] <= ended:
                finished.append(everywhere.popleft()[1])
        return finished

    @property
    def busy(self) -> bool:
        """Whether any move has not ended."""
        return any(self._all)

    def drain(self) -> None:
        """Waits until all moves have ended on this rank."""
        while any(self._own):
            self.ended()


def board_bytes(world: int) -> int:
    """Returns the bytes of the token and the board of so many ranks."""
    return _BOARD + 16 * world


def board_of(memory: Any, world: int) -> Any:
    """Returns the board, int64 [ranks, 2], at the beginning of shared memory, uint8 [n]."""
    return memory[_BOARD : board_bytes(world)].view(np.int64).reshape(-1, 2)


def shared_moves(group: ProcessGroup, device: str) -> Moves:
    """Returns the moves of this rank. The ranks of the group call it at once.

    device: of tensors that the group gathers.
    """
    if group.world == 1:
        return Moves(np.zeros((1, 2), dtype=np.int64), 0)
    memory, handle = map_shared(board_bytes(group.world), group, device)
    group.all_gather(torch.zeros(1, device=device))  # all have opened it
    if handle is not None:
        os.close(handle.descriptor)
    return Moves(board_of(np.frombuffer(memory, dtype=np.uint8), group.world), group.rank)


# Moves of blocks by several ranks that end in any order, and may fail.

_CELLS = 4096
"""Ends that a rank can tell before the first one reads them."""

Ended = Callable[[], bool | None]
"""Tells whether a move was good; None: it is under way."""


def cells_bytes(world: int) -> int:
    """Returns the bytes of the cells of so many ranks."""
    return 8 * _CELLS * world


@dataclass(slots=True)
class _Everywhere:
    """A move on all ranks: how many have not told of its end, and whether it was good on those
    that have."""

    missing: int
    good: bool = True


class RankMoves:
    """The moves of one rank. One has ended once it has on all ranks, and failed if it has on any;
    the first rank learns of that.

    cells: int64 [ranks, cells], zeros, of memory that all ranks map. A rank writes the ends of its
    moves into its row, one after the other, and the first rank puts zeros in their place.
    """

    def __init__(self, cells: Any, rank: int) -> None:
        self._cells = cells
        self._rank = rank
        self._at = [0] * len(cells)
        self._own: dict[int, Ended] = {}
        self._all: dict[int, _Everywhere] = {}

    def begin(self, id: int, ended: Ended) -> None:
        """Adds a move. ended: of this rank's part."""
        self._own[id] = ended
        if self._rank == 0:
            self._everywhere(id)

    def ended(self) -> tuple[list[int], list[int]]:
        """Returns the ids of the moves that finished, and failed, since the last call; none on
        other ranks than the first."""
        told = {id: ended() for id, ended in self._own.items()}
        finished: list[int] = []
        failed: list[int] = []
        for id, good in told.items():
            if good is None or (self._rank and not self._tell(2 * id + good)):
                continue
            del self._own[id]
            if self._rank == 0:
                self._take(id, good, finished, failed)
        for rank in range(1, len(self._cells) if self._rank == 0 else 0):
            while end := self._read(rank):
                self._take(end >> 1, bool(end & 1), finished, failed)
        return finished, failed

    def _tell(self, end: int) -> bool:
        """Writes an end where the first rank reads it; False if there is no room yet."""
        cells, at = self._cells[self._rank], self._at[self._rank]
        if cells[at]:
            return False
        cells[at] = end
        self._at[self._rank] = (at + 1) % len(cells)
        return True

    def _read(self, rank: int) -> int:
        """Returns another rank's next end, 0 if there is none yet."""
        cells, at = self._cells[rank], self._at[rank]
        end = int(cells[at])
        if end:
            cells[at] = 0
            self._at[rank] = (at + 1) % len(cells)
        return end

    def _take(self, id: int, good: bool, finished: list[int], failed: list[int]) -> None:
        everywhere = self._everywhere(id)
        everywhere.missing -= 1
        everywhere.good &= good
        if not everywhere.missing:
            del self._all[id]
            (finished if everywhere.good else failed).append(id)

    def _everywhere(self, id: int) -> _Everywhere:
        # Another rank may have ended a move before this one has begun it.
        return self._all.setdefault(id, _Everywhere(len(self._cells)))

    @property
    def busy(self) -> bool:
        """Whether any move has not ended."""
        return bool(self._own or self._all)


def cells_of(memory: Any, begin: int, world: int) -> Any:
    """Returns the cells, int64 [ranks, cells], at a place of shared memory, uint8 [n]."""
    return memory[begin : begin + cells_bytes(world)].view(np.int64).reshape(world, -1)
