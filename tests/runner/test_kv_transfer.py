"""Blocks are copied to the host's pool and to files, and restored unchanged."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM
from quire.arrays import int32
from quire.config import EngineArgs
from quire.errors import ConfigError, QuireError
from quire.plan import Transfer
from quire.runner.transfer import disk
from quire.runner.transfer.disk import DiskStore, identity
from quire.runner.transfer.host import HostPlace, HostPool
from quire.runner.transfer.layout import BlockLayout
from quire.runner.transfer.place import KVTransfer
from quire.runner.transfer.places import tiers


def tensors() -> list[list[torch.Tensor]]:
    """Two groups; the second with a tensor of scales whose blocks are no multiple of 16 bytes."""
    make = torch.Generator().manual_seed(0)
    return [
        [torch.randn(6, 2, 4, generator=make)],
        [torch.randint(0, 99, (6, 8), generator=make).byte(), torch.randn(6, 3, generator=make)],
    ]


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, (count, 4)).astype(np.int32)


def finish(transfer: KVTransfer) -> tuple[list[int], list[int]]:
    finished: list[int] = []
    failed: list[int] = []
    for _ in range(5000):
        more = transfer.ended(patient=True)
        finished += more[0]
        failed += more[1]
        if not transfer.busy:
            break
    return finished, failed


def test_blocks_come_back_elsewhere() -> None:
    groups = tensors()
    before = [[t.clone() for t in group] for group in groups]
    transfer = KVTransfer(tiers(groups, slots=(4, 4)))
    for group in range(2):
        moves = [
            Transfer(10 + group, "out", "host", group, int32([1, 5]), slots=int32([3, 0])),
            Transfer(20 + group, "in", "host", group, int32([0, 2]), slots=int32([0, 3])),
        ]
        transfer.start(moves, "out")
        assert finish(transfer) == ([10 + group], [])
        transfer.start(moves, "in")
        assert finish(transfer) == ([20 + group], [])
        for now, was in zip(groups[group], before[group], strict=True):
            assert torch.equal(now[[0, 2]], was[[5, 1]])
            assert torch.equal(now[[1, 3, 4, 5]], was[[1, 3, 4, 5]])


def test_a_block_is_restored_from_its_file(tmp_path: Path) -> None:
    groups = tensors()[1:]
    was = [t.clone() for t in groups[0]]
    names = keys(2)
    store = DiskStore(tmp_path, 10_000, "a")
    transfer = KVTransfer(tiers(groups, slots=(4,), disk=store))
    transfer.start([Transfer(1, "out", "host", 0, int32([4, 2]), slots=int32([0, 1]))], "out")
    transfer.start(
        [Transfer(2, "out", "disk", 0, int32([]), slots=int32([0, 1]), keys=names)], "out"
    )
    assert sorted(finish(transfer)[0]) == [1, 2]
    transfer.close()

    again = DiskStore(tmp_path, 10_000, "a")
    assert sorted(again.keys(0).tolist()) == sorted(names.tolist())
    assert len(again.keys(1)) == 0
    groups[0][0].zero_()
    transfer = KVTransfer(tiers(groups, slots=(4,), disk=again))
    transfer.start([Transfer(3, "in", "disk", 0, int32([]), slots=int32([2, 3]), keys=names)], "in")
    assert finish(transfer) == ([3], [])
    transfer.start([Transfer(4, "in", "host", 0, int32([0, 1]), slots=int32([2, 3]))], "in")
    for now, then in zip(groups[0], was, strict=True):
        assert torch.equal(now[[0, 1]], then[[4, 2]])
    assert DiskStore(tmp_path, 10_000, "another model").keys(0).tolist() == []


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "swap", "delete"])
def test_a_damaged_file_is_a_miss_and_logged_once(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 1 << 20, "a")
    names = [key.tobytes() for key in keys(3)]
    for name in names:
        assert store.write(name, 0, memoryview(name * 8)).result()
    files = [next(tmp_path.glob(f"a/*/{name.hex()}.0")) for name in names]
    for file, other in itertools.pairwise(files):
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[-1] ^= 1
        elif damage == "cut":
            data = data[:-1]
        elif damage == "grow":
            data += b"x"
        elif damage == "swap":
            data = bytearray(other.read_bytes())
        file.write_bytes(data)
        if damage == "delete":
            file.unlink()
    into = bytearray(128)
    with caplog.at_level(logging.WARNING):
        assert not store.read(names[0], 0, memoryview(into)).result()
        assert not store.read(names[1], 0, memoryview(into)).result()
    assert len(caplog.records) == (0 if damage == "delete" else 1)
    assert store.read(names[2], 0, memoryview(into)).result()
    assert bytes(into) == names[2] * 8
    assert store.keys(0).tolist() == [keys(3)[2].tolist()]
    assert store.write(names[0], 0, memoryview(names[0] * 8)).result()
    assert store.read(names[0], 0, memoryview(into)).result()


def test_files_of_another_model_are_not_taken_for_ones_own(tmp_path: Path) -> None:
    name = keys(1)[0].tobytes()
    assert DiskStore(tmp_path, 1 << 20, "a").write(name, 0, memoryview(name)).result()
    (tmp_path / "a").rename(tmp_path / "b")
    assert not DiskStore(tmp_path, 1 << 20, "b").read(name, 0, memoryview(bytearray(16))).result()


def test_a_folder_that_becomes_read_only_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    store, into = DiskStore(tmp_path, 1 << 20, "a"), bytearray(16)
    name = keys(1)[0].tobytes()
    assert store.write(name, 0, memoryview(name)).result()
    monkeypatch.setattr(os, "utime", refuse)
    assert store.read(name, 0, memoryview(into)).result()
    assert bytes(into) == name


def test_the_folder_may_vanish(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache", 1 << 20, "a")
    name = keys(1)[0].tobytes()
    assert store.write(name, 0, memoryview(name)).result()
    for file in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "cache").rmdir()
    assert not store.read(name, 0, memoryview(bytearray(16))).result()
    assert store.write(name, 0, memoryview(name)).result()
    assert store.read(name, 0, memoryview(bytearray(16))).result()


def test_the_folder_stays_within_its_size(tmp_path: Path) -> None:
    data, names = bytes(1000), [key.tobytes() for key in keys(6)]
    old = DiskStore(tmp_path, 10_000, "old model")
    old.write(names[5], 0, memoryview(data)).result()
    old.close()
    store = DiskStore(tmp_path, 3500, "a")
    for name in names[:3]:
        assert store.write(name, 0, memoryview(data)).result()
    assert not list(tmp_path.glob("old model/*/*"))
    assert store.read(names[0], 0, memoryview(bytearray(1000))).result()
    assert store.write(names[3], 0, memoryview(data)).result()
    kept = {key.tobytes() for key in store.keys(0)}
    assert kept == {names[0], names[2], names[3]}
    assert not DiskStore(tmp_path / "small", 10, "a").write(names[0], 0, memoryview(data)).result()
    again = DiskStore(tmp_path, 1500, "a")
    assert len(again.keys(0)) == 1


def test_a_full_disk_is_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            return super().write(data[: len(data) // 2])

    store = DiskStore(tmp_path, 1 << 20, "a")
    name = keys(1)[0].tobytes()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", lambda path, *_, **__: Full(path, "w"), raising=False)
        assert not store.write(name, 0, memoryview(name)).result()
    assert caplog.messages == ["disk cache: No space left on device"]
    assert not [path for path in (tmp_path / "a").glob("*/*") if path.is_file()]
    assert store.write(name, 0, memoryview(name)).result()


def test_a_file_that_cannot_be_read_for_now_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the folder would exceed its size by this file."""

    def failing(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    data, names = bytes(1000), [key.tobytes() for key in keys(3)]
    store = DiskStore(tmp_path, 2500, "a")
    for name in names[:2]:
        assert store.write(name, 0, memoryview(data)).result()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "_open_file", failing)
        assert not store.read(names[0], 0, memoryview(bytearray(1000))).result()
    assert store.write(names[2], 0, memoryview(data)).result()
    assert len([path for path in (tmp_path / "a").glob("*/*") if path.is_file()]) == 2


