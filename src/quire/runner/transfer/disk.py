"""KV blocks as files, which outlive the engine.

A block's path is `DIR/<identity>/<2 hex digits>/<32 hex digits>.<group>`. The cache owns the folder
`DIR`. The identity is a hash of the model, revision, dtype and layout. The digits are the block
hash: they stand for the namespace and all tokens up to the block's end.

A file is a header and a block's bytes. It is written under another name and then renamed, so that
readers never see half a file. The header has a checksum. A file that is damaged or deleted is a
cache miss, and does no other harm.

The folder holds at most `limit` bytes, including files of other identities. The least recently used
files are deleted first; a file's modification time is the time of its last use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from quire.arrays import Int32
from quire.errors import ConfigError
from quire.runner.transfer.threads import DaemonThreads
from quire.system import read_bounded, stored_weights

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s16s16sQ")
_MAGIC = b"quirekv1"
_NAME = re.compile(r"[0-9a-f]{32}\.[0-9]+")
_PARTIAL = re.compile(r"[0-9a-f]{32}\.[0-9]+-[0-9]+\.part")
_MARKER = "quire-kv-cache"
_HARMLESS = frozenset({"lost+found"})
"""Names of entries that file systems themselves put into an empty folder."""
_THREADS = 8
_OPEN_SECONDS = 60.0
STUCK_SECONDS = 10.0
"""If reading or writing one block takes longer, the file system counts as dead."""


class DiskStore:
    """Reads and writes the files of one identity, on threads, and limits the size of all files.

    The folder must be empty, or hold the file that marks it as a cache. Only files with the name
    and the header of a block are ever deleted.

    If the file system stops responding, the engine runs on without this cache: see `stuck`.

    Args:
        folder: `DIR`.
        limit: most bytes of all files.
        identity: see the module.

    Raises:
        ConfigError: the folder cannot be made or written to, does not respond, or holds other
            files.
    """

    def __init__(self, folder: Path, limit: int, identity: str) -> None:
        self._root = folder
        self._folder = folder / identity
        self._limit = limit
        self._salt = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Bytes of every file, least recently used first."""
        self._total = 0
        self._told: set[str] = set()
        self._threads = DaemonThreads(_THREADS, "quire-disk")
        opened = self._threads.submit(self._open)
        try:
            opened.result(_OPEN_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"disk_cache: {str(folder)!r} does not answer", "disk_cache"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"disk_cache: cannot write to {str(folder)!r} ({error.strerror})", "disk_cache"
            ) from error

    def _open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        marker = self._root / _MARKER
        if not marker.is_file() and (others := set(os.listdir(self._root)) - _HARMLESS):
            raise ConfigError(
                f"disk_cache: {str(self._root)!r} is no cache of Quire's, as it holds "
                f"{min(others)[:100]!r}; name an empty folder, or one that does not exist",
                "disk_cache",
            )
        marker.touch()
        self._folder.mkdir(exist_ok=True)
        probe = self._folder / f"probe{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        self._scan()

    def _scan(self) -> None:
        files: list[tuple[int, Path, int]] = []
        for identity in _folders(self._root):
            for folder in _folders(identity.path):
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:
                    for entry in entries:
                        if not entry.is_file(follow_symlinks=False):
                            continue
                        if _PARTIAL.fullmatch(entry.name):
                            _delete(Path(entry.path))  # An engine that died has left it.
                        elif _NAME.fullmatch(entry.name) and entry.name[:2] == folder.name:
                            status = entry.stat(follow_symlinks=False)
                            files.append((status.st_mtime_ns, Path(entry.path), status.st_size))
        for _, path, size in sorted(files):
            self._sizes[path] = size
            self._total += size
        with self._lock:
            self._shrink()

    @property
    def stuck(self) -> bool:
        """Whether the file system has not responded for `STUCK_SECONDS`.

        From then on the cache is off for good, and every read and write fails at once.
        """
        if self._threads.longest > STUCK_SECONDS:
            self._tell_once(f"{str(self._root)!r} does not answer; the disk cache is off")
            self._threads.abandon()
        return self._threads.abandoned

    def keys(self, group: int) -> Int32:
        """Returns the keys of a group's blocks, least recently used first, int32 [n, 4]."""
        suffix = f".{group}"
        with self._lock:
            paths = [p for p in self._sizes if p.parent.parent == self._folder]
        names = "".join(p.stem for p in paths if p.suffix == suffix)
        return np.frombuffer(bytes.fromhex(names), dtype=np.int32).reshape(-1, 4)

    def write(self, key: bytes, group: int, data: memoryview) -> Future[bool]:
        """Writes a block. The future's result is whether the file exists afterwards.

        Args:
            data: the block's bytes, which must not change until the future is done.
        """
        return self._threads.submit(self._guarded, self._write, key, group, data)

    def read(self, key: bytes, group: int, into: memoryview) -> Future[bool]:
        """Reads a block. The future's result is whether the file existed and was undamaged.

        Args:
            into: receives the block's bytes; its content is undefined if the result is False.
        """
        return self._threads.submit(self._guarded, self._read, key, group, into)

    def close(self) -> None:
        """Waits for reads and writes that have begun, and cancels the others. Idempotent."""
        self._threads.close(STUCK_SECONDS)

    # -- on threads ----------------------------------------------------------------------------

    def _guarded(self, job: Callable[..., bool], key: bytes, group: int, data: Any) -> bool:
        path = self._folder / key.hex()[:2] / f"{key.hex()}.{group}"
        try:
            return job(path, key, data)
        except FileNotFoundError:
            self._forget(path)  # Another process may delete files.
            return False
        except OSError as error:  # The file still counts if it is there.
            self._tell_once(error.strerror or type(error).__name__)
            return False

    def _write(self, path: Path, key: bytes, data: memoryview) -> bool:
        header = _HEADER.pack(_MAGIC, key, self._checksum(key, data), len(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            with open(partial, "wb", buffering=0) as file:
                if file.write(header) + file.write(data) != len(header) + len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
        # The read does not go into the block's own memory, because that memory may have a new owner
        # when a stuck read continues.
        header, data = bytearray(_HEADER.size), bytearray(len(into))
        with _open_file(path) as file:
            count = os.readv(file.fileno(), [header, data])
            whole = os.fstat(file.fileno()).st_size == _HEADER.size + len(into) == count
        if not whole or bytes(header) != _HEADER.pack(
            _MAGIC, key, self._checksum(key, memoryview(data)), len(data)
        ):
            self._tell_once("a file of the KV cache is damaged; such files are deleted")
            _delete(path)
            self._forget(path)
            return False
        with self._lock:
            if self._threads.abandoned:
                return False
            into[:] = data
            if path in self._sizes:
                self._sizes.move_to_end(path)
        with contextlib.suppress(OSError):  # The file is read-only, or was just deleted.
            os.utime(path)
        return True

    def _shrink(self) -> None:
        """Deletes the oldest files until the limit is kept. The caller holds the lock."""
        while self._total > self._limit and self._sizes:
            path, size = self._sizes.popitem(last=False)
            self._total -= size
            _delete(path)

    def _checksum(self, key: bytes, data: memoryview) -> bytes:
        """Returns the checksum of a block's bytes, its key and the identity."""
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


def _open_file(path: Path) -> io.FileIO:
    """Opens a file for reading. Raises OSError if it is not a regular one: a pipe would block."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    file = io.FileIO(os.open(path, flags))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(path)
    return file


def _delete(path: Path) -> None:
    """Deletes a file if it is a block's, whole or damaged."""
    with contextlib.suppress(OSError):
        with _open_file(path) as file:
            begin = file.read(len(_MAGIC))
        if _MAGIC.startswith(begin):
            path.unlink()


def _folders(path: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def identity(model: Path, *facts: object) -> str:
    """Returns a folder name that identifies a model's files and `facts`.

    Weight files count by name, size and modification time, so that they need not be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for fact in facts:
        digest.update(repr(fact).encode() + b"\0")
    config = model / "config.json"
    if config.is_file():
        digest.update(read_bounded(config))
    for file in stored_weights(model):
        # The hub's cache has links to files named by their contents. A folder that was made for a
        # GGUF file has a link to the user's file.
        real = file.resolve()
        status = real.stat()
        known = file.name, real.name, status.st_size, status.st_mtime_ns
        digest.update(repr(known).encode())
    return digest.hexdigest()
