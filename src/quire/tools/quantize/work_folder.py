"""A folder with the results of an unfinished quantization, from which a later run continues."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ConfigError
from quire.models.files import DTYPES
from quire.system import open_regular

_JOB, _STATES = "job.json", "states.safetensors"


@dataclass(slots=True)
class BlocksDone:
    """The progress of a quantization.

    Attributes:
        blocks: number of blocks that are done.
        states: hidden states before the next block, by name.
        errors: the error of each module.
        plain: modules that were not rounded.
    """

    blocks: int
    states: dict[str, Tensor]
    errors: dict[str, float] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


class WorkFolder:
    """A folder next to the output folder, which it replaces when the model is complete.

    Args:
        out: the output folder.
        about: everything on which the result depends.

    Raises:
        ConfigError: the output folder exists or cannot be made, an unfinished folder was begun with
            other settings, or another process uses it.
    """

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        try:
            self._open(out, about)
        except OSError as error:
            raise ConfigError(f"cannot make {out}: {error}", "out") from error

    def _open(self, out: Path, about: Mapping[str, Any]) -> None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists already", "out")
        # The finished folder can replace an empty folder, but not a link or a mounted volume.
        self.out = out = out.resolve()
        if out.is_mount():
            raise ConfigError(f"{out} is a mounted volume: name a folder in it", "out")
        self.folder = out.with_name(out.name + ".partial")
        job = self.folder / _JOB
        begun = job.with_suffix(".tmp")
        if not job.exists() and self.folder.exists() and set(self.folder.iterdir()) - {begun}:
            raise ConfigError(f"{self.folder} exists and is not an unfinished model", "out")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        told = json.dumps(about, sort_keys=True, default=str)
        if not job.exists():
            begun.write_text(told, "utf-8")
            begun.replace(job)
        elif job.read_text("utf-8") != told:
            self.close()
            raise ConfigError(
                f"{self.folder} was begun with another model, text or settings; remove it", "out"
            )

    def load(self) -> BlocksDone | None:
        """Returns the progress of an earlier run, or None."""
        if not (self.folder / _STATES).exists():
            return None
        with self._opened(_STATES) as opened:
            about = opened.metadata()
            states = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        found = json.loads(about["progress"])
        return BlocksDone(found["blocks"], states, found["errors"], found["plain"])

    def save(self, progress: BlocksDone) -> None:
        """Stores the progress. A kill during this leaves the old or the new progress on disk."""
        told = {"blocks": progress.blocks, "errors": progress.errors, "plain": progress.plain}
        self._write(_STATES, progress.states, {"progress": json.dumps(told)})

    def sizes(self, name: str) -> dict[str, int]:
        """Returns the bytes of each tensor of a file of the model, from its header."""
        with self._opened(name) as opened:
            views = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            return {
                key: math.prod(view.get_shape()) * DTYPES[view.get_dtype()].itemsize
                for key, view in views.items()
            }

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Opens a file of the model. Raises ConfigError if it has changed since it was written."""
        file = self.folder / name
        try:
            with safe_open(file, framework="pt") as opened:
                yield opened
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged; remove {self.folder}: {error}", "out") from error

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a file of the model."""
        self._write(name, tensors, {"format": "pt"})

    def _write(self, name: str, tensors: Mapping[str, Tensor], about: dict[str, str]) -> None:
        temporary = self.folder / f"{name}.tmp"
        try:
            save_file(dict(tensors), temporary, metadata=about)
            # The library creates files that only the owner can read.
            temporary.chmod(0o644)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        except (SafetensorError, OSError) as error:
            temporary.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write {self.folder / name}: {error}; the same command continues after the "
                "layers that are done",
                "out",
            ) from error

    def finish(self) -> None:
        """Renames the folder to the output folder, then deletes the files of the progress.

        A kill at any time leaves either a model or a folder from which a run can continue."""
        if self.out.exists():
            self.out.rmdir()
        self.folder.rename(self.out)
        for name in (_JOB, _STATES):
            (self.out / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlocks the folder."""
        os.close(self._lock)

    def copy(self, file: Path) -> None:
        """Copies a file of the original."""
        shutil.copyfile(file, self.folder / file.name)


def _locked(folder: Path) -> int:
    """Opens and locks a folder. The lock ends when the folder is closed or the process ends."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ConfigError(f"another process is making {folder}", "out") from None
    return opened


def fingerprint(file: Path) -> str:
    """Returns a digest of a file's content."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