def test_unfinished_files_of_a_dead_engine_are_removed(tmp_path: Path) -> None:
    DiskStore(tmp_path, 1000, "a").close()
    folder = tmp_path / "a" / "00"
    folder.mkdir(parents=True)
    (folder / f"{0:032x}.1-2.part").write_bytes(b"quirekv1 and half a block")
    (folder / f"{1:032x}.1-2.part").write_bytes(b"")
    store = DiskStore(tmp_path, 1000, "a")
    assert list(folder.iterdir()) == []
    assert len(store.keys(0)) == 0


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Files with the size and names of the cache's files are still not the cache's."""
    store = DiskStore(tmp_path, 3000, "a")
    name = keys(1)[0].tobytes()
    folder = tmp_path / "a" / name.hex()[:2]
    folder.mkdir()
    inside = tmp_path / "photos" / "2024"
    inside.mkdir(parents=True)
    others = [
        folder / f"{name.hex()}.0",
        folder / f"{name.hex()}.1-2.part",
        folder / "video.part",
        folder / "not a key.0",
        inside / "party.jpg",
        inside / "video.part",
    ]
    for file in others:
        file.write_bytes(b"?" * 5000)
    os.mkfifo(folder / f"{name.hex()}.7")
    store.close()
    store = DiskStore(tmp_path, 3000, "a")
    assert not store.read(name, 0, memoryview(bytearray(16))).result()
    assert not store.read(name, 7, memoryview(bytearray(16))).result()
    for other in keys(5)[1:]:
        store.write(other.tobytes(), 0, memoryview(bytes(1000))).result()
    assert all(file.read_bytes() == b"?" * 5000 for file in others)


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ConfigError, match="is no cache of Quire's, as it holds 'thesis'"):
        DiskStore(tmp_path, 1000, "a")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis"]


def test_a_file_system_that_does_not_answer_ends_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 1 << 20, "a")
    answers = threading.Event()
    read = store._read
    monkeypatch.setattr(store, "_read", lambda *given: answers.wait() and read(*given))
    names = keys(9)
    for name in names:
        store.write(name.tobytes(), 0, memoryview(bytes(64))).result()
    groups = tensors()
    places = tiers(groups, slots=(9, 9), disk=store)
    transfer, host = KVTransfer(places), places["host"]
    assert isinstance(host, HostPlace)
    slots, none = int32(range(9)), int32([])
    transfer.start([Transfer(1, "in", "disk", 0, none, slots=slots, keys=names)], "in")
    assert transfer.ended(patient=False) == ([], [])
    monkeypatch.setattr(disk, "STUCK_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        assert transfer.ended(patient=True) == ([], [1])
        transfer.start([Transfer(2, "in", "disk", 0, none, slots=slots, keys=names)], "in")
        assert transfer.ended(patient=True) == ([], [2])
    assert len([r for r in caplog.records if "is off" in r.message]) == 1
    before = bytes(host.pool.view(0, 0))
    answers.set()
    transfer.close()
    assert bytes(host.pool.view(0, 0)) == before


def test_a_folder_that_does_not_answer_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(disk, "_OPEN_SECONDS", 0.01)
    monkeypatch.setattr(DiskStore, "_scan", lambda self: answers.wait())
    with pytest.raises(ConfigError, match="does not answer"):
        DiskStore(tmp_path, 1000, "a")
    answers.set()


def test_an_unusable_folder_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_cache: cannot write"):
        DiskStore(tmp_path / "file", 1000, "a")


def test_identity_follows_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    first = identity(tmp_path, "bfloat16")
    assert identity(tmp_path, "bfloat16") == first != identity(tmp_path, "float16")
    weights.write_bytes(b"12")
    second = identity(tmp_path, "bfloat16")
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    third = identity(tmp_path, "bfloat16")
    (tmp_path / "model.gguf").symlink_to(weights)
    fourth = identity(tmp_path, "bfloat16")
    assert len({first, second, third, fourth}) == 4


def test_weights_rounded_otherwise_have_files_of_their_own(tmp_path: Path) -> None:
    for quantization in (None, "int8"):
        LLM(
            device="cpu", kv_cache_gb=0.05, host_cache_gb=0.01, disk_cache=str(tmp_path),
            quantization=quantization,
        ).shutdown()  # fmt: skip
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_invalid_cache_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="disk_cache needs host_cache_gb"):
        EngineArgs(disk_cache="x")
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        EngineArgs(host_cache_gb=1, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="finite"):
        EngineArgs(host_cache_gb=float("inf"))
    with pytest.raises(ConfigError, match="disk_cache_gb > 0"):
        EngineArgs(host_cache_gb=1, disk_cache="x", disk_cache_gb=0)
    layouts = [BlockLayout(group) for group in tensors()]
    assert HostPool.slots_within(layouts, (6, 6), 1000) == (1000 // (32 + 16 + 16),) * 2
    assert HostPool.slots_within(layouts, (60, 3), 1000) == (1000 * 60 // 2016, 1)
    with pytest.raises(ConfigError, match="no room for a single"):
        HostPool.slots_within(layouts, (6, 6), 10)
    with pytest.raises(ConfigError, match="of free memory"):
        HostPool.slots_within(layouts, (6, 6), 10**15)


def test_unknown_places_are_refused() -> None:
    transfer = KVTransfer(tiers(tensors(), slots=(1, 1)))
    for place in ("disk", "peer"):
        with pytest.raises(QuireError, match="no place"):
            transfer.start([Transfer(0, "in", place, 0, int32([]))], "in")
