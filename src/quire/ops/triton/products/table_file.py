"""Times calls on a GPU inside a CUDA graph, and stores tables of measurements in files."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.resources
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
import triton

from quire.system import cache_folder


def graph_us(
    calls: Sequence[Callable[[], object]], us_guess: float, stream: torch.cuda.Stream
) -> float:
    """Returns the time per call in a CUDA graph of `calls`, in µs.

    It is the best of three replays of about a millisecond each.

    Args:
        us_guess: rough estimate of the µs of a call.
        stream: stream of the capture.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:  # Kernels compile and cuBLAS takes its workspace before the capture.
            call()
        stream.synchronize()
        # Threads of a process group may call the device during the capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        graph.replay()
        repeats = max(2, round(1000.0 / (us_guess * len(calls))))
        best = math.inf
        for _ in range(3):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e3 / repeats)
    return best / len(calls)


# -- files of measurements, in the user's cache directory --------------------------------------


def slug(card: str) -> str:
    """Returns the name of a card in a form for file names, such as "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def table_path(kind: str, card: str, *more: str) -> Path:
    """Returns the path of this user's table of a kind, for a card and this version of Triton.

    Args:
        more: more parts of the file's name.
    """
    name = "-".join([slug(card), f"triton{triton.__version__}", *more])
    return cache_folder() / kind / f"{name}.json"


def write_whole(path: Path, text: str) -> None:
    """Writes a file. If it fails, an existing file stays unchanged.

    Raises:
        OSError: its folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(text)
    draft.replace(path)


TIMED_FOLDERS = ("products", "experts")
"""Folders of `quire.ops.triton` with the kernels and planners on which a table's times depend. The
files directly in that package (launch, norm, activation, ...) count as well."""


def hash_sources(package: Traversable) -> str:
    """Returns a hash of the sources on which a table's times and plans depend.

    Args:
        package: the folder of `quire.ops.triton`.
    """
    digest = hashlib.sha256()
    for name, source in sorted(_timed_sources(package, "")):
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()[:12]


def _timed_sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yields the path and the bytes of each source below a folder, inside the package."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if prefix or entry.name in TIMED_FOLDERS:
                yield from _timed_sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield prefix + entry.name, entry.read_bytes()


@functools.cache
def sources_hash() -> str:
    """Returns the hash in the file names of this user's tables.

    Tables are not used with other sources, because other kernels have other times, and another
    planner may not know a stored plan."""
    return hash_sources(importlib.resources.files("quire.ops.triton"))


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[bool]:
    """Yields whether this process is the only one that may measure for a table's file.

    The process holds a lock on a file next to it, which ends with the process.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
