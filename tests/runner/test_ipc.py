"""Engines that read each other's KV cache through memory handles. A stand-in for CUDA's driver
opens the handles; everything else is real. On a GPU, the driver opens them, too."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.arrays import int32
from quire.errors import ConfigError, QuireError
from quire.features.disaggregation.facts import facts_of
from quire.runner.transfer import ipc_agent
from quire.runner.transfer.engine_memory import (
    MemoryPieces,
    RankMemory,
    find_pieces,
    group_memory,
)
from quire.runner.transfer.ipc_agent import IpcAgent, open_ipc_agent
from quire.runner.transfer.layer_reads import LayerPieces, WrittenPieces
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.process_memory import Allocation, ProcessMemory, start_time
from quire.runner.transfer.remote_reads import Read, ReadPart
from quire.runner.transfer.shared_pages import SharedFile, SharedPages
from tests.features.disaggregation.test_disagg_engines import alone, check, config_of, folders, make
from tests.fork_server import context

__all__ = ["folders", "make"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")
SHIFT = 1 << 40
"""Bytes from where allocations are to where the stand-in maps them."""


class FakeDriver:
    """Opens memory of this process at other addresses."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes
        self.opened: list[int] = []

    def allocation(self, address: int) -> tuple[int, int]:
        return address - 16, self.sizes[address] + 32

    def export(self, base: int) -> bytes:
        return base.to_bytes(64, "little")

    def open(self, handle: bytes, size: int) -> int:
        base = int.from_bytes(handle, "little")
        if base == 0:
            raise QuireError("CUDA: no such handle")
        self.opened.append(base + SHIFT)
        return base + SHIFT

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def stop(self) -> None:
        self.sizes.clear()


def copies(pieces: MemoryPieces) -> Callable[[], bool]:
    """Copies immediately, and reports the end later."""
    for here, there, size in pieces.each():
        ctypes.memmove(here, there - SHIFT, size)
    told = iter([False, False])
    return lambda: next(told, True)


def fake_agent(tensors: list[torch.Tensor], device: torch.device) -> IpcAgent:
    driver = FakeDriver({t.data_ptr(): t.nbytes for t in tensors})
    return IpcAgent(tensors, device, driver, copies)


@pytest.mark.parametrize(
    ("model", "mode", "kv"),
    [("full", "async", "int8"), ("window", "async", "float32"), ("state", "sync", "float32")],
)
def test_tokens_are_those_of_one_engine(
    folders: dict[str, Path],
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    mode: str,
    kv: str,
) -> None:
    monkeypatch.setattr(ipc_agent, "open_ipc_agent", fake_agent)
    behind: list[int] = []
    take = LayerPieces.take
    monkeypatch.setattr(LayerPieces, "take", lambda self: behind.append(1) or take(self))  # type: ignore[func-returns-value]
    expected = alone(folders[model], kv_cache_dtype=kv)
    check(make(folders[model], mode, transport="ipc", kv_cache_dtype=kv), expected)
    assert bool(behind) == (model != "state")  # states go at the end


