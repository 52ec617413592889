"""Measured plans of products: one table for each card, in files of one format.

A table is JSON: {"card": ..., "triton": ..., "entries": {key: plan}}. Tables that ship with the
package come first, and the user's table overrides their entries. The user's tables lie in the cache
directory. Their names contain the card, Triton's version and a hash of the kernels' sources."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import triton

from quire.system import cache_folder


class Plan(Protocol):
    """One way to run a product."""

    def as_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Returns the plan that `as_json` described.

        Raises:
            ValueError, KeyError, TypeError: the data is something else.
        """
        ...


S = TypeVar("S")
P = TypeVar("P", bound=Plan)


class Plans(Generic[S, P]):
    """The measured plans of one kind of product, by the keys of their shapes.

    Args:
        kind: folder of the user's tables in the cache directory.
        plan: class of the plans.
        key_of: returns the key of a shape.
        shipped: folder of the package's tables, or None.
    """

    def __init__(
        self, kind: str, plan: type[P], key_of: Callable[[S], str],
        shipped: Traversable | None = None,
    ) -> None:  # fmt: skip
        self.key_of = key_of
        self._kind, self._plan, self._shipped = kind, plan, shipped
        self._tables: dict[str, dict[str, P]] = {}

    def path(self, card: str) -> Path:
        """Returns the path of the user's table for a card, this Triton and these sources."""
        name = f"{slug(card)}-triton{triton.__version__}-{sources_hash()}.json"
        return cache_folder() / self._kind / name

    def entries(self, card: str) -> dict[str, P]:
        """Returns a card's plans by key, of the shipped and of the user's table.

        Files are read in the first call. Without them there are no plans."""
        found = self._tables.get(card)
        if found is None:
            shipped = self._read(self._shipped / f"{slug(card)}.json") if self._shipped else {}
            found = self._tables[card] = {**shipped, **self._read(self.path(card))}
        return found

    def keep(self, card: str, entries: Mapping[str, P]) -> Path:
        """Adds plans to the user's table of a card, all or none of them, and returns its path.

        Raises:
            OSError: the cache directory cannot be written to.
        """
        path = self.path(card)
        _write_whole(path, self.dumps(card, {**self._read(path), **entries}))
        self.forget()
        return path

    def forget(self) -> None:
        """Makes the next calls read the files again."""
        self._tables.clear()

    def dumps(self, card: str, entries: Mapping[str, P]) -> str:
        """Returns a table's text."""
        plans = {key: plan.as_json() for key, plan in sorted(entries.items())}
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(e)}" for key, e in plans.items())
        head = f'"card": {json.dumps(card)},\n"triton": {json.dumps(triton.__version__)}'
        return f'{{\n{head},\n"entries": {{\n{lines}\n}}\n}}\n'

    def loads(self, text: str) -> dict[str, P]:
        """Returns the entries of a text that `dumps` wrote.

        Raises:
            ValueError, KeyError, TypeError: the text is something else.
        """
        entries = dict(json.loads(text)["entries"])
        return {key: self._plan.from_json(plan) for key, plan in entries.items()}

    def _read(self, source: Traversable) -> dict[str, P]:
        """Returns a file's entries, or an empty dict if it is missing or of another version."""
        try:
            return self.loads(source.read_text())
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def slug(card: str) -> str:
    """Returns the name of a card in a form for file names, such as "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def _write_whole(path: Path, text: str) -> None:
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
