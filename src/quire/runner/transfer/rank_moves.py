"""Moves of blocks by several ranks. Each rank moves its own heads."""

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
"""Offset of a board in its memory, after the token."""
OUT, INTO = 0, 1


class Moves:
    """The moves to and from a place, on one rank.

    On each rank, the moves of one direction end in the order in which they began. A move has ended
    when it has ended on all ranks.

    Args:
        board: int64 [ranks, 2], in memory that all ranks map: the numbers of moves out and of moves
            in that each rank has ended.
    """

    def __init__(self, board: Any, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._begun = [0, 0]
        self._own: tuple[deque[tuple[int, Callable[[], bool]]], ...] = deque(), deque()
        """By direction, numbers of the moves that have not ended on this rank."""
        self._all: tuple[deque[tuple[int, int]], ...] = deque(), deque()
        """By direction, numbers and ids of the moves that have not ended on all ranks."""

    def begin(self, direction: int, id: int, done: Callable[[], bool]) -> None:
        """Adds a move.

        Args:
            done: returns whether the move has ended on this rank.
        """
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
    """Returns the bytes of the token and the board of `world` ranks."""
    return _BOARD + 16 * world


def view_board(memory: Any, world: int) -> Any:
    """Returns the board of shared memory, uint8 [n], as int64 [ranks, 2]."""
    return memory[_BOARD : board_bytes(world)].view(np.int64).reshape(-1, 2)


def shared_moves(group: ProcessGroup, device: str) -> Moves:
    """Returns the moves of this rank. All ranks of the group call it at the same time.

    Args:
        device: device of the tensors that the group gathers.
    """
    if group.world == 1:
        return Moves(np.zeros((1, 2), dtype=np.int64), 0)
    memory, handle = map_shared(board_bytes(group.world), group, device)
    group.all_gather(torch.zeros(1, device=device))  # All ranks have opened it.
    if handle is not None:
        os.close(handle.descriptor)
    return Moves(view_board(np.frombuffer(memory, dtype=np.uint8), group.world), group.rank)


# Moves of blocks by several ranks that end in any order, and may fail.

_CELLS = 4096
"""Most ended moves that a rank can report before the first rank reads the reports."""

MoveOutcome = Callable[[], bool | None]
"""Returns whether a move succeeded, or None while it is under way."""


def cells_bytes(world: int) -> int:
    """Returns the bytes of the cells of `world` ranks."""
    return 8 * _CELLS * world


@dataclass(slots=True)
class PendingMove:
    """A move of all ranks.

    Attributes:
        missing: number of ranks that have not reported its end.
        good: whether the move succeeded on all ranks that have reported its end.
    """

    missing: int
    good: bool = True


class RankMoves:
    """The moves of one rank.

    A move has ended once it has ended on all ranks, and failed if it has failed on any rank. Only
    the first rank knows this, because the other ranks report to it.

    Args:
        cells: int64 [ranks, cells], zeros at first, in memory that all ranks map. A rank writes the
            ends of its moves into its row, one after the other. The first rank reads each cell and
            sets it to zero again.
    """

    def __init__(self, cells: Any, rank: int) -> None:
        self._cells = cells
        self._rank = rank
        self._at = [0] * len(cells)
        self._own: dict[int, MoveOutcome] = {}
        self._pending: dict[int, PendingMove] = {}

    def begin(self, id: int, ended: MoveOutcome) -> None:
        """Adds a move.

        Args:
            ended: returns how this rank's part ended.
        """
        self._own[id] = ended
        if self._rank == 0:
            self._move(id)

    def ended(self) -> tuple[list[int], list[int]]:
        """Returns the ids of the moves that finished, and failed, since the last call.

        Ranks other than the first return none.
        """
        results = {id: ended() for id, ended in self._own.items()}
        finished: list[int] = []
        failed: list[int] = []
        for id, good in results.items():
            if good is None or (self._rank and not self._report(2 * id + good)):
                continue
            del self._own[id]
            if self._rank == 0:
                self._count(id, good, finished, failed)
        for rank in range(1, len(self._cells) if self._rank == 0 else 0):
            while end := self._read(rank):
                self._count(end >> 1, bool(end & 1), finished, failed)
        return finished, failed

    def _report(self, end: int) -> bool:
        """Reports an end to the first rank. Returns False if no cell is free yet."""
        cells, at = self._cells[self._rank], self._at[self._rank]
        if cells[at]:
            return False
        cells[at] = end
        self._at[self._rank] = (at + 1) % len(cells)
        return True

    def _read(self, rank: int) -> int:
        """Returns another rank's next end, or 0."""
        cells, at = self._cells[rank], self._at[rank]
        end = int(cells[at])
        if end:
            cells[at] = 0
            self._at[rank] = (at + 1) % len(cells)
        return end

    def _count(self, id: int, good: bool, finished: list[int], failed: list[int]) -> None:
        """Counts a rank that has ended a move. The last rank adds the move to one of the lists."""
        move = self._move(id)
        move.missing -= 1
        move.good &= good
        if not move.missing:
            del self._pending[id]
            (finished if move.good else failed).append(id)

    def _move(self, id: int) -> PendingMove:
        # Another rank may end a move before this one begins it.
        return self._pending.setdefault(id, PendingMove(len(self._cells)))

    @property
    def busy(self) -> bool:
        """Whether any move has not ended."""
        return bool(self._own or self._pending)


def view_cells(memory: Any, begin: int, world: int) -> Any:
    """Returns the cells in shared memory, uint8 [n], from byte `begin` on: int64 [ranks, cells]."""
    return memory[begin : begin + cells_bytes(world)].view(np.int64).reshape(world, -1)