@pytest.mark.parametrize(
    ("model", "mode", "ranks"),
    [
        ("full", "async", (1, 1)),
        ("window", "async", (1, 1)),
        ("state", "async", (1, 2)),
        pytest.param("full", "sync", (2, 1), marks=pytest.mark.slow),
        pytest.param("window", "async", (1, 2), marks=pytest.mark.slow),
        pytest.param("state", "sync", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_on_a_cpu_processes_read_each_other(
    folders: dict[str, Path], make: Any, model: str, mode: str, ranks: tuple[int, int]
) -> None:
    check(make(folders[model], mode, transport="ipc", ranks=ranks), alone(folders[model]))


def pages(size: int = 2 * mmap.PAGESIZE) -> torch.Tensor:
    """Returns zeros in separate pages, as in a cache."""
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE), dtype=torch.uint8)


def serve_pages(connection: Connection, size: int) -> None:
    """Shares pages, writes them, and runs until it is killed."""
    tensor = pages(size)
    shared = SharedPages([tensor])
    connection.send((shared.export(tensor.data_ptr()), os.getpid()))
    tensor.fill_(int(connection.recv()))
    connection.send(None)
    connection.recv()


def test_pages_of_another_process_are_read_and_nothing_else_of_it() -> None:
    size = 3 * mmap.PAGESIZE + 40
    own, given = multiprocessing.Pipe()
    process = context().Process(target=serve_pages, args=(given, size))
    process.start()
    handle, pid = own.recv()
    mine = SharedPages([])
    begin = mine.open(handle, size)
    seen = (ctypes.c_uint8 * size).from_address(begin)
    assert set(seen) == {0}
    own.send(7)
    own.recv()
    assert set(seen) == {7}  # what it writes later
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(3, 0, 0, 0, 0) == 1  # PR_GET_DUMPABLE, as it was
    process.kill()
    process.join()
    assert set(seen) == {7}  # its memory stays as long as it is mapped
    with pytest.raises(QuireError, match=f"process {pid}: No such"):
        mine.open(handle, size)
    mine.close(begin)


def test_only_shared_pages_are_opened() -> None:
    tensor = pages()
    shared = SharedPages([tensor, torch.zeros(0, dtype=torch.uint8)])
    base, size = shared.allocation(tensor.data_ptr())
    assert (base, size) == (tensor.data_ptr(), tensor.nbytes)
    handle = shared.export(base)
    file = msgspec.msgpack.decode(handle, type=SharedFile)
    with open(os.devnull) as other:
        for changed in ({"name": "quire-cache-0"}, {"descriptor": other.fileno()}, {"pid": 0}):
            told = msgspec.msgpack.encode(msgspec.structs.replace(file, **changed))
            with pytest.raises(QuireError, match="process "):
                shared.open(told, size)
    for wrong in (size + mmap.PAGESIZE, 1 << 40, 0, -1):
        with pytest.raises(QuireError, match="process "):
            shared.open(handle, wrong)
    shrinks = os.memfd_create("quire-cache-1", os.MFD_ALLOW_SEALING)
    os.ftruncate(shrinks, 100)
    told = msgspec.msgpack.encode(SharedFile(os.getpid(), shrinks, "quire-cache-1"))
    with pytest.raises(QuireError, match="its file may shrink"):
        shared.open(told, 100)
    os.close(shrinks)
    shared.stop()
    with pytest.raises(QuireError, match="No such file"):
        shared.open(handle, size)
    tensor.fill_(3)  # it stays this process's
    with pytest.raises(QuireError, match="does not begin with a page"):
        SharedPages([pages()[1:]])


def test_a_cache_that_cannot_be_shared_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ConfigError, match=r"cannot be shared \(no file in memory .*transport=tcp"):
        open_ipc_agent([pages()], CPU)


def test_engines_of_different_hosts_do_not_match(folders: dict[str, Path]) -> None:
    config = config_of(folders["full"], None)
    facts = facts_of(config, (), (), "ipc")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    assert facts.transport == f"ipc on host {boot[:8]}"
    assert len(facts.transport) <= 32


class Reader:
    """Reads blocks into its own memory."""

    def __init__(self, agent: IpcAgent, tensor: torch.Tensor) -> None:
        self.agent = agent
        self.tensor = tensor
        self.layout = BlockLayout([tensor])

    def read(self, memory: RankMemory, blocks: int) -> bool:
        ids = int32(range(blocks))
        pieces = find_pieces(self.layout, ids, memory.groups[0], ids)
        assert pieces is not None
        read = Read([ReadPart(memory, WrittenPieces(pieces))], lambda: True)
        self.agent.read(read)
        wait(lambda: read.good is not None)
        return bool(read.good)


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture
def reader() -> Iterator[Reader]:
    tensor = torch.zeros(4, 32, dtype=torch.uint8)
    made = Reader(fake_agent([tensor], CPU), tensor)
    yield made
    made.agent.close(10.0)


def memory_of(tensor: torch.Tensor, metadata: bytes) -> RankMemory:
    return RankMemory(metadata, "DRAM", 0, [group_memory(BlockLayout([tensor]), True)])


