"""Reads that follow a peer's layers: the layers write a clock, and no layer is read before it was
written."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire.arrays import int32
from quire.features.disaggregation.layer_clock import LAYER_CLOCK, LayerClock, open_hook
from quire.parallel import SingleGroup
from quire.plan import KVGroup, Transfer
from quire.runner.transfer import layer_reads
from quire.runner.transfer.direct_place import DirectPlace, RemoteBlocks
from quire.runner.transfer.engine_memory import (
    MemoryPieces,
    RankMemory,
    encode_memory,
    group_memory,
)
from quire.runner.transfer.layer_reads import LayerPieces, PeerClock, sees_clock
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.rank_moves import RankMoves
from quire.runner.transfer.shared_memory import SharedMemory
from tests.features.disaggregation.test_disagg_engines import config_of, folders
from tests.runner.test_ipc import CPU, FakeDriver, IpcAgent, copies, wait

__all__ = ["folders"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAYERS, BLOCKS, WIDTH = 6, 5, 16
GROUPS = (KVGroup((0, 2, 5)), KVGroup((1, 3, 4)))
"""Layers of two kinds, in turn."""


class Layer(nn.Module):
    def __init__(self, store: Callable[[], None]) -> None:
        super().__init__()
        self.mlp = nn.Identity()
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store()
        return self.mlp(self.mlp(x))  # as two halves of a step do


class Model(nn.Module):
    """Layers that store their KV. tensors: by group, [blocks, layers, width]."""

    group = SingleGroup()

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.device = device
        self.tensors = [
            torch.zeros(BLOCKS, len(group.layers), WIDTH, dtype=torch.int32, device=device)
            for group in GROUPS
        ]
        self.step = torch.zeros((), dtype=torch.int32, device=device)
        self.nap: Callable[[], None] = lambda: None
        self.layers = nn.ModuleList(Layer(lambda i=i: self.store(i)) for i in range(LAYERS))

    def store(self, layer: int) -> None:
        self.nap()
        for group, tensor in zip(GROUPS, self.tensors, strict=True):
            if layer in group.layers:
                tensor[:, group.layers.index(layer)] = 100 * self.step + layer

    def run(self) -> None:
        x = torch.zeros(1, device=self.device)
        for layer in self.layers:
            x = layer(x)


class Step:
    """A step, with the attributes that the hook reads."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.plan = self


