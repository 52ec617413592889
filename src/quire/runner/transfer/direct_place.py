"""The place `peer`, if engines read each other's KV cache directly.

There is no copy in between: each rank reads its heads of a peer's blocks, from the ranks that hold
them, into its own blocks. A move "out" moves nothing. It ends when the peer may read the blocks.
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
    find_pieces,
    group_memory,
)
from quire.runner.transfer.layer_reads import LayerPieces, PeerClock, WrittenPieces
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.peer import rank_heads
from quire.runner.transfer.rank_moves import RankMoves, cells_bytes, view_cells
from quire.runner.transfer.remote_reads import Read, ReadPart, RemoteReads
from quire.runner.transfer.shared_memory import map_shared

_CLOSE_SECONDS = 5.0
_TOKEN = 64
"""Bytes of shared memory before the cells; they hold its token."""
_MOST_DESCRIPTION = 1 << 16


@dataclass(frozen=True, slots=True)
class RemoteBlocks:
    """Describes the blocks of all ranks to the engine.

    Attributes:
        sizes: by group, bytes of a block with the heads of all ranks.
        memory: the memory of all ranks, for peers; see `engine_memory`.
    """

    sizes: tuple[int, ...]
    memory: bytes


class DirectPlace:
    """Reads blocks of peers into the blocks of this rank.

    A transfer's `slots` are blocks of the peer that its `source` describes. If a `step` of the peer
    fills them, they are read layer by layer.

    Args:
        groups: KV groups of the cache.
        num_layers: layers of the model; a peer has the same number.
        fence: marks the end of all launched work. It returns a function, which returns whether the
            device has reached the mark.
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
        self.slots: tuple[int, ...] = ()
        self._agent = agent
        self._layouts = layouts
        self._groups = groups
        self._num_layers = num_layers
        self._moves = moves
        self._fence = fence

    def out(self, transfer: Transfer) -> None:
        """Begins a move that ends when all launched work has written its blocks."""
        passed = self._fence()
        self._agent.expect()
        self._moves.begin(transfer.id, lambda: passed() or None)

    def into(self, transfer: Transfer) -> None:
        try:
            memory = decode_memory(transfer.source)
            read = Read(list(self._parts(transfer, memory)), self._fence())
        except (ValueError, IndexError, msgspec.DecodeError):
            # The peer described memory that it does not have.
            self._moves.begin(transfer.id, lambda: False)
            return
        self._moves.begin(transfer.id, read.ended)
        self._agent.read(read)

    def _parts(self, transfer: Transfer, memory: EngineMemory) -> Iterator[ReadPart]:
        layout = self._layouts[transfer.group]
        for number, rank in enumerate(memory.ranks):
            group = rank.groups[transfer.group]
            read = functools.partial(find_pieces, layout, transfer.blocks, group, transfer.slots)
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
"""Returns the agent of a rank: peers read these tensors, and the agent reads the peers' tensors."""


def open_direct_place(
    cache: KVCache,
    models: Sequence[DecoderLayers],
    group: ProcessGroup,
    device: torch.device,
    open_agent: OpenAgent,
) -> DirectPlace:
    """Lets peers read a rank's KV cache. All ranks call it at the same time.

    Args:
        models: see `rank_heads`.
        open_agent: makes the agent that reads peers' memory.

    Raises:
        ConfigError: the agent's library or driver is missing, or cannot read this memory.
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
        raise ConfigError(
            f"role: the description of a rank's memory has {len(data)} bytes, more than "
            f"{_MOST_DESCRIPTION}",
            "role",
        )
    padded = torch.zeros(_MOST_DESCRIPTION + 1, dtype=torch.int32, device=device)
    padded[0] = len(data)
    padded[1 : 1 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = group.all_gather(padded[None], 0).cpu().numpy()
    memories = [decode_memory(row[1 : 1 + row[0]].astype(np.uint8).tobytes()) for row in gathered]
    return encode_memory([rank for memory in memories for rank in memory.ranks])


def _moves(group: ProcessGroup, device: str) -> RankMoves:
    if group.world == 1:
        return RankMoves(np.zeros((1, 1), dtype=np.int64), 0)
    memory, handle = map_shared(_TOKEN + cells_bytes(group.world), group, device)
    group.all_gather(torch.zeros(1, device=device))  # All ranks have opened it.
    if handle is not None:
        os.close(handle.descriptor)
    cells = view_cells(np.frombuffer(memory, dtype=np.uint8), _TOKEN, group.world)
    return RankMoves(cells, group.rank)


def _no_fence() -> Callable[[], bool]:
    return lambda: True


def _cuda_fence(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Returns a fence of the device's stream; see `DirectPlace`."""

    def fence() -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.query

    return fence
