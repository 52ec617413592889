"""The place `peer` where engines read each other's KV cache.

Nothing is copied on the way: each rank reads its heads of a peer's blocks, from the ranks that hold
them, into its own blocks. What goes "out" stays where it is, and the move says that it may be read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.decoder import DecoderLayers
from quire.parallel import ProcessGroup
from quire.plan import KVGroup, Transfer
from quire.runner.kv_cache import KVCache
from quire.runner.transfer.engine_memory import (
    EngineMemory,
    RankMemory,
    decode_memory,
    encode_memory,
    group_memory,
    pieces_of,
)
from quire.runner.transfer.layer_reads import LayerPieces, PeerClock, WrittenPieces
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.peer import rank_heads
from quire.runner.transfer.rank_moves import RankMoves, cells_bytes, cells_of
from quire.runner.transfer.remote_reads import Read, ReadPart, RemoteReads
from quire.runner.transfer.shared_memory import map_shared

_CLOSE_SECONDS = 5.0
_TOKEN = 64
"""Bytes before the cells, for the token of shared memory."""
_MOST_DESCRIPTION = 1 << 16


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Tells the engine what the first rank knows.

    sizes: bytes of a block with the heads of all ranks, by group. memory: of all ranks, for peers;
    see `engine_memory`.
    """

    sizes: tuple[int, ...]
    memory: bytes


class DirectPlace:
    """Reads blocks of peers into the blocks of this rank.

    A transfer's `slots` are blocks of the peer that its `source` describes. Those that a `step` of
    the peer fills are read layer by layer.

    groups: those of the cache. num_layers: of the model, of which a peer has as many.
    """

    def __init__(
        self,
        agent: RemoteReads,
        layouts: list[BlockLayout],
        groups: Sequence[KVGroup],
        num_layers: int,
        pool: RemoteBlocks,
        moves: RankMoves,
        fence: Callable[[], Callable[[], bool]],
    ) -> None:
        self.pool = pool
        self._agent = agent
        self._layouts = layouts
        self._groups = groups
        self._num_layers = num_layers
        self._moves = moves
        self._fence = fence

    def out(self, transfer: Transfer) -> None:
        """Begins a move that ends when all that was launched has written what it writes."""
        passed = self._fence()
        self._agent.expect()
        self._moves.begin(transfer.id, lambda: passed() or None)

    def into(self, transfer: Transfer) -> None:
        try:
            memory = decode_memory(transfer.source)
            read = Read(list(self._parts(transfer, memory)), self._fence())
        except (ValueError, IndexError, msgspec.DecodeError):
            self._moves.begin(transfer.id, lambda: False)  # a peer's words, which may be wrong
            return
        self._moves.begin(transfer.id, read.ended)
        self._agent.read(read)

    def _parts(self, transfer: Transfer, memory: EngineMemory) -> Iterator[ReadPart]:
        layout = self._layouts[transfer.group]
        for number, rank in enumerate(memory.ranks):
            group = rank.groups[transfer.group]
            read = functools.partial(pieces_of, layout, transfer.blocks, group, transfer.slots)
            whole = read()
            if whole is None:
                continue
            if transfer.step < 0 or memory.clock is None:
                yield ReadPart(rank, WrittenPieces(whole))
                continue
            first = transfer.step * self._num_layers + 1
            due = [first + layer for layer in self._groups[transfer.group].layers]
            yield ReadPart(rank, LayerPieces(read, due, PeerClock(memory.clock, number)))

    def ended(self) -> tuple[list[int], list[int]]:
        return self._moves.ended()

    @property
    def busy(self) -> bool:
        return self._moves.busy

    def close(self) -> None:
        self._agent.close(_CLOSE_SECONDS)


OpenAgent = Callable[[Sequence[Tensor], torch.device], RemoteReads]
"""Opens the way to other engines' memory for a rank with these tensors."""


def open_direct_place(
    cache: KVCache,
    models: Sequence[DecoderLayers],
    group: ProcessGroup,
    device: torch.device,
    open_agent: OpenAgent,
) -> DirectPlace:
    """Lets peers read a rank's KV cache; all ranks call it at once. models: see `rank_heads`.

    Raises:
        ConfigError: what reads memory is not there, or of no use.
    """
    tensors = [cache.block_tensors(index) for index in range(len(cache.groups))]
    heads = rank_heads(models, group)
    layouts = [BlockLayout(each, own) for each, own in zip(tensors, heads, strict=True)]
    agent = open_agent([tensor for each in tensors for tensor in each], device)
    own = RankMemory(
        agent.metadata,
        agent.kind,
        agent.device,
        [group_memory(layout, group.rank == 0) for layout in layouts],
    )
    pool = RemoteBlocks(tuple(layout.size for layout in layouts), _gathered(own, group, device))
    fence = _cuda_fence(device) if device.type == "cuda" else _no_fence
    moves = _moves(group, str(device))
    return DirectPlace(agent, layouts, cache.groups, len(models[0].layers), pool, moves, fence)


def _gathered(own: RankMemory, group: ProcessGroup, device: torch.device) -> bytes:
    """Returns the memory of all ranks."""
    if group.world == 1:
        return encode_memory([own])
    data = encode_memory([own])
    if len(data) > _MOST_DESCRIPTION:
        raise ConfigError(f"role: a rank's memory takes {len(data)} bytes to describe")
    padded = torch.zeros(_MOST_DESCRIPTION + 1, dtype=torch.int32, device=device)
    padded[0] = len(data)
    padded[1 : 1 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    told = group.all_gather(padded[None], 0).cpu().numpy()
    memories = [decode_memory(row[1 : 1 + row[0]].astype(np.uint8).tobytes()) for row in told]
    return encode_memory([rank for memory in memories for rank in memory.ranks])


def _moves(group: ProcessGroup, device: str) -> RankMoves:
    if group.world == 1:
        return RankMoves(np.zeros((1, 1), dtype=np.int64), 0)
    memory, handle = map_shared(_TOKEN + cells_bytes(group.world), group, device)
    group.all_gather(torch.zeros(1, device=device))  # all have opened it
    if handle is not None:
        os.close(handle.descriptor)
    cells = cells_of(np.frombuffer(memory, dtype=np.uint8), _TOKEN, group.world)
    return RankMoves(cells, group.rank)


def _no_fence() -> Callable[[], bool]:
    return lambda: True


def _cuda_fence(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Returns a function that marks how far the device's stream is by now, and returns whether it
    has come there."""

    def fence() -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.query

    return fence