class Writer:
    """A model with a clock."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.model = Model(device)
        self.hook = LayerClock()
        self.hook.attach(self.model)  # type: ignore[arg-type]
        self.clock: SharedMemory = self.hook.calls()[LAYER_CLOCK](None)

    def run(self, step: int) -> None:
        self.hook.begin(Step(step))  # type: ignore[arg-type]
        self.model.step.fill_(step)
        self.model.run()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.hook.close()
    made.hook.close()


class Reader:
    """A rank that reads a writer's blocks."""

    def __init__(self, writer: Writer) -> None:
        self.taken: list[int] = []
        self.tensors = [torch.zeros_like(tensor) for tensor in writer.model.tensors]
        self.agent = self.agent_of(self.tensors)
        peer = self.agent_of(writer.model.tensors)
        layouts = [BlockLayout([tensor]) for tensor in writer.model.tensors]
        memory = [group_memory(layout, True) for layout in layouts]
        self.peer = peer
        self.source = encode_memory([RankMemory(peer.metadata, "DRAM", 0, memory)], writer.clock)
        self.place = DirectPlace(
            self.agent,
            [BlockLayout([tensor]) for tensor in self.tensors],
            GROUPS,
            LAYERS,
            RemoteBlocks((), b""),
            RankMoves(np.zeros((1, 1), dtype=np.int64), 0),
            lambda: lambda: True,
        )

    def agent_of(self, tensors: list[torch.Tensor]) -> IpcAgent:
        def noted(pieces: MemoryPieces) -> Callable[[], bool]:
            self.taken.append(int(pieces.sizes.sum()))
            return copies(pieces)

        return IpcAgent(tensors, CPU, FakeDriver({t.data_ptr(): t.nbytes for t in tensors}), noted)

    def read(self, id: int, group: int, blocks: list[int], step: int) -> None:
        ids = int32(blocks)
        move = Transfer(id, "in", "peer", group, ids, ids, source=self.source, step=step)
        self.place.into(move)

    def ended_now(self) -> tuple[list[int], list[int]]:
        return self.place.ended()

    def ended(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []

        def look() -> bool:
            for all, some in zip((finished, failed), self.place.ended(), strict=True):
                all += some
            return not self.place.busy

        wait(look)
        return finished, failed

    def close(self) -> None:
        self.place.close()
        self.peer.close(10.0)


@pytest.fixture
def reader(writer: Writer) -> Iterator[Reader]:
    made = Reader(writer)
    yield made
    made.close()


def test_the_clock_counts_layers_that_have_stored_their_kv(writer: Writer) -> None:
    clock = PeerClock(writer.clock, 0).read
    seen: list[int] = []
    writer.model.nap = lambda: seen.append(clock())
    writer.model.run()
    assert max(seen) <= 0  # programs that run before the first step belong to no step
    seen.clear()
    for step in (0, 1, 5):
        writer.run(step)
        before, *inside = seen
        assert before <= step * LAYERS
        assert inside == [step * LAYERS + i for i in range(1, LAYERS)]
        assert clock() == (step + 1) * LAYERS
        seen.clear()


def test_no_layer_is_read_before_it_was_written(writer: Writer, reader: Reader) -> None:
    """Each layer is written after a different delay, and the reader has requested all of them
    before."""
    draw = random.Random(1)
    writer.run(3)
    for tensor in writer.model.tensors:
        tensor.fill_(-1)
    writer.model.nap = lambda: time.sleep(draw.choice([0.0, 0.002, 0.02]))
    for group in (0, 1):
        reader.read(group, group, [0, 2, 3], 4)
    reader.read(2, 0, [1], 5)
    reader.read(3, 0, [4], 3)  # its step is over
    thread = threading.Thread(target=lambda: [writer.run(step) for step in (4, 5)])
    time.sleep(0.05)
    assert reader.ended_now() == ([3], [])
    thread.start()
    thread.join()
    assert reader.ended() == ([0, 1, 2], [])
    for group, tensor in zip(GROUPS, reader.tensors, strict=True):
        for at, layer in enumerate(group.layers):
            # A block may hold a later step's values, because the writer's model writes all blocks
            # in each step.
            for block, steps in ((0, (4, 5)), (2, (4, 5)), (3, (4, 5))):
                assert set(tensor[block, at].tolist()) <= {100 * step + layer for step in steps}
    for at, layer in enumerate(GROUPS[0].layers):
        assert set(reader.tensors[0][1, at].tolist()) == {500 + layer}
    assert len(reader.taken) > 4  # not all at once


def test_layers_that_have_all_been_written_are_read_at_once(writer: Writer, reader: Reader) -> None:
    writer.run(2)
    reader.read(0, 0, [0, 1], 2)
    assert reader.ended() == ([0], [])
    assert reader.taken == [2 * 3 * WIDTH * 4]


def test_a_clock_that_stands_still_or_is_not_there_fails(
    writer: Writer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_reads, "_STILL_SECONDS", 0.05)
    reader.read(0, 0, [0], 1)
    assert reader.ended() == ([], [0])
    assert sees_clock(reader.source)
    os.close(writer.clock.descriptor)
    assert not sees_clock(reader.source)
    assert not sees_clock(encode_memory([]))
    assert not sees_clock(b"")
    try:
        reader.read(1, 0, [0], 1)
        assert reader.ended() == ([], [1])
    finally:
        writer.hook._handle = None


def test_a_read_from_a_peer_that_has_ended_fails(
    writer: Writer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.read(0, 0, [0], 1)
    assert reader.ended_now() == ([], [])
    monkeypatch.setattr(PeerClock, "alive", False)
    assert reader.ended() == ([], [0])


def test_due_pieces_are_returned_once() -> None:
    now = [0]
    clock: Any = SimpleNamespace(read=lambda: now[0], lives=True)
    pieces: Any = lambda layers: layers  # noqa: E731
    given = LayerPieces(pieces, (3, 4, 8), clock)
    found: list[Any] = []
    for now[0] in (0, 2, 3, 4, 7, 9):
        assert given.left
        found.append(given.take())
    assert found == [None, None, range(1), range(1, 2), None, range(2, 3)]
    assert not given.left


def test_only_writers_of_layer_reads_have_a_clock(folders: dict[str, Any]) -> None:
    for role, transport, mode, there in (
        ("prefill", "ipc", "async", True),
        ("both", "ipc", "async", True),
        ("decode", "ipc", "async", False),
        ("prefill", "nixl", "async", True),
        ("prefill", "ipc", "sync", False),
        ("prefill", "tcp", "async", False),
    ):
        peers = {"role": role, "transport": transport, "kv_transfer": mode}
        hook = open_hook(config_of(folders["full"], peers))
        assert isinstance(hook, LayerClock) == there


@needs_gpu
def test_a_captured_step_writes_the_clock() -> None:
    device = torch.device("cuda:0")
    writer = Writer(device)
    clock = PeerClock(writer.clock, 0).read
    writer.run(0)
    torch.cuda.synchronize()
    assert clock() == LAYERS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.model.run()
    assert clock() == LAYERS
    for step in (1, 7):
        writer.hook.begin(Step(step))  # type: ignore[arg-type]
        graph.replay()
        torch.cuda.synchronize()
        assert clock() == (step + 1) * LAYERS
    writer.hook.close()