def test_memory_out_of_range_or_not_mappable_is_not_read(reader: Reader) -> None:
    source = torch.full((4, 32), 7, dtype=torch.uint8)
    peer = fake_agent([source], CPU)
    good = msgspec.msgpack.decode(peer.metadata, type=ProcessMemory)
    assert reader.read(memory_of(source, peer.metadata), 2)
    assert (reader.tensor[:2] == 7).all()
    assert not reader.tensor[2:].any()
    other = torch.zeros(4, 32, dtype=torch.uint8)
    gone = msgspec.structs.replace(good, started="1")
    closed = msgspec.structs.replace(
        good, allocations=[*good.allocations, Allocation(1, 1, bytes(64))]
    )
    for metadata, tensor in (
        (peer.metadata, other),
        (msgspec.msgpack.encode(gone), source),
        (msgspec.msgpack.encode(closed), source),
        (b"\x00", source),
    ):
        assert not reader.read(memory_of(tensor, metadata), 1)
    wait(lambda: not reader.agent._broken)
    assert reader.agent._opener.opened == []  # type: ignore[attr-defined]
    assert reader.read(memory_of(source, peer.metadata), 4)
    peer.close(10.0)


def test_memory_of_a_process_that_has_ended_is_given_back(reader: Reader) -> None:
    source = torch.full((4, 32), 7, dtype=torch.uint8)
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    assert process.pid is not None
    started = start_time(process.pid)
    allocation = Allocation(
        source.data_ptr(), source.nbytes, source.data_ptr().to_bytes(64, "little")
    )
    told = ProcessMemory(process.pid, started, [allocation])
    assert reader.read(memory_of(source, msgspec.msgpack.encode(told)), 4)
    opened = reader.agent._opener.opened  # type: ignore[attr-defined]
    assert len(opened) == 1
    os.kill(process.pid, signal.SIGKILL)
    wait(lambda: not opened)  # although no one has waited for its end
    process.join()


# -- on a GPU ----------------------------------------------------------------------------------

BLOCKS, SIZE = 64, 1 << 20


def serve(connection: Connection, device: str) -> None:
    """Offers its memory to readers until it receives the signal to end."""
    tensor = torch.arange(BLOCKS, device=device, dtype=torch.uint8)[:, None].expand(-1, SIZE)
    tensor = tensor.contiguous()
    torch.cuda.synchronize(device)
    agent = open_ipc_agent([tensor], torch.device(device))
    layout = BlockLayout([tensor])
    connection.send(RankMemory(agent.metadata, "VRAM", 0, [group_memory(layout, True)]))
    connection.recv()


@needs_gpu
@pytest.mark.parametrize("size", [SIZE, 1 << 10])
def test_memory_of_another_process_s_gpu_is_read(size: int) -> None:
    here, there = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
    own, given = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(given, there))
    process.start()
    memory: RankMemory = own.recv()
    target = torch.zeros(BLOCKS, SIZE, dtype=torch.uint8, device=here)
    agent = open_ipc_agent([target], torch.device(here))
    begins = np.arange(0, BLOCKS * SIZE, size, dtype=np.int64)
    pieces = MemoryPieces(
        begins + target.data_ptr(),
        begins + memory.groups[0].addresses[0],
        np.full(len(begins), size, dtype=np.int64),
    )
    for killed in (False, False, True):
        target.zero_()
        torch.cuda.synchronize()
        read = Read([ReadPart(memory, WrittenPieces(pieces))], lambda: True)
        agent.read(read)
        if killed:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        wait(lambda read=read: read.good is not None)  # type: ignore[misc]
        if not killed:
            assert read.good
            assert torch.equal(target[:, 0].cpu(), torch.arange(BLOCKS, dtype=torch.uint8))
            assert torch.equal(target[:, -1].cpu(), torch.arange(BLOCKS, dtype=torch.uint8))
    wait(lambda: not agent._peers)
    torch.cuda.synchronize()  # a peer's death is no error of this process
    process.join()
    agent.close(10.0)
