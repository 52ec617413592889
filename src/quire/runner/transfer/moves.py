"""Moves of blocks by several ranks, each of its own heads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
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
