"""Reads of another process's memory with the real library, and their end when that process ends."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from quire.arrays import int32
from quire.errors import NIXL, ConfigError
from quire.runner.transfer.engine_memory import RankMemory, find_pieces, group_memory
from quire.runner.transfer.layer_reads import WrittenPieces
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.nixl_agent import NixlAgent
from quire.runner.transfer.remote_reads import Read, ReadPart

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in NIXL), reason="needs the extra `nixl`"
)
BLOCKS, SIZE = 64, 1 << 20
CPU = torch.device("cpu")


def serve(connection: Connection) -> None:
    """Offers its memory to readers until it receives the signal to end."""
    tensor = torch.full((BLOCKS, SIZE), 7, dtype=torch.uint8)
    agent = NixlAgent([tensor], CPU)
    layout = BlockLayout([tensor])
    connection.send(RankMemory(agent.metadata, "DRAM", 0, [group_memory(layout, True)]))
    connection.recv()


class Writer:
    def __init__(self) -> None:
        own, given = multiprocessing.Pipe()
        self.process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=serve, args=(given,), daemon=True
        )
        self.process.start()
        self.memory: RankMemory = own.recv()
        self._connection = own  # at its end the process ends

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Reader:
    def __init__(self) -> None:
        self.tensor = torch.zeros(BLOCKS, SIZE, dtype=torch.uint8)
        self.layout = BlockLayout([self.tensor])
        self.agent = NixlAgent([self.tensor], CPU)

    def read(self, writer: Writer, blocks: int = BLOCKS) -> Read:
        ids = int32(range(blocks))
        pieces = find_pieces(self.layout, ids, writer.memory.groups[0], ids)
        assert pieces is not None
        read = Read([ReadPart(writer.memory, WrittenPieces(pieces))], lambda: True)
        self.agent.read(read)
        return read


def wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    # Within a host a read would be over at once.
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = Reader()
    yield made
    made.agent.close(10.0)


@needs_nixl
def test_reads_fail_when_the_process_they_read_ends(reader: Reader) -> None:
    writer, other = Writer(), Writer()
    first = reader.read(writer, 1)
    wait(lambda: first.good is not None)
    assert first.good
    assert (reader.tensor[0] == 7).all()
    assert not reader.tensor[1:].any()
    reads = [reader.read(writer) for _ in range(20)]
    wait(lambda: any(read.begun for read in reads))
    writer.kill(signal.SIGKILL)
    wait(lambda: all(read.good is not None for read in reads))
    assert not reads[-1].good
    # Other processes are still read, and the dead one is not.
    late, fine = reader.read(writer), reader.read(other)
    wait(lambda: late.good is not None and fine.good is not None)
    assert (late.good, fine.good) == (False, True)
    other.kill(signal.SIGKILL)


@needs_nixl
def test_a_read_of_a_process_that_stands_still_is_under_way(reader: Reader) -> None:
    writer, other = Writer(), Writer()
    assert_read(reader, writer)
    writer.kill(signal.SIGSTOP)
    stuck = reader.read(writer)
    assert_read(reader, other)
    assert stuck.good is None
    writer.kill(signal.SIGCONT)
    wait(lambda: stuck.good is not None)
    assert stuck.good
    for each in (writer, other):
        each.kill(signal.SIGKILL)


def assert_read(reader: Reader, writer: Writer) -> None:
    read = reader.read(writer, 2)
    wait(lambda: read.good is not None)
    assert read.good


def test_a_missing_library_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.args import ServerArgs

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make in (lambda: NixlAgent([], CPU), lambda: ServerArgs(role="decode", transport="nixl")):
        with pytest.raises(ConfigError, match=r"package nixl-cu12.*extra 'nixl'"):
            make()
