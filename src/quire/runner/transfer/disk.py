"""KV blocks as files, which outlive the engine.

`DIR/<identity>/<2 hex digits>/<32 hex digits>.<group>`: the identity stands for all that a block's
bytes depend on besides its tokens (model, revision, dtype, layout), the digits for the tokens up to
the block's end and the namespace they belong to. A file is a header and a block's bytes. It is
written under another name and then renamed, so that no file is ever half there, and carries a
checksum: what was damaged, or deleted, by whoever, is a miss and nothing else.

The directory holds at most `limit` bytes, files of other identities included; those that were used
longest ago go first. A file's time of modification says when that was.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.errors import ConfigError

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s16s16sQ")
_MAGIC = b"quirekv1"
_NAME = re.compile("[0-9a-f]{32}")
_THREADS = 8
_PARTIAL = ".part"


class DiskStore:
    """The files of one identity under `folder`, and the size of all. IO runs on threads.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, limit: int, identity: str) -> None:
        self._root = folder
        self._folder = folder / identity
        self._limit = limit
        self._salt = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f"probe{os.getpid()}{_PARTIAL}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"disk_cache: cannot write to {str(folder)!r} ({error.strerror})", "disk_cache"
            ) from error
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Bytes of every file, least recently used first."""
        self._total = 0
        self._told: set[str] = set()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="quire-disk")
        self._scan()

    def _scan(self) -> None:
        found: list[tuple[int, Path, int]] = []
        for identity in _folders(self._root):
            for folder in _folders(identity.path):
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:
                    for entry in entries:
                        if not entry.is_file(follow_symlinks=False):
                            continue
                        if entry.name.endswith(_PARTIAL):
                            os.unlink(entry.path)  # from an engine that died
                            continue
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime_ns, Path(entry.path), stat.st_size))
        for _, path, size in sorted(found):
            self._sizes[path] = size
            self._total += size
        with self._lock:
            self._shrink()

    def keys(self, group: int) -> Int32:
        """Returns the keys of a group's blocks, least recently used first, int32 [n, 4]."""
        suffix = f".{group}"
        with self._lock:
            paths = [p for p in self._sizes if p.parent.parent == self._folder]
        names = [p.stem for p in paths if p.suffix == suffix]
        good = [name for name in names if _NAME.fullmatch(name)]
        return np.frombuffer(bytes.fromhex("".join(good)), dtype=np.int32).reshape(-1, 4)

    def write(self, key: bytes, group: int, data: memoryview) -> Future[bool]:
        """Whether it is there now. data: must stay as it is until then."""
        return self._pool.submit(self._guarded, self._write, key, group, data)

    def read(self, key: bytes, group: int, into: memoryview) -> Future[bool]:
        """Whether it was there, whole; else what `into` holds is undefined."""
        return self._pool.submit(self._guarded, self._read, key, group, into)

    def close(self) -> None:
        """Waits for what has begun; the rest is given up. Idempotent."""
        self._pool.shutdown(cancel_futures=True)

    # -- on threads ----------------------------------------------------------------------------

    def _guarded(self, job: Callable[..., bool], key: bytes, group: int, data: Any) -> bool:
        path = self._folder / key.hex()[:2] / f"{key.hex()}.{group}"
        try:
            return job(path, key, data)
        except FileNotFoundError:
            self._forget(path)  # deleted by someone: no reason to speak of it
            return False
        except OSError as error:
            self._tell_once(error.strerror or type(error).__name__)
            self._forget(path)
            return False

    def _write(self, path: Path, key: bytes, data: memoryview) -> bool:
        header = _HEADER.pack(_MAGIC, key, self._checksum(key, data), len(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}{_PARTIAL}")
        try:
            with open(partial, "wb", buffering=0) as file:
                file.write(header)
                if file.write(data) != len(data):
                    raise OSError("no space for a block")
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        with self._lock:
            self._total -= self._sizes.pop(path, 0)
            self._sizes[path] = len(header) + len(data)
            self._total += self._sizes[path]
            self._shrink()
            return path in self._sizes

    def _read(self, path: Path, key: bytes, into: memoryview) -> bool:
        header = bytearray(_HEADER.size)
        with open(path, "rb", buffering=0) as file:
            count = os.readv(file.fileno(), [header, into])
            whole = os.fstat(file.fileno()).st_size == _HEADER.size + len(into) == count
        if not whole or bytes(header) != _HEADER.pack(
            _MAGIC, key, self._checksum(key, into), len(into)
        ):
            self._tell_once("a file of the KV cache is damaged; such files are deleted")
            path.unlink(missing_ok=True)
            self._forget(path)
            return False
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
        os.utime(path)
        return True

    def _shrink(self) -> None:
        """Deletes what is too much. The lock is held."""
        while self._total > self._limit and self._sizes:
            path, size = self._sizes.popitem(last=False)
            self._total -= size
            with contextlib.suppress(OSError):
                path.unlink()

    def _checksum(self, key: bytes, data: memoryview) -> bytes:
        """Returns the checksum of a block's bytes and of all that they depend on."""
        return hashlib.blake2b(data, digest_size=16, key=key, salt=self._salt).digest()

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._total -= self._sizes.pop(path, 0)

    def _tell_once(self, what: str) -> None:
        with self._lock:
            if what in self._told:
                return
            self._told.add(what)
        _log.warning("disk cache: %s", what)


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def identity(model: Path, *facts: object) -> str:
    """Stands for a model's files as they are and for `facts`, as a folder's name. Files of weights
    are known by name, size and time of modification: they are not read."""
    digest = hashlib.blake2b(digest_size=16)
    for fact in facts:
        digest.update(repr(fact).encode() + b"\0")
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        real = file.resolve()  # the hub's cache links to files named by their contents
        stat = real.stat()
        digest.update(repr((file.name, real.name, stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()
